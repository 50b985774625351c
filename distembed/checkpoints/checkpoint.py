"""Checkpoints: ``torch.distributed.checkpoint``, free of the layout that saved them.

::

    checkpoints/step-00000600/
        .metadata  __0_0.distcp  ...    by torch.distributed.checkpoint, under these names:
                                        model.NAME             weights, with the size of the whole tensor
                                        optimizer.NAME.STATE   see distembed.checkpoints.optimizer_state
                                        random.DEVICE.RANK     see distembed.checkpoints.random_state
        progress.json                   written last: step, reader's position, kinds of optimizers

What one plan, kernel and number of ranks has saved, any other loads, as does a module that is not sharded: each rank
reads its own boxes of each tensor (:mod:`distembed.checkpoints.shards`) straight into its live weights and states.
Learning rates are not saved; they follow from the step.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.distributed.types import ShardedModule
from torchrec.optim.keyed import KeyedOptimizer

from distembed.checkpoints.optimizer_state import blend_columns, optimizer_kinds, optimizer_states, set_step
from distembed.checkpoints.random_state import random_state, restore_random_state
from distembed.checkpoints.shards import ShardsLoadPlanner, ShardsSavePlanner, TensorShards
from distembed.checkpoints.store import CheckpointStore, place_and_name, read_last_file
from distembed.embedding.config import meaning_of_weights
from distembed.embedding.tables import CompositionalTables
from distembed.errors import RunError, UserError
from distembed.optim.states import IS_ROW_WISE
from distembed.ranks import Collectives
from distembed.sharding.parameters import ShardedParameters

_MAX_DIFFERENCES = 10


def save_checkpoint(
    checkpoint: Path | str,
    model: nn.Module,
    optimizer: KeyedOptimizer | None = None,
    progress: Mapping[str, Any] | None = None,
) -> None:
    """Writes a checkpoint and returns when it is whole; all ranks call it.

    Args:
        checkpoint: local path or URL of the folder to make.
        model: a ``DistributedModelParallel``, or a plain module that every rank has alike.
        optimizer: of its parameters; for a ``DistributedModelParallel`` a ``CombinedOptimizer`` of the fused one and
            any others.
        progress: what :func:`load_checkpoint` shall return, as JSON holds it; its ``step`` is the number of steps done,
            which Adam and its kin need to go on.

    Raises:
        UserError: for a path that names no checkpoint, an optimizer whose state has no names here, or no ``step``.
        RunError: where it cannot be written, with the reason.
    """
    place, name = place_and_name(str(checkpoint))
    together = Collectives()
    content = CheckpointContent.of(name, model, optimizer, progress or {}, together)
    write_checkpoint(CheckpointStore(place), content, None, together)


def load_checkpoint(
    checkpoint: Path | str,
    model: nn.Module,
    optimizer: KeyedOptimizer | None = None,
    restore_random: bool = False,
    together: Collectives | None = None,
) -> dict[str, Any]:
    """Reads weights, and optimizer state where asked, into the live model; all ranks call it.

    Args:
        checkpoint: local path or URL of one that is whole.
        model: as for :func:`save_checkpoint`, under any plan on any number of ranks.
        optimizer: of its parameters.
        restore_random: whether torch's random number generators go on from the saved state.
        together: the ranks; those of the default process group unless given.

    Returns:
        What :func:`save_checkpoint` was told as ``progress``.

    Raises:
        UserError: for a checkpoint of another model or of other optimizers, with the differences, before anything is
            overwritten; for a damaged one, when some of the live weights may have been.
    """
    checkpoint, together = str(checkpoint), together or Collectives()
    weights = _live_weights(model)
    kinds = None if optimizer is None else _of_all_ranks(optimizer_kinds(optimizer), together)
    saved, problem = None, None
    try:
        saved = _Saved.read(checkpoint)
        problem = saved.difference(weights, _describe_tables(model), kinds)
    except UserError as error:
        problem = str(error)
    problems = [found for found in together.gather(problem) if found is not None]
    if problems or saved is None:
        raise UserError(problems[0])
    wanted = {f"model.{name}": boxes for name, boxes in weights.items()}
    if optimizer is not None:
        wanted |= saved.states_to_read(optimizer, weights)
    random = saved.random_to_read(together) if restore_random else {}
    wanted |= {key: TensorShards.of(tensor) for key, tensor in random.items()}
    _read(checkpoint, wanted, together)
    _forget_caches(model)
    if optimizer is not None and "step" in saved.progress:
        set_step(optimizer, saved.progress["step"])
    if restore_random:
        own = {key.split(".")[1]: state for key, state in random.items() if key.endswith(f".{together.rank}")}
        same = saved.world_size == together.world_size
        restore_random_state(random["random.cpu.0"], own if same else {}, together.rank, together.world_size)
    return saved.progress


def load_weights(checkpoint: Path | str, suffixes: Sequence[str]) -> list[Tensor]:
    """Reads some of the model's weights and nothing else, on one process, without a model.

    Args:
        checkpoint: a whole one.
        suffixes: how the names of the weights end, after a dot.

    Raises:
        UserError: where the checkpoint has no such weight, or cannot be read.
    """
    checkpoint = str(checkpoint)
    saved = _Saved.read(checkpoint).tensors
    state = {}
    for suffix in suffixes:
        names = [name for name in saved if name.startswith("model.") and name.endswith(f".{suffix}")]
        if len(names) != 1:
            raise UserError(
                f"{checkpoint} has {len(names)} weights that end in .{suffix}; use the config that the run was started "
                "with."
            )
        entry = saved[names[0]]
        state[names[0]] = torch.empty(entry.size, dtype=entry.properties.dtype)
    _read(checkpoint, {name: TensorShards.of(tensor) for name, tensor in state.items()}, Collectives())
    return list(state.values())


@dataclass(frozen=True)
class CheckpointContent:
    """What this rank writes of a checkpoint.

    Attributes:
        name: of the checkpoint.
        state: nested dictionaries of boxes.
        last_file: what ``progress.json`` holds.
    """

    name: str
    state: Mapping[str, Mapping[str, TensorShards]]
    last_file: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        name: str,
        model: nn.Module,
        optimizer: KeyedOptimizer | None,
        progress: Mapping[str, Any],
        together: Collectives,
    ) -> "CheckpointContent":
        """Views of the live model; all ranks call it."""
        weights = _live_weights(model)
        states: dict[str, TensorShards] = {}
        kinds: dict[str, str] = {}
        if optimizer is not None:
            for parameter in optimizer_states(optimizer, weights):
                states |= {f"{parameter.name}.{state}": boxes for state, boxes in parameter.states.items()}
            kinds = _of_all_ranks(optimizer_kinds(optimizer), together)
            _require_step(kinds.values(), progress)
        random = {f"{device}.{together.rank}": state for device, state in random_state().items()}
        state = {
            section: {key: boxes.to_save(key, together.rank, together.world_size) for key, boxes in entries.items()}
            for section, entries in (("model", weights), ("optimizer", states))
        }
        state["random"] = {key: TensorShards.of(value) for key, value in random.items()}
        names_of_kind = {kind: sorted(name for name in kinds if kinds[name] == kind) for kind in set(kinds.values())}
        last_file = {
            "world_size": together.world_size,
            "tables": _describe_tables(model),
            "optimizers": names_of_kind,
            "progress": dict(progress),
        }
        return cls(name, state, last_file)

    @property
    def num_bytes(self) -> int:
        """Of this rank's part."""
        return sum(boxes.num_bytes for entries in self.state.values() for boxes in entries.values())

    def copied_to_host(self) -> "CheckpointContent":
        """The same, which training leaves alone."""
        copies = {
            section: {key: boxes.copied_to_host() for key, boxes in entries.items()}
            for section, entries in self.state.items()
        }
        return CheckpointContent(self.name, copies, self.last_file)


@dataclass(frozen=True)
class _Saved:
    """What a checkpoint holds, without the numbers themselves."""

    checkpoint: str
    tensors: Mapping[str, TensorStorageMetadata]
    tables: Mapping[str, str]
    kinds: Mapping[str, str]
    world_size: int
    progress: dict[str, Any]

    @classmethod
    def read(cls, checkpoint: str) -> "_Saved":
        try:
            last_file = read_last_file(checkpoint)
            entries = FsspecReader(checkpoint).read_metadata().state_dict_metadata
            tensors = {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
            kinds = {name: kind for kind, names in last_file["optimizers"].items() for name in names}
            return cls(checkpoint, tensors, last_file["tables"], kinds, last_file["world_size"], last_file["progress"])
        except UserError:
            raise
        except Exception as error:  # a damaged file may fail to read in any way
            raise damaged(checkpoint, error) from error

    def difference(
        self, weights: Mapping[str, TensorShards], tables: Mapping[str, str], kinds: Mapping[str, str] | None
    ) -> str | None:
        """What tells the saved model and its optimizers from the live ones, in words; None where nothing does."""
        saved = {
            key.removeprefix("model."): _describe(entry.size, entry.properties.dtype)
            for key, entry in self.tensors.items()
            if key.startswith("model.")
        }
        live = {name: _describe(boxes.size(), boxes.dtype) for name, boxes in weights.items()}
        differences = _differences(saved, live, "") + _differences(self.tables, tables, "table ")
        if kinds is not None:
            differences += _differences(self.kinds, kinds, "optimizer of ")
        if not differences:
            return None
        shown = "\n  ".join(differences[:_MAX_DIFFERENCES])
        if len(differences) > _MAX_DIFFERENCES:
            shown += f"\n  and {len(differences) - _MAX_DIFFERENCES} more"
        return (
            f"{self.checkpoint} is of another model; {len(differences)} of its parameters, tables or optimizers "
            f"differ:\n  {shown}\nUse the config that the run was started with."
        )

    def states_to_read(self, optimizer: KeyedOptimizer, weights: Mapping[str, TensorShards]) -> dict[str, TensorShards]:
        """Where the live optimizer states are to be read from."""
        wanted: dict[str, TensorShards] = {}
        for parameter in optimizer_states(optimizer, weights):
            prefix = f"optimizer.{parameter.name}."
            saved = [key.removeprefix(prefix) for key in self.tensors if key.startswith(prefix)]
            for name, boxes in parameter.states.items():
                for saved_name, part in blend_columns(name, boxes, saved).items():
                    key = f"{prefix}{saved_name}"
                    before = wanted[key].boxes if key in wanted else []
                    wanted[key] = TensorShards(part.size(), part.dtype, [*before, *part.boxes])
        return wanted

    def random_to_read(self, together: Collectives) -> dict[str, Tensor]:
        """Tensors for the first rank's random state and this rank's."""
        keys = ["random.cpu.0", *[f"random.{device}.{together.rank}" for device in random_state()]]
        return {key: torch.empty(self.tensors[key].size, dtype=torch.uint8) for key in keys if key in self.tensors}


def _describe_tables(model: nn.Module) -> dict[str, str]:
    """What the weights of compositional tables mean, by module and table."""
    return {
        f"{path}.{table.name}".lstrip("."): meaning_of_weights(table)
        for path, module in get_unwrapped_module(model).named_modules()
        if isinstance(module, CompositionalTables | ShardedParameters)
        for table in module.tables()
    }


def _describe(size: torch.Size, dtype: torch.dtype) -> str:
    return f"{tuple(size)} {str(dtype).removeprefix('torch.')}"


def _differences(saved: Mapping[str, str], live: Mapping[str, str], what: str) -> list[str]:
    return [
        f"{what}{name}: {saved.get(name, 'absent')} in the checkpoint, {live.get(name, 'absent')} in the model"
        for name in sorted(saved.keys() | live.keys())
        if saved.get(name) != live.get(name)
    ]


def _live_weights(model: nn.Module) -> dict[str, TensorShards]:
    """Views of all weights and buffers, but those without elements."""
    weights = {name: TensorShards.of(value) for name, value in model.state_dict().items()}
    return {name: boxes for name, boxes in weights.items() if boxes.size().numel()}


def _require_step(kinds: Iterable[str], progress: Mapping[str, Any]) -> None:
    for kind in set(kinds):
        if "exp_avg" in IS_ROW_WISE[kind] and type(progress.get("step")) is not int:
            raise UserError(
                f"progress is {dict(progress)}, without the number of steps done, on which {kind} depends; give "
                'progress={"step": ...}.'
            )


def _of_all_ranks(kinds: dict[str, str], together: Collectives) -> dict[str, str]:
    """A rank knows the optimizers of what it holds alone."""
    return {name: kind for of_rank in together.gather(kinds) for name, kind in of_rank.items()}


def write_checkpoint(
    store: CheckpointStore, content: CheckpointContent, keep: int | None, together: Collectives
) -> None:
    """Writes a checkpoint and declares it whole; all ranks call it, and all raise what any of them does."""
    target = store.path_of(content.name)
    try:
        together.on_first(partial(store.start, content.name))
        dcp.save(
            {section: dict(entries) for section, entries in content.state.items()},
            storage_writer=FsspecWriter(target, per_thread_copy_ahead=0),
            planner=ShardsSavePlanner(),
            process_group=together.group,
        )
        together.on_first(partial(store.finish, content.name, content.last_file))
    except UserError:
        raise
    except (Exception, dcp.api.CheckpointException) as error:  # file systems raise errors of their own kinds
        failure = not_written(store, content.name, error)
        if together.rank == 0:
            with suppress(Exception):
                store.discard(content.name)
        raise failure from error
    if keep is None:
        return
    try:
        together.on_first(partial(store.keep_newest, keep))
    except Exception as error:
        raise RunError(
            f"The checkpoint {target} is written, but older ones in {store.url} could not be removed "
            f"({_reason(error)}). Mend the permissions, then go on with --resume."
        ) from error


def not_written(store: CheckpointStore, name: str, error: BaseException) -> RunError:
    """What is raised where a checkpoint cannot be written."""
    return RunError(
        f"The checkpoint {store.path_of(name)} could not be written ({_reason(error)}){store.room_left()}. Older "
        "checkpoints are kept; free space or mend the permissions, then go on with --resume."
    )


def _read(checkpoint: str, wanted: dict[str, TensorShards], together: Collectives) -> None:
    """Fills the boxes; all ranks call it."""
    try:
        dcp.load(
            wanted,
            storage_reader=FsspecReader(checkpoint),
            planner=ShardsLoadPlanner(flatten_state_dict=False),
            process_group=together.group,
        )
    except (Exception, dcp.api.CheckpointException) as error:  # a damaged file may fail to read in any way
        raise damaged(checkpoint, error) from error


def _forget_caches(model: nn.Module) -> None:
    """Drops rows that a device caches of tables in host memory, which have been read anew."""
    sharded = (module for module in model.modules() if isinstance(module, ShardedModule))
    for module in sharded:
        for lookup in getattr(module, "_lookups", ()):
            while isinstance(lookup, nn.parallel.DistributedDataParallel):
                lookup = lookup.module
            lookup.purge()


def damaged(checkpoint: str, error: BaseException) -> UserError:
    """What is raised where a checkpoint cannot be read."""
    if isinstance(error, (PermissionError, ConnectionError, TimeoutError, ImportError)):
        return UserError(f"{checkpoint} cannot be reached ({_reason(error)}); see that every rank may read it.")
    return UserError(
        f"{checkpoint} cannot be read ({_reason(error)}); if every rank can reach it, it is damaged: remove it to use "
        "the one before."
    )


def _reason(error: BaseException) -> str:
    """An error in one line; torch's own lists the whole traceback of every rank."""
    if isinstance(error, dcp.api.CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}".strip()
