"""The place of a run's checkpoints, which it shares with no other run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distembed.base.errors import UserError
from distembed.base.ranks import Ranks
from distembed.checkpoints.run_checkpoints import Checkpoints
from distembed.checkpoints.store import checkpoint_place
from distembed.training.train_config import TrainConfig


def own_checkpoints(train: TrainConfig, folder: Path, ranks: Ranks) -> Checkpoints:
    """Returns a run's checkpoints; in a place of their own they say which run they belong to. All ranks call it.

    Args:
        train: The ``train`` section of the config.
        folder: The run's folder.
        ranks: This rank among all.
    """
    owner = None if train.checkpoint_dir is None else str(folder.absolute())
    place = checkpoint_place(folder, train.checkpoint_dir)
    return Checkpoints(place, train.keep_checkpoints, ranks, owner, train.keep_best)


def require_empty_place(checkpoints: Checkpoints, train: TrainConfig, folder: Path) -> None:
    """Makes sure that a run which is not resumed has an empty place for checkpoints; all ranks call it.

    Raises:
        UserError: There are checkpoints.
    """
    if checkpoints.newest() is not None:
        raise UserError(
            f"train.checkpoint_dir is {train.checkpoint_dir!r}, but {checkpoint_place(folder, train.checkpoint_dir)} "
            "holds checkpoints of another run; give an empty place, or none for the run's own folder."
        )


def require_own(progress: Mapping[str, Any], run_id: str, train: TrainConfig, folder: Path) -> None:
    """Makes sure that a resumed run reads a checkpoint of its own.

    Args:
        progress: The progress in the checkpoint.
        run_id: The run's id.
        train: The ``train`` section of the config.
        folder: The run's folder.

    Raises:
        UserError: It is another run's.
    """
    if progress.get("run", run_id) != run_id:
        raise UserError(
            f"--resume: {checkpoint_place(folder, train.checkpoint_dir)} holds checkpoints of another run than "
            f"{folder}; give the place of its own as train.checkpoint_dir."
        )
