"""A run whose newest checkpoint is damaged goes on from the one before, and ends as if nothing had happened."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.robustness.disturbed_runs import DrawnRun, differences
from tests.small_runs import distembed


def damage(checkpoint: Path) -> None:
    """Changes a bit of the first rank's weights."""
    file = checkpoint / "rank-0.blocks"
    whole = bytearray(file.read_bytes())
    whole[100] ^= 4
    file.write_bytes(whole)


def train(config: Path, run: Path, max_steps: int, *options: str, ranks: int, code: int = 0) -> Any:
    settings = ("train.checkpoint_every=3", "train.log_every=4", "train.evaluate_every=5", "train.keep_checkpoints=3")
    return distembed(
        "train", config, *settings, f"train.max_steps={max_steps}", "--run-dir", run, *options, ranks=ranks, code=code
    )


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_it_goes_on_from_the_one_before(ranks: int, config: Path, tmp_path: Path) -> None:
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "run"
    train(config, undisturbed, 14, ranks=ranks)
    shutil.copytree(undisturbed, run)
    damage(run / "checkpoints" / "step-00000014")
    if ranks == 2:
        damage(run / "checkpoints" / "step-00000012")
    before = "step-00000012" if ranks == 1 else "step-00000009"
    refused = distembed("evaluate", run, code=2).stderr
    assert "step-00000014 is damaged: rank-0.blocks, bytes" in refused and "remove" not in refused
    done = train(config, run, 14, "--resume-or-start", ranks=ranks)
    assert f"Going on from {run}/checkpoints/{before}." in done.stdout
    assert "step-00000014, which is damaged, is kept as" in done.stdout
    aside = sorted((run / "checkpoints").glob("damaged-*"))
    assert [path.name for path in aside] == [f"damaged-step-{n:08d}" for n in ([14] if ranks == 1 else [12, 14])]
    for path in aside:
        shutil.rmtree(path)
    same = DrawnRun(config, [], ranks, sync=False)
    assert differences(run, same, undisturbed, same) == []


def test_without_a_whole_one_it_fails_and_moves_nothing(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(config, run, 6, ranks=1)
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    for name in names:
        damage(run / "checkpoints" / name)
    for _ in range(2):
        failed = train(config, run, 6, "--resume", ranks=1, code=2).stderr
        assert "no checkpoint in" in failed and all(f"{name} is damaged" in failed for name in names)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == names
    assert json.loads((run / "run.json").read_text())["status"] == "finished"


def test_checkpoints_of_another_run_are_neither_read_nor_removed(config: Path, tmp_path: Path) -> None:
    """Be they in the other run's own folder, or in a place of their own."""
    other, run = tmp_path / "other", tmp_path / "run"
    place = f"train.checkpoint_dir={tmp_path / 'place'}"
    train(config, other, 9, ranks=1)
    train(config, tmp_path / "third", 9, place, ranks=1)
    train(config, run, 3, ranks=1)
    for theirs in (other / "checkpoints", tmp_path / "place"):
        before = sorted(path for path in theirs.rglob("*") if path.name != ".run")
        metrics = (run / "metrics.jsonl").read_text()
        arguments = (f"train.checkpoint_dir={theirs}", "train.keep_checkpoints=1")
        failed = train(config, run, 12, *arguments, "--resume", ranks=1, code=2).stderr
        assert f"{theirs} holds checkpoints of another run than {run}" in failed
        assert sorted(path for path in theirs.rglob("*") if path.name != ".run") == before
        assert (run / "metrics.jsonl").read_text() == metrics


def test_a_place_with_older_checkpoints_than_the_runs_is_refused(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(config, run, 6, ranks=1)
    shutil.copytree(run / "checkpoints", tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "step-00000006")
    failed = train(config, run, 9, f"train.checkpoint_dir={tmp_path / 'copy'}", "--resume", ranks=1, code=2).stderr
    assert "the newest checkpoint is step-00000003; the run's newest is step-00000006 in" in failed
