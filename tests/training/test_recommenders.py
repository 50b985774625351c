"""Whole runs of the tasks of recommenders: on ranks, resumed, killed, evaluated, predicted, refused."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from distembed.base.errors import UserError
from tests.interactions import NUM_ITEMS, prepare
from tests.small_runs import call, distembed, losses, metrics, stopped_at
from tests.tasks import retrieval_rows
from tests.tasks.retrieval_rows import prepare_rows

KINDS: dict[str, dict[str, Any]] = {
    "rating": {"model": {"name": "mf"}, "task": {"name": "rating", "regularization": 0.01}},
    "ranking": {"model": {"name": "mf", "biases": True}, "task": {"name": "ranking"}},
    "softmax": {"model": {"name": "sasrec", "dropout": 0.0}, "task": {"name": "next_item", "max_length": 8}},
    "binary": {
        "model": {"name": "gru", "dropout": 0.0},
        "task": {"name": "next_item", "max_length": 8, "loss": "binary", "num_negatives": 2, "sampled_candidates": 11},
    },
    "times": {
        "model": {"name": "hstu", "num_heads": 2, "dropout": 0.0, "times": "time"},
        "task": {"name": "next_item", "max_length": 8},
    },
    "towers": {"task": {"name": "retrieval", "loss": "in_batch"}},
    "sampled towers": {"task": {"name": "retrieval", "loss": "sampled", "num_negatives": 21}},
}
"""Section ``model`` and ``task`` of a config of each; that of :mod:`tests.tasks.retrieval_rows` has two towers."""


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("data")
    return {
        "ratings": prepare("ratings", folder, "--split", "random:0.7,0.1,0.2"),
        "sequences": prepare("sequences", folder, "--time", "time", "--dense", "price,time"),
        "films": prepare_rows(folder),
    }


def write_config(path: Path, kind: str, datasets: dict[str, Path], **sections: Any) -> Path:
    """Writes a small model's config in fp32 with SGD, which does not amplify rounding."""
    if "towers" in kind:
        return retrieval_rows.write_config(path, datasets["films"], **KINDS[kind], **sections)
    is_next = KINDS[kind]["task"]["name"] == "next_item"
    values: dict[str, Any] = {
        "data": {"path": str(datasets["sequences" if is_next else "ratings"])},
        "embedding": {"default": {"partition": "quotient_remainder", "embedding_dim": 8, "threshold": 10}},
        "train": {
            "batch_size": 13 if is_next else 65,
            "epochs": 2,
            "precision": "fp32",
            "device": "cpu",
            "log_every": 1,
            "checkpoint_every": 3,
            "keep_checkpoints": 9,
            "dense_optimizer": {"name": "sgd", "learning_rate": 0.05},
            "sparse_optimizer": {"name": "sgd", "learning_rate": 0.5},
        },
        **KINDS[kind],
        **sections,
    }
    path.write_text(yaml.safe_dump(values))
    return path


def check_metrics(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Holds metrics against those of a run whose sums were rounded elsewhere; equal scores may change their order."""
    left_out = {"seconds", "time"}
    assert found.keys() == expected.keys()
    for name in found.keys() - left_out:
        is_number = isinstance(expected[name], int | float)
        assert found[name] == (pytest.approx(expected[name], rel=1e-4, abs=2e-3) if is_number else expected[name]), name


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_train_and_evaluate_to_the_metrics_of_one(kind: str, datasets: dict[str, Path], tmp_path: Path) -> None:
    config, one, two = write_config(tmp_path / "config.yaml", kind, datasets), tmp_path / "one", tmp_path / "two"
    call("train", config, "--run-dir", one)
    distembed("train", config, "--run-dir", two, ranks=2)
    assert losses(two) == pytest.approx(losses(one), rel=1e-3 if kind == "times" else 1e-4)
    first, second = np.array_split(losses(one), 2)
    assert second.mean() < first.mean()
    for found, expected in zip(metrics(two, "eval"), metrics(one, "eval"), strict=True):
        check_metrics(found, expected)
    found = json.loads(distembed("evaluate", one, "--json", ranks=3).stdout)
    expected = json.loads((one / "evaluation.json").read_text())
    common = found.keys() & expected.keys()
    assert len(common) > 3
    check_metrics({name: found[name] for name in common}, {name: expected[name] for name in common})


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_resumed_in_mid_epoch_and_read_by_every_command(
    kind: str, datasets: dict[str, Path], tmp_path: Path
) -> None:
    sse = {"default": {"p0": 0.1}}
    config = write_config(tmp_path / "config.yaml", kind, datasets, sse=sse)
    whole = tmp_path / "whole"
    call("train", config, "--run-dir", whole)
    shares = metrics(whole, "train")[-1]["replaced_share"]
    item = "film" if "towers" in kind else "item"
    assert item in shares and all(0 <= share < 0.5 for share in shares.values())
    part = stopped_at(9 if kind == "rating" else 7, whole, tmp_path / "part")
    call("train", config, "--run-dir", part, "--resume")
    assert losses(part) == losses(whole)
    pairs = zip(metrics(part, "eval"), metrics(whole, "eval"), strict=True)
    assert all({**found, "seconds": 0, "time": 0} == {**expected, "seconds": 0, "time": 0} for found, expected in pairs)
    call("check", whole)
    call("predict", whole, "--output", tmp_path / "predictions.parquet")
    evaluation = json.loads((whole / "evaluation.json").read_text())
    assert pq.read_table(tmp_path / "predictions.parquet").num_rows == evaluation["rows"] > 0
    call("materialise", whole, "--output", tmp_path / "vectors", "--table", item)
    (vectors,) = (tmp_path / "vectors").glob("**/*.parquet")
    assert pq.read_table(vectors).num_rows in (NUM_ITEMS, NUM_ITEMS + 2)
    call("report", whole, part, "--output", tmp_path / "report.html")


def test_what_does_not_go_together_is_said_before_anything_is_trained(
    datasets: dict[str, Path], dataset: Path, tmp_path: Path
) -> None:
    def refuses(kind: str, message: str, *overrides: str) -> None:
        config = write_config(tmp_path / "config.yaml", kind, datasets)
        with pytest.raises(UserError, match=message):
            call("train", config, *overrides, "--run-dir", tmp_path / "run")
        assert not (tmp_path / "run").exists()

    ratings, sequences = (f"data.path={datasets[kind]}" for kind in ("ratings", "sequences"))
    refuses("rating", "task", "task={name: click}")
    refuses("rating", "model", "model={name: dlrm}")
    refuses("softmax", "model", "model={name: mf}")
    refuses("rating", "train.ema.*'mf' has tables alone", "train.ema={}")
    refuses("softmax", "distembed prepare sequences", ratings)
    refuses("rating", "distembed prepare ratings", sequences)
    refuses("softmax", "distembed prepare sequences", f"data.path={dataset}")
    refuses("rating", "distembed prepare ratings", f"data.path={dataset}")
    refuses("softmax", "label", sequences, "model={name: dlrm}", "task={name: click}")
    refuses("softmax", re.escape("num_heads"), "model.num_heads=3")
    refuses("ranking", "all of its vectors are scored", "plan.tables.item.sharding_types=[table_row_wise]")
