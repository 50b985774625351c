"""The newest checkpoint of a run that still trains, and removes older ones while they are read."""

import shutil
from pathlib import Path

import pytest

from distembed.base.errors import UserError
from distembed.checkpoints.saved import SavedCheckpoint
from distembed.training.config import load_config
from distembed.training.inference import read_newest

CONFIG = load_config(None, ["data.path=x"])


def make_checkpoint(run: Path, step: int) -> Path:
    """Makes what a reader takes for a whole checkpoint until it looks into it."""
    checkpoint = run / "checkpoints" / f"step-{step:08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "progress.json").write_text("{}")
    return checkpoint


def test_where_a_checkpoint_is_removed_while_it_is_read_the_newest_by_then_is_read(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 1)
    read = list[str]()

    def read_and_remove(checkpoint: str) -> str:
        read.append(Path(checkpoint).name)
        if len(read) < 3:
            make_checkpoint(tmp_path, len(read) + 1)
            shutil.rmtree(checkpoint)
            raise UserError("it is not there")
        return checkpoint

    returned = read_newest(tmp_path, CONFIG, read_and_remove)
    assert read == ["step-00000001", "step-00000002", "step-00000003"] and returned.endswith(read[-1])


def test_a_checkpoint_that_is_damaged_and_not_removed_is_an_error(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 1)
    damaged = make_checkpoint(tmp_path, 2)

    def read(checkpoint: str) -> None:
        assert checkpoint == str(damaged)
        raise UserError("it is damaged")

    with pytest.raises(UserError, match="it is damaged"):
        read_newest(tmp_path, CONFIG, read)
    assert damaged.exists()


def test_where_each_is_removed_the_user_is_told_to_try_again_and_to_remove_nothing(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 1)

    def read_and_remove(checkpoint: str) -> None:
        make_checkpoint(tmp_path, int(checkpoint[-8:]) + 1)
        shutil.rmtree(checkpoint)
        SavedCheckpoint.read(checkpoint)

    with pytest.raises(UserError) as error:
        read_newest(tmp_path, CONFIG, read_and_remove)
    assert "since its run trains on" in str(error.value) and "try again" in str(error.value)
    assert "remove it" not in str(error.value)


def test_a_run_without_checkpoints_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path} has no checkpoint"):
        read_newest(tmp_path, CONFIG, lambda checkpoint: pytest.fail(checkpoint))
