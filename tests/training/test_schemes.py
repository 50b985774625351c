"""Whole runs with tables of different schemes and compositions in one model."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.small_runs import SIZES, distembed


@pytest.fixture
def mixed(config: Path, tmp_path: Path) -> Path:
    """A network a quotient, two vectors an id, functions after functions with max pooling, and assignments."""
    pq.write_table(assignments(), tmp_path / "assignments.parquet")
    changes = {
        "extends": config.name,
        "embedding": {
            "tables": {
                "C1": {
                    "partition": "explicit",
                    "assignments": str(tmp_path / "assignments.parquet"),
                    "columns": ["make", "type"],
                    "composition": "sum",
                    "force": True,
                },
                "C2": {"composition": "path_mlp", "hidden": [8]},
                "C3": {"partition": "chinese_remainder", "composition": "feature"},
                "M": {
                    "partition": "mixed_radix",
                    "num_partitions": 3,
                    "composition": "path_linear",
                    "pooling": "max",
                    "force": True,
                },
            },
        },
    }
    path = tmp_path / "mixed.yaml"
    path.write_text(yaml.safe_dump(changes))
    return path


def assignments(swapped: bool = False) -> pa.Table:
    makes = ["volvo", "volvo", "saab", "saab", "fiat"]
    return pa.table({"make": makes[::-1] if swapped else makes, "type": [0, 1, 0, 1, 0]})


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


@pytest.mark.distributed
@pytest.mark.slow
def test_two_ranks_train_as_one_and_a_resumed_run_as_an_uninterrupted_one(mixed: Path, tmp_path: Path) -> None:
    distembed("train", mixed, "train.epochs=2", "train.checkpoint_every=20", "--run-dir", tmp_path / "one")
    distembed("train", mixed, "train.epochs=2", "--run-dir", tmp_path / "two", ranks=2)
    one = losses(tmp_path / "one")
    assert losses(tmp_path / "two") == pytest.approx(one, rel=1e-5)
    assert one[-1] < one[0]
    distembed("train", mixed, "train.epochs=2", "train.checkpoint_every=7", "--run-dir", tmp_path / "resumed")
    for checkpoint in (tmp_path / "resumed" / "checkpoints").iterdir():
        if checkpoint.name != "step-00000056":
            shutil.rmtree(checkpoint)
    distembed("train", mixed, "train.epochs=2", "--run-dir", tmp_path / "resumed", "--resume")
    assert losses(tmp_path / "resumed")[-6:] == one[-6:]
    evaluated = [json.loads((tmp_path / run / "evaluation.json").read_text()) for run in ("one", "two")]
    assert evaluated[0]["logloss"] == pytest.approx(evaluated[1]["logloss"], rel=1e-5)
    distembed("evaluate", tmp_path / "two")


def test_a_run_is_not_used_with_other_assignments(mixed: Path, tmp_path: Path) -> None:
    distembed("train", mixed, "--run-dir", tmp_path / "run")
    described = {table["name"]: table for table in describe(mixed)}
    assert described["C1"]["scheme"] == "explicit" and described["C1"]["rows"] == [3, 2]
    assert described["C3"]["vectors"] == 2
    assert [table["num_embeddings"] for table in described.values()] == list(SIZES.values())
    distembed("evaluate", tmp_path / "run")
    pq.write_table(assignments(swapped=True), tmp_path / "assignments.parquet")
    refused = distembed("evaluate", tmp_path / "run", code=2)
    assert "assignments.parquet" in refused.stderr and "is not the file that" in refused.stderr


def describe(config: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(distembed("describe", config, "--json").stdout)["tables"]
    return found
