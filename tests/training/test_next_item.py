"""Runs of sequences on two ranks: with the metrics of one, however items are placed, and resumed to the last bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from distembed.data.dataset.manifest import create_manifest
from distembed.data.dataset.schema import CategoricalFeature, Schema
from tests.small_runs import call, distembed, losses, metrics, stopped_at

NUM_USERS, NUM_ITEMS = 130, 60
REPLACED = {"item": 0.1, "item_target": 0.3}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Users who go through the items in steps of one or of two, with a few who have one item or none."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 12, NUM_USERS)
    rows = [
        (2 + (rng.integers(NUM_ITEMS) + rng.integers(1, 3, n).cumsum()) % (NUM_ITEMS - 2)).tolist() for n in lengths
    ]
    rows[:2] = [[], [5]]
    splits = {"train": [row[:-2] for row in rows], "validation": [row[:-1] for row in rows], "test": rows}
    for split, own in splits.items():
        (tmp_path / "data" / split).mkdir(parents=True)
        columns = {
            "user": pa.array(range(NUM_USERS), pa.int32()),
            "item": pa.array(own, pa.list_(pa.int32())),
            "parity": pa.array([[item % 2 for item in row] for row in own], pa.list_(pa.int32())),
            "size": pa.array([[item / 10 for item in row] for row in own], pa.list_(pa.float32())),
        }
        pq.write_table(pa.table(columns), tmp_path / "data" / split / "rows.parquet", row_group_size=32)
    features = (
        CategoricalFeature("user", NUM_USERS),
        CategoricalFeature("item", NUM_ITEMS, True, 5.5),
        CategoricalFeature("parity", 2, True, 5.5),
    )
    schema = Schema(None, (), features, dense_sequences=("size",))
    create_manifest(tmp_path / "data", schema, {name: [f"{name}/rows.parquet"] for name in splits})
    values: dict[str, Any] = {
        "data": {"path": str(tmp_path / "data")},
        "model": {"name": "sasrec", "num_heads": 2, "dropout": 0.0},
        "task": {"name": "next_item", "loss": "binary", "num_negatives": 2, "max_length": 6, "sampled_candidates": 20},
        "embedding": {"default": {"embedding_dim": 8}},
        "train": {
            "batch_size": 16,
            "precision": "fp32",
            "device": "cpu",
            "log_every": 1,
            "dense_optimizer": {"name": "sgd", "learning_rate": 0.1},
            "sparse_optimizer": {"name": "sgd", "learning_rate": 0.1},
        },
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    changes: dict[str, Any] = {
        "extends": "config.yaml",
        "model": {"name": "gru", "hidden": 12, "dropout": 0.2},
        "task": {"loss": "softmax"},
        "train": {"checkpoint_every": 5, "keep_checkpoints": 9, "dense_optimizer": {"name": "adam"}},
        "sse": {"tables": {name: {"p0": p0} for name, p0 in REPLACED.items()}},
    }
    (tmp_path / "replaced.yaml").write_text(yaml.safe_dump(changes))
    return tmp_path / "config.yaml"


def evaluations(run: Path) -> list[dict[str, float]]:
    """The metrics of all evaluations of a run, without times."""
    return [
        {name: value for name, value in line.items() if isinstance(value, float) and name != "seconds"}
        for line in metrics(run, "eval")
    ]


@pytest.mark.thorough
@pytest.mark.distributed
def test_two_ranks_have_the_metrics_of_one_and_a_resumed_run_is_the_same(config: Path, tmp_path: Path) -> None:
    """A run of SASRec, and of a GRU a whole run and one that goes on in the middle of its epoch."""
    replaced, whole, part = (tmp_path / name for name in ("replaced.yaml", "whole", "part"))
    distembed("train", config, "--run-dir", tmp_path / "two", ranks=2)
    distembed("train", replaced, "--run-dir", whole, ranks=2)
    stopped_at(5, whole, part)
    distembed("train", replaced, "--run-dir", part, "--resume", ranks=2)
    call("train", config, "--run-dir", tmp_path / "one")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    one, two = evaluations(tmp_path / "one"), evaluations(tmp_path / "two")
    assert [sorted(each) for each in one] == [sorted(each) for each in two]
    for own, other in zip(one, two, strict=True):
        assert own == pytest.approx(other, abs=0.02)
    assert losses(part) == losses(whole) and evaluations(part) == evaluations(whole)
    shares = [line["replaced_share"] for line in metrics(whole, "train")]
    for name, p0 in REPLACED.items():
        assert abs(np.mean([share[name] for share in shares]) - p0) < 0.1


@pytest.mark.thorough
@pytest.mark.distributed
def test_hstu_with_times_has_the_metrics_of_one_rank_and_resumes(config: Path, tmp_path: Path) -> None:
    """Items have a compressed table; the run that goes on in the middle of its epoch replaces ids too (SSE)."""
    model = "model={name: hstu, num_heads: 2, dropout: 0.0, times: size}"
    hstu = (config, model, f"embedding.tables.item={ {'embedding_dim': 8, **TABLES['quotient_remainder']} }")
    one, two, whole, part = (tmp_path / name for name in ("one", "two", "whole", "part"))
    call("train", *hstu, "--run-dir", one)
    distembed("train", *hstu, "--run-dir", two, ranks=2)
    assert losses(two) == pytest.approx(losses(one), rel=1e-3)
    for own, other in zip(evaluations(one), evaluations(two), strict=True):
        assert own == pytest.approx(other, abs=0.02)
    replaced = (*hstu, "train.checkpoint_every=5", "sse.tables={item: {p0: 0.1}}")
    call("train", *replaced, "--run-dir", whole)
    stopped_at(5, whole, part)
    call("train", *replaced, "--run-dir", part, "--resume")
    assert losses(part) == losses(whole) and evaluations(part) == evaluations(whole)
    assert losses(whole) != losses(one)


LAYOUTS = ("table_wise", "row_wise", "column_wise", "data_parallel")
TABLES = {
    "full": {"partition": "naive"},
    "quotient_remainder": {"partition": "quotient_remainder", "collisions": 4, "threshold": 0, "force": True},
}


def write_config(folder: Path, table: str, layout: str | None) -> Path:
    values: dict[str, Any] = {
        "extends": "config.yaml",
        "task": {"loss": "softmax"},
        "embedding": {"tables": {"item": {"embedding_dim": 8, **TABLES[table]}}},
        "train": {"dense_optimizer": {"name": "adam", "learning_rate": 0.01, "weight_decay": 0.01}},
    }
    if layout is not None:
        own = {"sharding_types": [layout], **({"min_partition": 4} if layout == "column_wise" else {})}
        values["plan"] = {"tables": {"item": own}}
    path = folder / f"{table}_{layout}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1200)
def test_all_layouts_have_the_metrics_of_one_rank(config: Path, tmp_path: Path) -> None:
    for table in TABLES:
        expected = tmp_path / table
        call("train", write_config(tmp_path, table, None), "--run-dir", expected)
        for layout in LAYOUTS:
            found = tmp_path / f"{table}_{layout}"
            distembed("train", write_config(tmp_path, table, layout), "--run-dir", found, ranks=2)
            assert losses(found) == pytest.approx(losses(expected), rel=1e-3), (table, layout)
            for own, other in zip(evaluations(found), evaluations(expected), strict=True):
                assert own == pytest.approx(other, abs=0.02), (table, layout)
