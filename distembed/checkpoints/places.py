"""Where the checkpoints of a run are, and which is the newest; found without torch."""

from pathlib import Path

from distembed.checkpoints.store import CheckpointStore, storage_errors
from distembed.errors import UserError


def checkpoint_place(run_dir: Path, checkpoint_dir: str | None) -> str:
    """Returns the absolute path or the URL where the checkpoints of a run are.

    Args:
        run_dir: The run's folder.
        checkpoint_dir: The run's ``train.checkpoint_dir``.
    """
    if checkpoint_dir is not None and "://" in checkpoint_dir:
        return checkpoint_dir
    return str(run_dir.absolute() / Path(checkpoint_dir or "checkpoints").expanduser())


def newest_checkpoint(run_dir: Path, checkpoint_dir: str | None = None) -> str:
    """Returns the path or URL of the newest whole checkpoint of a run.

    Args:
        run_dir: The run's folder.
        checkpoint_dir: The run's ``train.checkpoint_dir``.

    Raises:
        UserError: The run has no whole checkpoint, or the place cannot be reached.
    """
    place = checkpoint_place(run_dir, checkpoint_dir)
    names = checkpoint_names(place)
    if not names:
        raise UserError(
            f"{run_dir} has no checkpoint in {place}; give the folder of a run that `distembed train` made."
        )
    return CheckpointStore(place).checkpoint_path(names[-1])


def checkpoint_names(place: str) -> list[str]:
    """Returns the names of the whole checkpoints in a place, oldest first.

    Raises:
        UserError: The place cannot be used.
        RunError: The place cannot be reached.
    """
    store = CheckpointStore(place)
    with storage_errors(place):
        return store.names()
