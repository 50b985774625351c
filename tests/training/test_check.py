"""``distembed check`` tells what is whole from what is not, as a whole."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.small_runs import call, distembed, train_small

CHECKPOINT = Path("checkpoints", "step-00000004")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Path:
    return train_small(tmp_path_factory.mktemp("check"), dataset, 4, "train.checkpoint_every=2")


def test_what_is_whole_is_said_to_be(finished: Path, dataset: Path) -> None:
    run, kept, two, four = call("check", finished).splitlines()
    assert kept.startswith(f"dataset {finished}/dataset: whole, 1 files")
    assert run.startswith(f"run {finished}: whole, 4 files")
    assert two.startswith(f"checkpoint {finished}/checkpoints/step-00000002: whole, 3 files")
    assert four.startswith(f"checkpoint {finished / CHECKPOINT}: whole, 3 files")
    assert call("check", finished / CHECKPOINT).startswith("checkpoint ")
    assert call("check", f"file://{finished / CHECKPOINT}").startswith("checkpoint ")
    num_bytes = sum(path.stat().st_size for path in dataset.rglob("*") if path.is_file())
    (said,) = call("check", dataset).splitlines()
    assert said.startswith(f"dataset {dataset}: whole") and f"{num_bytes / 2**10:.2f} KiB" in said


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize(
    ("file", "harm", "message"),
    [
        (CHECKPOINT / "rank-0.blocks", cut, "rank-0.blocks ends after"),
        (CHECKPOINT / "index.json", cut, "index.json does not have the checksum"),
        (CHECKPOINT / "rank-0.blocks", Path.unlink, "rank-0.blocks is missing"),
        (CHECKPOINT / "progress.json", cut, "progress.json is no JSON"),
        (Path("plan.json"), cut, "plan.json cannot be read"),
        (Path("run.json"), cut, "run.json cannot be read"),
        (Path("config.yaml"), lambda path: path.write_text("train: {batch_size: -1}"), "train.batch_size"),
        (Path("metrics.jsonl"), lambda path: path.write_text("{}\nno\n{}\n"), "metrics.jsonl, line 2, is no JSON"),
    ],
)
def test_damage_is_named(
    file: Path, harm: Callable[[Path], object], message: str, finished: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    harm(run / file)
    done = distembed("check", run, code=2)
    assert message in done.stderr and f"{run} is damaged:" in done.stderr and "Traceback" not in done.stderr
    assert "damaged in 1 place(s)" in done.stdout


def test_all_damaged_blocks_are_named(finished: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "it"
    shutil.copytree(finished / CHECKPOINT, checkpoint)
    whole = (checkpoint / "rank-0.blocks").read_bytes()
    (checkpoint / "rank-0.blocks").write_bytes(bytes(byte ^ 1 for byte in whole))
    done = distembed("check", checkpoint, code=2)
    count = done.stderr.count("does not have the checksum that it was written with")
    assert count > 10 and f"damaged in {count} place(s)" in done.stdout


def test_what_is_nothing_of_the_kind_is_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps({}))
    for path in (tmp_path, tmp_path / "missing", tmp_path / "other.json"):
        assert f"{path} is no run, checkpoint, dataset or graph" in distembed("check", path, code=2).stderr
