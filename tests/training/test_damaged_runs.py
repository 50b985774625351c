"""Run folders that are damaged, in every file and every way, under every command that reads them."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import CHECKSUMS_NAME, PIECE
from tests.data.test_damage import flip_a_bit
from tests.robustness.disturbed_runs import DrawnRun, differences
from tests.small_runs import call, config_values, distembed, losses, metrics, train_small, write_dataset


def replace(kind: str, file: Path) -> None:
    """Puts something else in a file's place."""
    file.unlink()
    if kind == "folder":
        file.mkdir()
    elif kind == "loop":
        file.symlink_to(file.name)
    elif kind == "pipe":
        os.mkfifo(file)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "null": lambda file: file.write_bytes(b"null"),
    "list": lambda file: file.write_bytes(b"[1]"),
    "nested": lambda file: file.write_bytes(b"[" * 100_000),
    "bytes": lambda file: file.write_bytes(bytes(range(256))),
    "other values": lambda file: file.write_bytes(
        b'{"schemes": 1, "graphs": 5, "assignments": [], "metrics": {"a": 1}}'
    ),
    "half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "folder": lambda file: replace("folder", file),
    "loop": lambda file: replace("loop", file),
    "pipe": lambda file: replace("pipe", file),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Path:
    """The run of 4 steps, and its config beside it."""
    return train_small(tmp_path_factory.mktemp("finished"), dataset, 4)


QUICK = {
    "run.json": ["empty", "nested", "other values"],
    "config.yaml": ["null", "pipe"],
    "plan.json": ["half"],
    "metrics.jsonl": ["bytes"],
    "evaluation.json": ["loop"],
}
"""A sample of the damages of each file."""
CASES = [
    pytest.param(file, damage, marks=() if damage in sample else pytest.mark.slow)
    for file, sample in QUICK.items()
    for damage in DAMAGES
]


@pytest.mark.thorough
@pytest.mark.parametrize(("file", "damage"), CASES)
def test_a_damaged_run_is_read_as_far_as_it_goes_or_refused_in_a_sentence(
    run: Path, tmp_path: Path, file: str, damage: str
) -> None:
    damaged, config = tmp_path / "run", run.parent / "config.yaml"
    shutil.copytree(run, damaged)
    DAMAGES[damage](damaged / file)
    commands: dict[str, list[object]] = {
        "report": ["report", damaged, "--output", tmp_path / "report.html"],
        "materialise": ["materialise", damaged, "--table", "C1", "--output", tmp_path],
        "evaluate": ["evaluate", damaged],
        "resume": ["train", config, "train.max_steps=4", "--run-dir", damaged, "--resume"],
    }
    refused = {}
    for name, arguments in commands.items():
        reads_metrics = name not in ("materialise", "evaluate")
        if file == "plan.json" and name != "resume" or file.startswith(("m", "e")) and not reads_metrics:
            continue
        try:
            call(*arguments)
        except UserError as error:
            refused[name] = str(error)
    assert all(str(damaged) in message and len(message) < 2000 for message in refused.values())
    is_no_file = damage in ("missing", "folder", "loop", "pipe")
    must_refuse = {
        "run.json": set(commands),
        "config.yaml": set(commands) - (set() if is_no_file else {"report"}),
        "plan.json": set() if damage in ("missing", "loop") else {"resume"},
    }
    if (file, damage) != ("config.yaml", "half") and damage != "other values":
        assert must_refuse.get(file, set()) <= refused.keys()


DAMAGED = r"part-0.parquet, row group {} is damaged: its checksum differs from the recorded one"


@pytest.fixture
def own(tmp_path: Path) -> tuple[Path, Path]:
    """A config and its dataset, to damage."""
    dataset = write_dataset(tmp_path / "dataset")
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(config_values(dataset)))
    return tmp_path / "own.yaml", dataset


@pytest.mark.distributed
def test_damaged_row_groups_end_every_rank_with_their_name(own: tuple[Path, Path], tmp_path: Path) -> None:
    config, dataset = own
    train = dataset / "train" / "part-0.parquet"
    # the splits' files are in order there, and the training split's has 8 row groups
    for end in np.cumsum(np.fromfile(dataset / CHECKSUMS_NAME, PIECE)["bytes"])[:8].tolist():
        flip_a_bit(train, end - 100)
    ended = distembed("train", config, "--run-dir", tmp_path / "run", ranks=2, code=2)
    assert "error: " in ended.stderr and "row group" in ended.stderr and "Traceback" not in ended.stderr


def damage(checkpoint: Path) -> None:
    """Changes a bit of the first rank's weights."""
    flip_a_bit(checkpoint / "rank-0.blocks", 100)


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


@pytest.mark.thorough
@pytest.mark.distributed
def test_ranks_agree_on_what_they_cannot_read(own: tuple[Path, Path], tmp_path: Path) -> None:
    config, dataset = own
    path = dataset / "train" / "part-0.parquet"
    flip_a_bit(path, 200)  # in the first of eight row groups
    settings = ["train.log_every=31", "data.skip_unreadable=1"]
    for ranks in (1, 2):
        run = tmp_path / str(ranks)
        done = distembed("train", config, *settings, "--run-dir", run, ranks=ranks)
        assert done.stdout.count("warning: rows of others take the place of those of") == 1
        assert json.loads((run / "run.json").read_text())["unreadable_row_groups"] == [f"{path}, row group 0"]
        assert metrics(run, "train")[-1]["unreadable_row_groups"] == 1
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)
    with pytest.raises(UserError, match="row group 0 is damaged"):
        call("train", config, "--run-dir", tmp_path / "none")
