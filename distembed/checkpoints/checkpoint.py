"""Saving and loading checkpoints that any plan, kernel and number of ranks can read.

::

    checkpoints/step-00000600/
        rank-0.blocks  ...   the numbers (distembed.checkpoints.blocks)
        index.json           name, type, size and blocks of each tensor (distembed.checkpoints.content has the names)
        progress.json        written last: step, reader's position, names of optimizers, checksums

Nothing of these files is executed when they are read, and every byte is verified against a checksum. Each rank reads
its own shards of each tensor straight into its live weights and states; a module that is not sharded reads them too.
Learning rates are not saved; they follow from the step.

A model whose tables have more rows than the saved ones reads the known rows; further rows keep their first values::

    saved     | 0 1 2 3 4 5 6 |
    rank 0    | 0 1 2 3 4 |
    rank 1                | 5 6 + + + |
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast

from torch import Tensor, nn
from torchrec.optim.keyed import KeyedOptimizer

from distembed.base.errors import DamagedCheckpoint, RunError, UserError
from distembed.base.ranks import Collectives
from distembed.base.units import enumerate_lines
from distembed.checkpoints.blocks import (
    DamagedFile,
    SavedTensor,
    dtype_name,
    index_bytes,
    map_tensor,
    not_read,
    read_blocks,
    write_blocks,
)
from distembed.checkpoints.content import (
    AVERAGE,
    CheckpointContent,
    Progress,
    all_optimizer_names,
    describe_tables,
    live_states,
    live_weights,
    restore_random_state,
)
from distembed.checkpoints.saved import SavedCheckpoint
from distembed.checkpoints.shards import TensorShards
from distembed.checkpoints.store import CheckpointStore, place_and_name
from distembed.embedding.tables import CompositionalTables
from distembed.optim.live_state import LocalShard, set_step_count
from distembed.sharding.parameters import forget_copies

T = TypeVar("T")
_MOST_SHOWN = 10
_RUN_KEYS = ("step", "samples", "seconds", "reader")
"""Keys that the progress of every run has."""


def save_checkpoint(
    checkpoint: Path | str,
    model: nn.Module,
    optimizer: KeyedOptimizer | None = None,
    progress: Mapping[str, Any] | None = None,
) -> None:
    """Writes a checkpoint and returns when it is whole; all ranks call it.

    Args:
        checkpoint: Local path or URL of the folder to make.
        model: A ``DistributedModelParallel``, or a plain module that every rank has alike.
        optimizer: The optimizer of its parameters; for a ``DistributedModelParallel`` a ``CombinedOptimizer`` of the
            fused one and any others.
        progress: Values for JSON that :func:`load_checkpoint` returns; ``step`` is the number of steps done, which Adam
            and its kin need to continue.

    Raises:
        UserError: The path names no checkpoint, an optimizer's states have no names, or ``step`` is missing.
        RunError: The checkpoint cannot be written; the error gives the reason.
    """
    place, name = place_and_name(str(checkpoint))
    collectives = Collectives()
    content = CheckpointContent.collect(name, model, optimizer, Progress(progress or {}), collectives)
    write_checkpoint(CheckpointStore(place), content, None, collectives)


def write_checkpoint(
    store: CheckpointStore,
    content: CheckpointContent,
    remove_old: Callable[[], None] | None,
    collectives: Collectives,
) -> None:
    """Writes a checkpoint, declares it whole, then removes older ones; all ranks call it, and all raise any error.

    Args:
        store: The place to write to.
        content: This rank's part of the checkpoint.
        remove_old: Called on rank 0 once the checkpoint is whole, to remove older ones; None to keep all.
        collectives: The ranks that write.

    Raises:
        UserError: There is a folder of this name with files that are no checkpoint's.
        RunError: The checkpoint cannot be written, and its folder is removed; or older ones cannot be removed.
    """
    name = content.name
    try:
        collectives.on_first(partial(store.start, name))
        rank_blocks = on_every_rank(collectives, partial(write_blocks, store, name, collectives.rank, content.tensors))
        blocks_by_rank = collectives.gather(rank_blocks)
        collectives.on_first(lambda: store.finish(name, content.last_file, index_bytes(blocks_by_rank)))
    except UserError:
        raise
    except Exception as error:
        if collectives.rank == 0:
            with suppress(Exception):
                store.discard(name)
        if isinstance(error, RunError):
            raise
        raise store.not_written(name, error, content.num_bytes) from error
    if remove_old is None:
        return
    try:
        collectives.on_first(remove_old)
    except Exception as error:
        raise RunError(
            f"The checkpoint {store.checkpoint_path(name)} is written, but older ones in {store.url} could not be "
            f"removed ({type(error).__name__}: {error}). Mend the permissions, then go on with --resume."
        ) from error


def on_every_rank(collectives: Collectives, function: Callable[[], T]) -> T:
    """Calls a function on every rank and returns this rank's value; all ranks call it.

    If it raises ``UserError`` or ``RunError`` on some ranks, all ranks raise one of these errors.
    """
    value: T | None = None
    problem: UserError | RunError | None = None
    try:
        value = function()
    except (UserError, RunError) as error:
        problem = error
    problems = [found for found in collectives.gather(problem) if found is not None]
    if problems:
        # an error other than damage goes first: on DamagedCheckpoint a run falls back to an older checkpoint, which is
        # wrong where one rank merely cannot reach this one
        raise min(problems, key=lambda found: isinstance(found, DamagedCheckpoint))
    return cast(T, value)


def load_checkpoint(
    checkpoint: Path | str,
    model: nn.Module,
    optimizer: KeyedOptimizer | None = None,
    collectives: Collectives | None = None,
    maps_weights: bool = False,
) -> dict[str, Any]:
    """Reads weights, and optimizer state where asked, into the live model; all ranks call it.

    Args:
        checkpoint: Local path or URL of a checkpoint that is whole.
        model: A model as for :func:`save_checkpoint`, under any plan on any number of ranks.
        optimizer: The optimizer of its parameters. None leaves optimizer state alone and loads the model for use, with
            averaged weights where the checkpoint has averages.
        collectives: The ranks; None for the ranks of the default process group.
        maps_weights: Whether parameters of an unsharded model on the CPU may get the checkpoint's files as their
            memory, which takes a sixth of the time of a copy. The files must not be written to while the model is used.

    Returns:
        The ``progress`` that :func:`save_checkpoint` was given.

    Raises:
        UserError: The checkpoint is of another model or of other optimizers; the error lists the differences, and
            nothing is overwritten. Or it cannot be reached.
        DamagedCheckpoint: It is damaged; some of the live weights may be overwritten.
    """
    collectives = collectives or Collectives()
    return _load(str(checkpoint), model, optimizer, collectives, maps_weights=maps_weights)[0].progress


@dataclass(frozen=True)
class ResumedRun:
    """A run's :class:`Progress` as a checkpoint has it: values, and the tensors of single ranks, by name.

    A rank has one tensor of each name. If the number of ranks has changed, it has none, one or several.
    """

    values: dict[str, Any]
    tensors: dict[str, list[Tensor]]


def restore_run(
    checkpoint: str,
    model: nn.Module,
    optimizer: KeyedOptimizer,
    collectives: Collectives,
    averages: Mapping[str, Tensor] | None = None,
) -> ResumedRun:
    """Reads a checkpoint as :func:`load_checkpoint` does, and sets torch's random state; all ranks call it.

    ``averages`` are averages of weights, to be read too. A checkpoint without a run's random state or progress, or
    without these averages, is a :class:`DamagedCheckpoint`.
    """
    rank, world_size = collectives.rank, collectives.world_size
    saved, saved_tensors = _load(
        checkpoint, model, optimizer, collectives, with_run_state=True, averages=averages or {}
    )
    if "random.cpu.0" not in saved_tensors or any(key not in saved.progress for key in _RUN_KEYS):
        raise not_read(checkpoint, DamagedFile("it is not the checkpoint of a run"))
    random: dict[str, Tensor] = {}
    tensors: dict[str, list[Tensor]] = {}
    for key, tensor in saved_tensors.items():  # keys are random.DEVICE.RANK and ranks.NAME.RANK
        section, _, name = key.partition(".")
        name, _, saved_rank = name.rpartition(".")
        if section == "ranks":
            tensors.setdefault(name, []).append(tensor)
        elif saved_rank == str(rank) and saved.world_size == world_size:
            random[name] = tensor
    try:
        restore_random_state(saved_tensors["random.cpu.0"], random, rank, world_size)
    except RuntimeError as error:
        raise not_read(checkpoint, DamagedFile(f"its random state cannot be restored: {error}")) from error
    return ResumedRun(saved.progress, tensors)


def load_grown(
    checkpoint: str, before: nn.Module, model: nn.Module, optimizer: KeyedOptimizer, collectives: Collectives
) -> int:
    """Reads a checkpoint into a model whose tables may have more rows; all ranks call it.

    The first rows of a table get the saved weights and optimizer states. Further rows keep their live values.

    Args:
        checkpoint: Local path or URL of a checkpoint that is whole.
        before: A model of the saved sizes; its numbers are not read, so that it may be on the meta device.
        model: The live model, whose tables may have more rows than ``before``.
        optimizer: The optimizer of its parameters.
        collectives: The ranks.

    Returns:
        The number of steps that the optimizer states have taken in.

    Raises:
        UserError: As for :func:`load_checkpoint` with ``before``, or the live model differs from it in more than rows.
        DamagedCheckpoint: As for :func:`load_checkpoint`.
    """
    return _load(checkpoint, model, optimizer, collectives, before=before)[0].optimizer_steps


def _load(
    checkpoint: str,
    model: nn.Module,
    optimizer: KeyedOptimizer | None,
    collectives: Collectives,
    with_run_state: bool = False,
    before: nn.Module | None = None,
    averages: Mapping[str, Tensor] = MappingProxyType({}),
    maps_weights: bool = False,
) -> tuple[SavedCheckpoint, dict[str, Tensor]]:
    """Reads a checkpoint into the live model and its optimizer; all ranks call it.

    Returns the checkpoint's description and, with ``with_run_state``, the tensors of a run's state by saved tensor.
    ``before`` is a model of the saved sizes, where the live model may have more rows. ``averages`` are filled too.
    """
    weights = live_weights(model)
    saved_weights = weights if before is None else live_weights(before)
    optimizers = None if optimizer is None else all_optimizer_names(optimizer, collectives)
    further: dict[str, Tensor] = {}  # filled by read_description, and with numbers by read_blocks

    def read_description() -> SavedCheckpoint:
        saved = SavedCheckpoint.read(checkpoint)
        problem = saved.differences(saved_weights, describe_tables(before or model), optimizers)
        if problem is None and before is not None:
            problem = _grown_otherwise(checkpoint, before, saved_weights, weights)
        if problem is not None:
            raise UserError(problem)
        if with_run_state:
            further.update(saved.run_tensors_to_read(collectives.rank, collectives.world_size))
        return saved

    saved = on_every_rank(collectives, read_description)
    states = {} if optimizer is None else live_states(optimizer, weights)
    if before is not None:
        num_rows = {name: next(iter(shards.size), 0) for name, shards in saved_weights.items()}
        for name, shards in states.items():
            parameter = name.rpartition(".")[0]
            if shards.size[:1] == weights[parameter].size[:1]:  # a state with rows, not one number for the parameter
                states[name] = _earlier_rows(shards, num_rows[parameter])
        weights = {name: _earlier_rows(shards, num_rows[name]) for name, shards in weights.items()}
    to_read = {f"model.{name}": shards for name, shards in weights.items()}
    to_read |= {name: TensorShards.from_value(tensor) for name, tensor in further.items()}
    to_read |= saved.states_to_read(states)
    to_read |= {f"{AVERAGE}{name}": TensorShards.from_value(average) for name, average in averages.items()}
    # a model without its optimizer is not trained on
    tensors = saved.tensors_for_use() if optimizer is None else saved.tensors
    mapped = _map_weights(checkpoint, model, tensors) if maps_weights else {}
    to_read |= {name: TensorShards.from_value(weight) for name, weight in mapped.items()}
    on_every_rank(collectives, partial(read_blocks, checkpoint, tensors, to_read, mapped.keys()))
    forget_copies(model)
    if optimizer is not None and "step" in saved.progress:
        set_step_count(optimizer, saved.optimizer_steps)
    return saved, further


def _map_weights(checkpoint: str, model: nn.Module, tensors: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
    """Gives parameters on the CPU their files as memory, where the files allow it; returns them by saved tensor."""
    mapped = {}
    for name, parameter in model.named_parameters():
        key = f"model.{name}"
        weight = map_tensor(checkpoint, tensors[key]) if key in tensors and parameter.device.type == "cpu" else None
        if weight is not None:
            parameter.data = mapped[key] = weight
    return mapped


def _grown_otherwise(
    checkpoint: str, before: nn.Module, old: Mapping[str, TensorShards], weights: Mapping[str, TensorShards]
) -> str | None:
    """Returns an error text of the ``weights`` that differ from ``old`` in more than a table's rows, or None."""
    # only weights of the compositional tables of `before`, the model of the saved sizes, may have more rows
    may_grow = {
        f"{path}.{name}".lstrip(".")
        for path, module in before.named_modules()
        if isinstance(module, CompositionalTables)
        for name, _ in module.named_parameters()
    }
    lines = [
        f"{name}: {_size(old.get(name))} before, {_size(weights.get(name))} now"
        for name in sorted(old.keys() | weights.keys())
        if name not in old
        or name not in weights
        or _kind(old[name], name in may_grow) != _kind(weights[name], name in may_grow)
    ]
    if not lines:
        return None
    return (
        f"the model differs from the model of {checkpoint} in more than the rows of tables:"
        f"{enumerate_lines(lines, _MOST_SHOWN)}\nUse the model section and the columns that it was trained with."
    )


def _kind(shards: TensorShards, may_grow: bool) -> tuple[object, ...]:
    """Returns the parts of a tensor's type and size that must not change; rows are left out if they may grow."""
    return shards.dtype, shards.size[1 if may_grow else 0 :]


def _size(shards: TensorShards | None) -> str:
    return "absent" if shards is None else f"{tuple(shards.size)} {dtype_name(shards.dtype)}"


def _earlier_rows(live: TensorShards, num_rows: int) -> TensorShards:
    """Returns views of the parts of live shards that lie within the first ``num_rows`` rows; a scalar as it is."""
    if not live.size or live.size[0] == num_rows:
        return live
    earlier = [
        LocalShard(shard.offsets, shard.tensor[: num_rows - shard.offsets[0]])
        for shard in live.shards
        if shard.offsets[0] < num_rows
    ]
    return TensorShards((num_rows, *live.size[1:]), live.dtype, earlier, live.replicated)


def load_weights(checkpoint: Path | str, suffixes: Sequence[str]) -> list[Tensor]:
    """Reads single weights from a checkpoint, averaged where it has averages, on one process without building a model.

    Returns a weight for each of ``suffixes``, in their order: ``bias`` finds ``model.top.bias``. A suffix that fits no
    weight, or several, is a :class:`UserError`.
    """
    saved, weights = SavedCheckpoint.read(str(checkpoint)), {}
    tensors = saved.tensors_for_use()
    for suffix in suffixes:
        names = [name for name in tensors if name.startswith("model.") and name.endswith(f".{suffix}")]
        if len(names) != 1:
            raise UserError(
                f"{checkpoint} has {len(names)} weights that end in .{suffix}; use the config that the run was started "
                "with."
            )
        weights[names[0]] = saved.empty(names[0])
    read_blocks(saved.path, tensors, {name: TensorShards.from_value(weight) for name, weight in weights.items()})
    return list(weights.values())
