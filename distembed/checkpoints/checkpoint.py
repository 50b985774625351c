"""Saving and loading checkpoints: ``torch.distributed.checkpoint``, free of the layout that saved them.

::

    checkpoints/step-00000600/
        .metadata  __0_0.distcp  ...    by torch.distributed.checkpoint, under these names:
                                        model.NAME             weights, with the size of the whole tensor
                                        optimizer.NAME.STATE   see distembed.checkpoints.optimizer_state
                                        random.DEVICE.RANK     see distembed.checkpoints.random_state
        progress.json                   written last: step, reader's position, names of optimizers

What one plan, kernel and number of ranks has saved, any other loads, as does a module that is not sharded: each rank
reads its own shards of each tensor (:mod:`distembed.checkpoints.shards`) straight into its live weights and states.
Learning rates are not saved; they follow from the step.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.types import ShardedModule
from torchrec.optim.keyed import KeyedOptimizer

from distembed.checkpoints.content import (
    CheckpointContent,
    all_optimizer_names,
    describe_tables,
    live_states,
    live_weights,
)
from distembed.checkpoints.random_state import restore_random_state
from distembed.checkpoints.saved import SavedCheckpoint
from distembed.checkpoints.shards import TensorShards
from distembed.checkpoints.store import CheckpointStore, place_and_name
from distembed.checkpoints.transfer import read_tensors, write_checkpoint
from distembed.errors import UserError
from distembed.optim.live_state import set_step_count
from distembed.ranks import Collectives


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
    content = CheckpointContent.collect(name, model, optimizer, progress or {}, collectives)
    write_checkpoint(CheckpointStore(place), content, None, collectives)


def load_checkpoint(
    checkpoint: Path | str,
    model: nn.Module,
    optimizer: KeyedOptimizer | None = None,
    restore_random: bool = False,
    collectives: Collectives | None = None,
) -> dict[str, Any]:
    """Reads weights, and optimizer state where asked, into the live model; all ranks call it.

    Args:
        checkpoint: Local path or URL of a checkpoint that is whole.
        model: A model as for :func:`save_checkpoint`, under any plan on any number of ranks.
        optimizer: The optimizer of its parameters; None to leave optimizer state alone.
        restore_random: Whether torch's random number generators continue from the saved state.
        collectives: The ranks; those of the default process group unless given.

    Returns:
        What :func:`save_checkpoint` was given as ``progress``.

    Raises:
        UserError: The checkpoint is of another model or of other optimizers; the error lists the differences, and
            nothing is overwritten. Or it is damaged, when some of the live weights may be overwritten.
    """
    checkpoint, collectives = str(checkpoint), collectives or Collectives()
    weights = live_weights(model)
    optimizers = None if optimizer is None else all_optimizer_names(optimizer, collectives)
    saved, problem = None, None
    try:
        saved = SavedCheckpoint.read(checkpoint)
        problem = saved.differences(weights, describe_tables(model), optimizers)
    except UserError as error:
        problem = str(error)
    problems = [found for found in collectives.gather(problem) if found is not None]
    if problems or saved is None:
        raise UserError(problems[0])
    to_read = {f"model.{name}": shards for name, shards in weights.items()}
    if optimizer is not None:
        to_read |= saved.states_to_read(live_states(optimizer, weights))
    random = saved.random_state_to_read(collectives.rank) if restore_random else {}
    to_read |= {key: TensorShards.from_value(tensor) for key, tensor in random.items()}
    read_tensors(checkpoint, to_read, collectives)
    _forget_caches(model)
    if optimizer is not None and "step" in saved.progress:
        set_step_count(optimizer, saved.progress["step"])
    if restore_random:
        rank, world_size = collectives.rank, collectives.world_size
        own = {key.split(".")[1]: state for key, state in random.items() if key.endswith(f".{rank}")}
        restore_random_state(random["random.cpu.0"], own if saved.world_size == world_size else {}, rank, world_size)
    return saved.progress


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
    saved = SavedCheckpoint.read(checkpoint).tensors
    weights = {}
    for suffix in suffixes:
        names = [name for name in saved if name.startswith("model.") and name.endswith(f".{suffix}")]
        if len(names) != 1:
            raise UserError(
                f"{checkpoint} has {len(names)} weights that end in .{suffix}; use the config that the run was started "
                "with."
            )
        entry = saved[names[0]]
        weights[names[0]] = torch.empty(entry.size, dtype=entry.properties.dtype)
    read_tensors(checkpoint, {name: TensorShards.from_value(tensor) for name, tensor in weights.items()}, Collectives())
    return list(weights.values())


def _forget_caches(model: nn.Module) -> None:
    """Drops rows that a device caches of tables in host memory, which have been read anew."""
    sharded = (module for module in model.modules() if isinstance(module, ShardedModule))
    for module in sharded:
        for lookup in getattr(module, "_lookups", ()):
            while isinstance(lookup, nn.parallel.DistributedDataParallel):
                lookup = lookup.module
            lookup.purge()
