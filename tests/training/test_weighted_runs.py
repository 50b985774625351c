"""Runs on rows with weights, and with a group within whose values clicks are ordered."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from sklearn.metrics import log_loss, roc_auc_score

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import Manifest, create_manifest
from tests.small_runs import ROWS, call, config_values, distembed, losses, write_dataset


def write_weighted(folder: Path, weight: float | None = None) -> Path:
    """Writes the small dataset with weights, drawn ones unless given; a tenth of the drawn ones are 0."""
    rng = np.random.default_rng(7)

    def with_weights(split: str, table: pa.Table) -> pa.Table:
        rows = len(table)
        drawn = rng.gamma(2.0, 3.0, rows) * (rng.random(rows) < 0.9)
        weights = drawn if weight is None else np.full(rows, weight)
        return table.append_column("times", pa.array(weights.astype(np.float32)))

    return write_dataset(folder, change=with_weights, weight="times")


def column(folder: Path, split: str, name: str) -> np.ndarray:
    return pq.read_table(folder / split / "part-0.parquet")[name].to_numpy()


def train(folder: Path, dataset: Path, name: str, *settings: str, ranks: int = 1) -> Path:
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(config_values(dataset)))
    # 65 rows a batch cannot be halved, and of the last batch's one row a rank has none
    distembed("train", config, "train.batch_size=65", *settings, "--run-dir", folder / name, ranks=ranks)
    return folder / name


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.thorough
@pytest.mark.distributed
def test_two_ranks_learn_from_weighted_rows_what_one_does(tmp_path: Path) -> None:
    dataset = write_weighted(tmp_path / "weighted")
    runs = [train(tmp_path, dataset, f"{ranks}", "task.group=C1", ranks=ranks) for ranks in (1, 2)]
    one, two = (lines(run) for run in runs)
    assert len(one) == len(two) == 31 + 2
    for key in ("loss", "auc", "logloss", "gauc", "gauc_rows", "weight"):
        own, other = ([line[key] for line in each if line.get(key) is not None] for each in (one, two))
        assert own == pytest.approx(other, rel=1e-4) and own

    # the first step's loss is that of logits near 0, since weights count by their mean
    assert one[0]["loss"] == pytest.approx(np.log(2), rel=0.3)
    predictions = tmp_path / "predictions.parquet"
    call("predict", runs[0], "--output", predictions)
    found, scores = json.loads((runs[0] / "evaluation.json").read_text()), pq.read_table(predictions)["prediction"]
    labels, weights, groups = (column(dataset, "test", name) for name in ("label", "times", "C1"))
    scores = scores.to_numpy().astype(np.float64)
    assert found["logloss"] == pytest.approx(log_loss(labels, scores, sample_weight=weights), rel=1e-5)
    assert found["auc"] == pytest.approx(roc_auc_score(labels, scores, sample_weight=weights), abs=1e-6)
    assert found["weight"] == pytest.approx(float(weights.sum()))
    areas, totals = [], []
    for group in np.unique(groups):
        own = groups == group
        areas.append(roc_auc_score(labels[own], scores[own], sample_weight=weights[own]))
        totals.append(weights[own].sum())
    assert found["gauc"] == pytest.approx(np.average(areas, weights=totals), abs=1e-6)
    assert (found["gauc_groups"], found["gauc_rows"]) == (len(areas), ROWS["test"])
    # C1's groups are few and large: GAUC is not AUC
    assert found["gauc"] != found["auc"]


@pytest.mark.thorough
def test_equal_weights_train_what_no_weights_train(tmp_path: Path) -> None:
    plain = train(tmp_path, write_dataset(tmp_path / "plain"), "run")
    weighted = train(tmp_path, write_weighted(tmp_path / "weighted", weight=2.5), "weighted_run")
    expected, found = (json.loads((run / "evaluation.json").read_text()) for run in (plain, weighted))
    assert found.pop("weight") == 2.5 * ROWS["test"] and found.keys() == expected.keys()
    for key in ("logloss", "auc", "normalized_entropy", "calibration", "accuracy"):
        assert found[key] == pytest.approx(expected[key], rel=1e-5)
    assert losses(weighted) == pytest.approx(losses(plain), rel=1e-5)


@pytest.mark.thorough
def test_manifests_say_the_mean_weight_and_refuse_what_is_none(tmp_path: Path) -> None:
    folder = write_weighted(tmp_path / "weighted")
    manifest = Manifest.load(folder)
    for split in ROWS:
        mean = column(folder, split, "times").astype(np.float64).mean()
        assert manifest.splits[split].mean_weight == pytest.approx(mean)
    for wrong in (-1.0, float("nan"), None):
        table = pa.table({"label": [0.0, 1.0], "times": pa.array([1.0, wrong], pa.float32())})
        (tmp_path / "wrong").mkdir(exist_ok=True)
        pq.write_table(table, tmp_path / "wrong" / "part.parquet")
        schema = dataclasses.replace(manifest.schema, dense=(), categorical=())
        with pytest.raises(UserError, match="column 'times': the weight of row 1 is"):
            create_manifest(tmp_path / "wrong", schema, {"train": ["part.parquet"]})
