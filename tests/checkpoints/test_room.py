"""Room for checkpoints on the disk, found out before the first step."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from distembed.base.errors import RunError
from distembed.checkpoints.run_checkpoints import require_bytes
from distembed.commands import cli


def test_room_is_asked_for_one_checkpoint_and_warned_of_for_all(tmp_path: Path) -> None:
    place, said = tmp_path / "not" / "yet" / "there", list[str]()
    free = shutil.disk_usage(tmp_path).free
    for url in (str(place), f"file://{place}"):
        with pytest.raises(
            RunError, match=f"{place} would not fit.*at least .* needed.*are free; that is one checkpoint"
        ):
            require_bytes(url, 1, 2 * free, said.append)
        assert not said
        require_bytes(url, 2, free // 100, said.append)
        assert not said
        require_bytes(url, 2, free // 2, said.append)
        assert f"{place} will not hold train.keep_checkpoints=2" in said.pop() and not said
    require_bytes("memory://bucket/place", 2, 2**62, said.append)
    assert not said and not place.exists()


def test_a_run_without_room_for_a_checkpoint_ends_before_its_first_step(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()

    def larger_than_the_disk(url: str, keep: int, num_bytes: int, say: Callable[[str], None]) -> None:
        asked.append(num_bytes)
        require_bytes(url, keep, 2**62, say)

    monkeypatch.setattr("distembed.checkpoints.run_checkpoints.require_bytes", larger_than_the_disk)
    run = tmp_path / "run"
    with pytest.raises(RunError, match="checkpoints would not fit on its disk: at least 4194304.00 TiB"):
        cli.app(["train", str(config), "train.max_steps=1", "--run-dir", str(run)], standalone_mode=False)
    assert not (run / "metrics.jsonl").read_text()
    monkeypatch.undo()
    cli.app(
        ["train", str(config), "train.max_steps=1", "--run-dir", str(run), "--resume-or-start"], standalone_mode=False
    )
    (checkpoint,) = (run / "checkpoints").iterdir()
    written = sum(file.stat().st_size for file in checkpoint.glob("*.blocks"))
    assert asked[0] <= written <= 1.5 * asked[0]
