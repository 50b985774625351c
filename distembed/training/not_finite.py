"""What is kept, and said, of a step whose loss is not finite: the rows of its batch, in a file."""

from pathlib import Path

from distembed.base.errors import RunError
from distembed.data.reader import BatchReader


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
