"""Reads a run's training rows, prepares batches, and reports unreadable rows and losses that are not finite."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from distembed.base.errors import RunError
from distembed.base.ranks import Collectives, Ranks
from distembed.data.reader import Batch, BatchOrder, BatchReader, Decoding
from distembed.data.reader.decode import too_many_unreadable
from distembed.tasks import Task
from distembed.tasks.base import BatchPosition
from distembed.training.config import Config


def prepared_batch(task: Task, batch: Batch, position: BatchPosition | None, device: torch.device) -> Batch:
    """Returns a batch with the task's additions, in page-locked memory where a GPU will copy it.

    Args:
        task: The task.
        batch: This rank's rows.
        position: Where the rows stand in training; None for an evaluation.
        device: The device on which the model computes.
    """
    prepared = task.prepare_batch(batch, position)
    return prepared.pin_memory() if device.type == "cuda" else prepared


def training_reader(config: Config, ranks: Ranks, prefetch_batches: int = 4) -> BatchReader:
    """Returns a reader of this rank's rows of the training split, at its beginning.

    Args:
        config: The whole config.
        ranks: This rank among all.
        prefetch_batches: Number of batches that are made ahead; with 0 nothing is decoded ahead either.

    Raises:
        UserError: The dataset cannot be read.
    """
    return BatchReader(
        config.data.require_path(),
        config.data.train,
        BatchOrder(config.train.batch_size, seed=config.train.seed),
        rank=ranks.rank,
        world_size=ranks.world_size,
        prefetch_batches=prefetch_batches,
        decoding=Decoding(
            config.data.threads_of_rank(ranks.local_world_size) if prefetch_batches else 0,
            config.data.skip_unreadable,
            pins=ranks.device.type == "cuda",
        ),
    )


def gather_unreadable(
    known: Mapping[str, str], reader: BatchReader, most: int, say: Callable[[str], None]
) -> dict[str, str]:
    """Returns the reason for each row group that some rank could not read; all ranks call it.

    Args:
        known: The reasons of the previous call.
        reader: This rank's reader.
        most: Most row groups that may be unreadable.
        say: Shows a line for each that is new.

    Raises:
        UserError: They are more, on every rank.
    """
    found = dict(known)
    for of_rank in Collectives().gather(reader.unreadable):
        found |= of_rank
    if len(found) > most:
        raise too_many_unreadable(found, most)
    for name in sorted(found.keys() - known.keys()):
        say(f"warning: rows of others take the place of those of {name}: {found[name]}")
    return found


def keep_batch(reader: BatchReader, folder: Path, rank: int, step: int, loss: float) -> RunError:
    """Writes this rank's rows of a step to a file in the run's folder, and returns the error that names it.

    Args:
        reader: A reader of this rank's rows, which is moved to the step's batch.
        folder: The run's folder.
        rank: This rank's number.
        step: Number of the step, from 1.
        loss: The loss of the step on this rank.
    """
    epoch, batch = divmod(step - 1, reader.batches_per_epoch)
    path = folder / f"not-finite-step-{step}-rank-{rank}.npz"
    reader.load_state_dict({**reader.state_dict(), "epoch": epoch, "batch": batch})
    next(iter(reader)).write(path)
    return RunError(
        f"The loss is {loss} at step {step} (epoch {epoch}, batch {batch}, rank {rank}). "
        f"This rank's rows of that batch are in {path}; look for extreme values among the dense features. "
        "Checkpoints are from before it. Try lower train.dense_optimizer.learning_rate and "
        "train.sparse_optimizer.learning_rate, a warm-up (train.dense_optimizer.schedule.warmup=0.1), "
        "or train.precision=fp32."
    )
