"""Whole runs with tables of different schemes and compositions in one model."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.small_runs import SIZES, call, distembed


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


def test_a_run_is_not_used_with_other_assignments(mixed: Path, tmp_path: Path) -> None:
    call("train", mixed, "train.max_steps=3", "--run-dir", tmp_path / "run")
    described = {table["name"]: table for table in json.loads(call("describe", mixed, "--json"))["tables"]}
    assert described["C1"]["scheme"] == "explicit" and described["C1"]["rows"] == [3, 2]
    assert described["C3"]["vectors"] == 2
    assert [table["num_embeddings"] for table in described.values()] == list(SIZES.values())
    call("evaluate", tmp_path / "run")
    pq.write_table(assignments(swapped=True), tmp_path / "assignments.parquet")
    refused = distembed("evaluate", tmp_path / "run", code=2)
    assert "assignments.parquet" in refused.stderr and "is not the file that" in refused.stderr
