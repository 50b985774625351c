"""Saving and loading checkpoints: ``torch.distributed.checkpoint``, free of the layout that saved them.

::

    checkpoints/step-00000600/
        .metadata  __0_0.distcp  ...    by torch.distributed.checkpoint, under these names:
                                        model.NAME             weights, with the size of the whole tensor
                                        optimizer.NAME.STATE   see distembed.checkpoints.optimizer_state
                                        random.DEVICE.RANK     see distembed.checkpoints.random_state
                                        ranks.NAME.RANK        what each rank has for itself
        progress.json                   written last: step, reader's position, names of optimizers, checksums

Nothing of these files is executed when they are read (:mod:`distembed.checkpoints.metadata`), and what is read is
held against its checksum (:mod:`distembed.checkpoints.verified_files`).

What one plan, kernel and number of ranks has saved, any other loads, as does a module that is not sharded: each rank
reads its own shards of each tensor (:mod:`distembed.checkpoints.shards`) straight into its live weights and states.
Learning rates are not saved; they follow from the step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torchrec.optim.keyed import KeyedOptimizer

from distembed.base.errors import DamagedCheckpoint, RunError, UserError
from distembed.base.ranks import Collectives
from distembed.checkpoints.content import (
    CheckpointContent,
    Progress,
    all_optimizer_names,
    describe_tables,
    live_states,
    live_weights,
)
from distembed.checkpoints.random_state import restore_random_state
from distembed.checkpoints.saved import SavedCheckpoint
from distembed.checkpoints.shards import TensorShards
from distembed.checkpoints.store import CheckpointStore, place_and_name
from distembed.checkpoints.transfer import not_read, read_tensors, write_checkpoint
from distembed.checkpoints.verified_files import DamagedFile
from distembed.optim.live_state import set_step_count
from distembed.sharding.lookup import sharded_lookups

RUN_KEYS = ("step", "samples", "seconds", "reader")
"""What the progress of a run has at least, which :func:`load_run` returns."""


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
        progress: What :func:`load_checkpoint` shall return, as JSON holds it; its ``step`` is the number of steps done,
            which Adam and its kin need to continue.

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

    Nothing of a checkpoint is executed, and each block is held against its checksum.

    Args:
        checkpoint: Local path or URL of a checkpoint that is whole.
        model: A model as for :func:`save_checkpoint`, under any plan on any number of ranks.
        optimizer: The optimizer of its parameters; None to leave optimizer state alone.
        collectives: The ranks; those of the default process group unless given.

    Returns:
        What :func:`save_checkpoint` was given as ``progress``.

    Raises:
        UserError: The checkpoint is of another model or of other optimizers; the error lists the differences, and
            nothing is overwritten. Or it cannot be reached.
        DamagedCheckpoint: It is damaged; some of the live weights may be overwritten.
    """
    return _load(str(checkpoint), model, optimizer, lambda saved: {}, collectives or Collectives()).progress


@dataclass(frozen=True)
class ResumedRun:
    """What a run finds in the checkpoint that it goes on from, beside its model.

    Attributes:
        values: What was saved as the values of its :class:`Progress`.
        tensors: The tensors of it that this rank goes on with, by name: its own or, on another number of ranks, those
            of none, one or several of the ranks that saved, so that each goes to one rank.
        has_checksums: Whether the checkpoint has checksums; those of early versions of distembed have none.
    """

    values: dict[str, Any]
    tensors: dict[str, list[Tensor]]
    has_checksums: bool


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
    return ResumedRun(saved.progress, tensors, saved.has_checksums)


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
    saved: SavedCheckpoint | None = None
    problem: UserError | RunError | None = None
    try:
        saved = SavedCheckpoint.read(checkpoint)
        if differences := saved.differences(weights, describe_tables(model), optimizers):
            problem = UserError(differences)
        else:
            further = _further_shards(saved, further_tensors)
    except (UserError, RunError) as error:
        problem = error
    problems = [found for found in collectives.gather(problem) if found is not None]
    if problems or saved is None:
        # what one rank cannot reach is not damaged
        raise min(problems, key=lambda found: isinstance(found, DamagedCheckpoint))
    if optimizer is not None:
        to_read |= saved.states_to_read(live_states(optimizer, weights))
    to_read |= further
    read_tensors(checkpoint, saved.metadata, to_read, collectives)
    forget_caches(model)
    if optimizer is not None and "step" in saved.progress:
        set_step_count(optimizer, saved.optimizer_steps)
    return saved


def _further_shards(
    saved: SavedCheckpoint, further_tensors: Callable[[SavedCheckpoint], Mapping[str, Tensor]]
) -> dict[str, TensorShards]:
    try:
        return {key: TensorShards.from_value(tensor) for key, tensor in further_tensors(saved).items()}
    except ValueError as error:  # a rank's number that is none
        raise not_read(saved.path, error) from error


def load_weights(checkpoint: Path | str, suffixes: Sequence[str]) -> list[Tensor]:
    """Reads some of the model's weights and nothing else, on one process, without a model.

    Args:
        checkpoint: Local path or URL of a checkpoint that is whole.
        suffixes: How the names of the weights end, after a dot.

    Returns:
        The weights, one a suffix.

    Raises:
        UserError: The checkpoint has no such weight, or cannot be read.
    """
    checkpoint = str(checkpoint)
    read = SavedCheckpoint.read(checkpoint)
    saved, weights = read.tensors, {}
    for suffix in suffixes:
        names = [name for name in saved if name.startswith("model.") and name.endswith(f".{suffix}")]
        if len(names) != 1:
            raise UserError(
                f"{checkpoint} has {len(names)} weights that end in .{suffix}; use the config that the run was started "
                "with."
            )
        weights[names[0]] = read.empty(names[0])
    shards = {name: TensorShards.from_value(tensor) for name, tensor in weights.items()}
    read_tensors(checkpoint, read.metadata, shards, Collectives())
    return list(weights.values())


def forget_caches(model: nn.Module) -> None:
    """Drops rows that a device caches of tables in host memory, which have been read anew."""
    for lookup in sharded_lookups(model):
        lookup.purge()
