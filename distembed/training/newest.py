"""Reads the newest or best checkpoint of a run, be it that the run still trains and removes older ones meanwhile."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from distembed.base.errors import DamagedCheckpoint, RunError, UserError
from distembed.base.ranks import Collectives
from distembed.checkpoints.store import CheckpointStore, place_and_name, storage_errors
from distembed.training.config import Config
from distembed.training.resume import find_checkpoint

T = TypeVar("T")
_TRIES = 5


def read_newest(
    run_dir: Path,
    config: Config,
    read: Callable[[str], T],
    collectives: Collectives | None = None,
    choice: str | None = None,
) -> T:
    """Returns the result of ``read``, called with the path or URL of a run's checkpoint on all ranks.

    The checkpoint is the best where the run keeps it, else the newest, or the ``choice``. If the run removes it while
    it is read, the best or newest one by then is read.

    Raises:
        UserError: The run has no checkpoint, it cannot be read, or each was removed while it was read.
    """
    collectives = collectives or Collectives()
    for _ in range(_TRIES):
        checkpoint = collectives.on_first(lambda: find_checkpoint(run_dir, config, choice))
        failure: UserError | RunError | None = None
        try:
            returned = read(checkpoint)
        except DamagedCheckpoint as error:
            failure = UserError(f"{error} `distembed train --resume` sets it aside and goes on from the one before.")
        except (UserError, RunError) as error:
            failure = error
        if not any(collectives.gather(failure is not None)):
            return returned
        removed = collectives.on_first(lambda path=checkpoint: is_removed(path))  # type: ignore[misc]
        if not removed:
            raise failure or UserError(f"{checkpoint} could not be read by another rank.")
    raise removed_meanwhile(checkpoint)


def is_removed(checkpoint: str) -> bool:
    """Returns whether a checkpoint that was whole is so no longer.

    Raises:
        UserError: The place cannot be reached.
    """
    place, name = place_and_name(checkpoint)
    with storage_errors(place):
        return not CheckpointStore(place).is_whole(name)


def removed_meanwhile(checkpoint: str) -> UserError:
    """Returns the error of a checkpoint that its run has removed while it was read."""
    return UserError(
        f"{checkpoint} was removed while it was read, since its run trains on and keeps the newest ones only; try "
        "again, wait for the run to end, or train with more train.keep_checkpoints."
    )
