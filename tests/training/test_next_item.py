"""Runs of sequences on two ranks: with the metrics of one, and resumed to the last bit with SSE and dropout."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from distembed.data.dataset.manifest import create_manifest
from distembed.data.dataset.schema import CategoricalFeature, Schema
from tests.processes import run_processes
from tests.ranks import free_port
from tests.training.test_runs import call, losses, metrics
from tests.training.test_sse import stopped_at

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


def train_on_two(rank: int, ports: list[int], folder: Path) -> None:
    """A run of SASRec, and of a GRU a whole run and one that goes on in the middle of its epoch."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[0]), GLOO_SOCKET_IFNAME="lo")
    call("train", folder / "config.yaml", "--run-dir", folder / "two")
    os.environ["MASTER_PORT"] = str(ports[1])
    call("train", folder / "replaced.yaml", "--run-dir", folder / "whole")
    os.environ["MASTER_PORT"] = str(ports[2])
    if rank == 0:
        stopped_at(5, folder / "whole", folder / "part")
    call("train", folder / "replaced.yaml", "--run-dir", folder / "part", "--resume")


def evaluations(run: Path) -> list[dict[str, float]]:
    """The metrics of all evaluations of a run, without times."""
    return [
        {name: value for name, value in line.items() if isinstance(value, float) and name != "seconds"}
        for line in metrics(run, "eval")
    ]


@pytest.mark.distributed
def test_two_ranks_have_the_metrics_of_one_and_a_resumed_run_is_the_same(config: Path, tmp_path: Path) -> None:
    run_processes(2, train_on_two, [free_port() for _ in range(3)], tmp_path)
    call("train", config, "--run-dir", tmp_path / "one")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    one, two = evaluations(tmp_path / "one"), evaluations(tmp_path / "two")
    assert [sorted(each) for each in one] == [sorted(each) for each in two]
    for own, other in zip(one, two, strict=True):
        assert own == pytest.approx(other, abs=0.02)
    whole, part = tmp_path / "whole", tmp_path / "part"
    assert losses(part) == losses(whole) and evaluations(part) == evaluations(whole)
    shares = [line["replaced_share"] for line in metrics(whole, "train")]
    for name, p0 in REPLACED.items():
        assert abs(np.mean([share[name] for share in shares]) - p0) < 0.1
