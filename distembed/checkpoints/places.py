"""Where the checkpoints of a run are, and which is the newest or the best; found without torch."""

from pathlib import Path

from distembed.base.errors import UserError
from distembed.checkpoints.store import (
    INTERRUPTED,
    CheckpointStore,
    checkpoint_name,
    place_and_name,
    storage_errors,
)


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


def chosen_checkpoint(run_dir: Path, checkpoint_dir: str | None, choice: str | None, keeps_best: bool) -> str:
    """Returns the path or URL of one of a run's whole checkpoints.

    Args:
        run_dir: The run's folder.
        checkpoint_dir: The run's ``train.checkpoint_dir``.
        choice: ``newest``, ``best``, or the number of steps after which the checkpoint was written; None for the best
            where the run keeps it and has evaluated, else the newest.
        keeps_best: The run's ``train.keep_best``.

    Raises:
        UserError: The run has no such checkpoint, or the place cannot be reached.
    """
    newest = newest_checkpoint(run_dir, checkpoint_dir)
    if choice == "newest" or (choice is None and not keeps_best):
        return newest
    place, name = place_and_name(newest)
    store, names = CheckpointStore(place), checkpoint_names(place)
    if choice is not None and choice.isdecimal():
        wanted = [each for each in names if each.removesuffix(INTERRUPTED) == checkpoint_name(int(choice))]
        if not wanted:
            raise UserError(
                f"checkpoint (--checkpoint) is {choice}, and {place} has {', '.join(names)}; give one of their numbers."
            )
        return store.checkpoint_path(wanted[-1])
    if choice not in ("best", None):
        raise UserError(
            f"checkpoint (--checkpoint) is {choice!r}; give newest, best, or the number of steps of a checkpoint."
        )
    with storage_errors(place):
        best = store.best(name)
    if best in names:
        return store.checkpoint_path(best)
    if choice is None:
        return newest
    raise UserError(
        f"checkpoint (--checkpoint) is best, and {run_dir} keeps none; the best is kept where "
        "train.keep_best is true, once there was an evaluation. Use newest."
    )


def checkpoint_names(place: str) -> list[str]:
    """Returns the names of the whole checkpoints in a place, oldest first.

    Raises:
        UserError: The place cannot be used.
        RunError: The place cannot be reached.
    """
    store = CheckpointStore(place)
    with storage_errors(place):
        return store.names()
