"""Saving and loading checkpoints that any plan, kernel and number of ranks can read.

::

    checkpoints/step-00000600/
        rank-0.blocks  ...   the numbers (distembed.checkpoints.blocks)
        index.json           name, type, size and blocks of each tensor (distembed.checkpoints.content has the names)
        progress.json        written last: step, reader's position, names of optimizers, checksums

Nothing of these files is executed when they are read, and every byte is verified against a checksum. Each rank reads
its own shards of each tensor straight into its live weights and states; a module that is not sharded reads them too.
Learning rates are not saved; they follow from the step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torchrec.optim.keyed import KeyedOptimizer

from distembed.base.errors import UserError
from distembed.base.ranks import Collectives
from distembed.checkpoints.blocks import DamagedFile
from distembed.checkpoints.content import (
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
from distembed.checkpoints.transfer import not_read, on_every_rank, read_tensors, write_checkpoint
from distembed.optim.live_state import set_step_count
from distembed.sharding.lookup import sharded_lookups

RUN_KEYS = ("step", "samples", "seconds", "reader")
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


def load_checkpoint(
    checkpoint: Path | str,
    model: nn.Module,
    optimizer: KeyedOptimizer | None = None,
    collectives: Collectives | None = None,
) -> dict[str, Any]:
    """Reads weights, and optimizer state where asked, into the live model; all ranks call it.

    Args:
        checkpoint: Local path or URL of a checkpoint that is whole.
        model: A model as for :func:`save_checkpoint`, under any plan on any number of ranks.
        optimizer: The optimizer of its parameters; None to leave optimizer state alone.
        collectives: The ranks; None for the ranks of the default process group.

    Returns:
        The ``progress`` that :func:`save_checkpoint` was given.

    Raises:
        UserError: The checkpoint is of another model or of other optimizers; the error lists the differences, and
            nothing is overwritten. Or it cannot be reached.
        DamagedCheckpoint: It is damaged; some of the live weights may be overwritten.
    """
    return _load(str(checkpoint), model, optimizer, lambda saved: {}, collectives or Collectives()).progress


@dataclass(frozen=True)
class ResumedRun:
    """The state of a run in a checkpoint, apart from its model.

    Attributes:
        values: The values of its :class:`Progress`.
        tensors: The tensors of its :class:`Progress` that this rank resumes with, by name. On another number of ranks
            than saved them, each rank's tensor goes to one rank, so that a rank has none, one or several.
    """

    values: dict[str, Any]
    tensors: dict[str, list[Tensor]]


def load_run(checkpoint: str, model: nn.Module, optimizer: KeyedOptimizer, collectives: Collectives) -> ResumedRun:
    """Reads a checkpoint as :func:`load_checkpoint` does, and continues torch's random numbers; all ranks call it.

    Raises:
        UserError: As for :func:`load_checkpoint`.
        DamagedCheckpoint: As for :func:`load_checkpoint`.
    """
    rank, world_size = collectives.rank, collectives.world_size
    random: dict[str, Tensor] = {}
    own: dict[str, Tensor] = {}

    def run_tensors(saved: SavedCheckpoint) -> dict[str, Tensor]:
        random.update(saved.random_state_to_read(rank))
        own.update(saved.rank_tensors_to_read(rank, world_size))
        return random | own

    saved = _load(checkpoint, model, optimizer, run_tensors, collectives)
    if "random.cpu.0" not in random or any(key not in saved.progress for key in RUN_KEYS):
        raise not_read(checkpoint, DamagedFile("it is not the checkpoint of a run"))
    states = {key.split(".")[1]: state for key, state in random.items() if key.endswith(f".{rank}")}
    try:
        restore_random_state(random["random.cpu.0"], states if saved.world_size == world_size else {}, rank, world_size)
    except RuntimeError as error:  # of another length
        raise not_read(checkpoint, error) from error
    tensors: dict[str, list[Tensor]] = {}
    for key, tensor in own.items():
        name = key.partition(".")[2].rpartition(".")[0]
        tensors.setdefault(name, []).append(tensor)
    return ResumedRun(saved.progress, tensors)


def _load(
    checkpoint: str,
    model: nn.Module,
    optimizer: KeyedOptimizer | None,
    further_tensors: Callable[[SavedCheckpoint], Mapping[str, Tensor]],
    collectives: Collectives,
) -> SavedCheckpoint:
    """Reads a checkpoint into the live model and its optimizer, and into further tensors; all ranks call it."""
    weights = live_weights(model)
    optimizers = None if optimizer is None else all_optimizer_names(optimizer, collectives)
    to_read = {f"model.{name}": shards for name, shards in weights.items()}

    def read_description() -> SavedCheckpoint:
        saved = SavedCheckpoint.read(checkpoint)
        if differences := saved.differences(weights, describe_tables(model), optimizers):
            raise UserError(differences)
        try:
            to_read.update({key: TensorShards.from_value(tensor) for key, tensor in further_tensors(saved).items()})
        except ValueError as error:  # the number of a rank is none
            raise not_read(checkpoint, error) from error
        return saved

    saved = on_every_rank(collectives, read_description)
    if optimizer is not None:
        to_read |= saved.states_to_read(live_states(optimizer, weights))
    read_tensors(checkpoint, saved.tensors, to_read, collectives)
    forget_caches(model)
    if optimizer is not None and "step" in saved.progress:
        set_step_count(optimizer, saved.optimizer_steps)
    return saved


def load_weights(checkpoint: Path | str, suffixes: Sequence[str]) -> list[Tensor]:
    """Reads some of the model's weights and nothing else, on one process, without a model.

    Args:
        checkpoint: Local path or URL of a checkpoint that is whole.
        suffixes: Ends of the names of the weights, after a dot.

    Returns:
        The weights, one a suffix.

    Raises:
        UserError: The checkpoint has no weight of that name, or cannot be read.
    """
    saved, weights = SavedCheckpoint.read(str(checkpoint)), {}
    for suffix in suffixes:
        names = [name for name in saved.tensors if name.startswith("model.") and name.endswith(f".{suffix}")]
        if len(names) != 1:
            raise UserError(
                f"{checkpoint} has {len(names)} weights that end in .{suffix}; use the config that the run was started "
                "with."
            )
        weights[names[0]] = saved.empty(names[0])
    shards = {name: TensorShards.from_value(tensor) for name, tensor in weights.items()}
    read_tensors(saved.path, saved.tensors, shards, Collectives())
    return list(weights.values())


def forget_caches(model: nn.Module) -> None:
    """Drops the rows of tables in host memory that a device caches, after the tables have been read anew."""
    for lookup in sharded_lookups(model):
        lookup.purge()
