"""Weights of rows: in metrics against scikit-learn, in the loss against a sum over rows, and where they are refused."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, log_loss, mean_absolute_error, mean_squared_error, roc_auc_score

from distembed.base.errors import UserError
from distembed.base.ranks import Ranks
from distembed.data.dataset.config import DataConfig
from distembed.data.dataset.manifest import Manifest, Split
from distembed.data.dataset.schema import LABELS, WEIGHTS, CategoricalFeature, Schema
from distembed.data.reader.batch import Batch
from distembed.tasks import ClickConfig, ClickTask, NextItemConfig, RankingConfig, RatingTask
from distembed.tasks.base import TaskContext
from distembed.tasks.binary_metrics import BinaryMetrics, calibration_bins, most_error
from distembed.training.config import load_config

FEATURES = (CategoricalFeature("user", 5), CategoricalFeature("item", 7), CategoricalFeature("tags", 9, True, 2.0))
WEIGHTED = Schema("clicked", ("x",), FEATURES, weight="times")


def drawn_rows(seed: int, num_rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores with ties, labels of both kinds, and weights of which some are 0."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=num_rows).round(1).astype(np.float32)
    labels = rng.integers(0, 2, num_rows).astype(np.float32)
    weights = (rng.gamma(1.0, size=num_rows) * (rng.random(num_rows) < 0.8)).astype(np.float32)
    labels[:2], weights[:2] = [0, 1], [1, 2]
    return scores, labels, weights


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), num_rows=st.integers(2, 80))
def test_weighted_metrics_equal_scikit_learn(seed: int, num_rows: int) -> None:
    scores, labels, weights = drawn_rows(seed, num_rows)
    found = BinaryMetrics.from_logits(scores, labels, weights)
    probabilities, own = 1 / (1 + np.exp(-scores.astype(np.float64))), weights.astype(np.float64)
    logloss = log_loss(labels, probabilities, sample_weight=own)
    rate = np.full(num_rows, float(labels @ own / own.sum()))
    assert found.rows == num_rows
    assert found.logloss == pytest.approx(logloss)
    assert found.auc == pytest.approx(roc_auc_score(labels, scores, sample_weight=own))
    assert found.normalized_entropy == pytest.approx(logloss / log_loss(labels, rate, sample_weight=own))
    assert found.calibration == pytest.approx(probabilities @ own / (labels @ own))
    assert found.accuracy == pytest.approx(accuracy_score(labels, scores > 0, sample_weight=own))
    errors = RatingTask().metrics({"predictions": scores, "labels": labels, "weights": weights})
    assert errors["rmse"] == pytest.approx(mean_squared_error(labels, scores, sample_weight=own) ** 0.5)
    assert errors["mae"] == pytest.approx(mean_absolute_error(labels, scores, sample_weight=own))
    assert errors["weight"] == pytest.approx(own.sum())


def test_rows_without_weight_have_no_metrics() -> None:
    found = BinaryMetrics.from_logits(np.zeros(3, np.float32), np.ones(3, np.float32), np.zeros(3, np.float32))
    assert found.rows == 3 and math.isnan(found.logloss) and math.isnan(found.auc)
    nothing = {"predictions": np.ones(2), "labels": np.ones(2), "weights": np.zeros(2, np.float32)}
    assert math.isnan(RatingTask().metrics(nothing)["rmse"])
    assert calibration_bins(np.zeros(3), np.ones(3), np.zeros(3)) == []


def test_bins_are_weighted_within() -> None:
    scores, labels, weights = drawn_rows(5, 40)
    (found,) = calibration_bins(scores, labels, weights, num_bins=1)
    probabilities = 1 / (1 + np.exp(-scores.astype(np.float64)))
    assert found["predicted"] == pytest.approx(np.average(probabilities, weights=weights))
    assert found["observed"] == pytest.approx(np.average(labels, weights=weights))
    assert found["rows"] == 40


def context(folder: Path, mean_weight: float | None, schema: Schema = WEIGHTED) -> TaskContext:
    Manifest(schema, {"train": Split(2, 0.5, (), mean_weight), "test": Split(1, 1.0, (), 9.0)}).save(folder)
    ranks = Ranks(rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))
    return TaskContext(DataConfig(path=str(folder)), str(folder), schema, ranks, 0, {})


def batch(labels: np.ndarray, **fields: np.ndarray) -> Batch:
    named: dict[str, Any] = {LABELS: torch.tensor(labels)} | {name: torch.tensor(own) for name, own in fields.items()}
    return Batch(named, len(labels))


def test_the_loss_is_a_sum_by_weights_over_the_mean_of_the_training_split(tmp_path: Path) -> None:
    scores, labels, weights = drawn_rows(6, 33)
    task = ClickTask()
    task.start(context(tmp_path, mean_weight=2.5))
    assert task.outputs == ("logits", "labels", "weights")
    loss, rows = task.step(torch.tensor(scores), batch(labels, **{WEIGHTS: weights}))
    by_row = np.logaddexp(0, scores.astype(np.float64)) - labels * scores
    assert float(loss) == pytest.approx(float(by_row @ weights) / 2.5, rel=1e-5)
    assert rows["weights"].tolist() == weights.tolist()
    sums = {name: values.numpy() for name, values in task.training_sums(rows).items()}
    expected = roc_auc_score(labels, scores, sample_weight=weights)
    assert task.training_metrics(sums)["auc"] == pytest.approx(expected, abs=most_error(sums["bins"]) + 1e-12)


def test_without_weights_nothing_is_multiplied(tmp_path: Path) -> None:
    scores, labels, _ = drawn_rows(7, 33)
    task = ClickTask()
    task.start(context(tmp_path, None, dataclasses.replace(WEIGHTED, weight=None)))
    loss, rows = task.step(torch.tensor(scores), batch(labels))
    logits = torch.nn.functional.binary_cross_entropy_with_logits
    assert torch.equal(loss, logits(torch.tensor(scores), torch.tensor(labels), reduction="sum"))
    assert rows.keys() == {"logits", "labels"} and task.outputs == ("logits", "labels")
    assert "weight" not in task.metrics({name: values.numpy() for name, values in rows.items()})


@pytest.mark.parametrize(("mean_weight", "said"), [(0.0, "weights are all 0"), (None, "have no known mean")])
def test_weights_without_a_mean_are_refused(tmp_path: Path, mean_weight: float | None, said: str) -> None:
    scores, labels, weights = drawn_rows(8, 5)
    task = ClickTask()
    task.start(context(tmp_path, mean_weight))
    with pytest.raises(UserError, match=said):
        task.step(torch.tensor(scores), batch(labels, **{WEIGHTS: weights}))


@pytest.mark.parametrize("config", [RankingConfig(), NextItemConfig()])
def test_tasks_that_take_all_rows_alike_refuse_weights(config: RankingConfig | NextItemConfig) -> None:
    with pytest.raises(UserError, match="takes all rows alike.*the column 'times'"):
        config.batch_schema(WEIGHTED)


def test_groups_are_single_valued_features_and_headlines_are_computed() -> None:
    for group, said in (("usr", "such as 'user'"), ("tags", "rows have several values"), ("x", "is no feature")):
        with pytest.raises(UserError, match=said):
            ClickConfig(group=group).batch_schema(WEIGHTED)
    assert ClickConfig(group="user").batch_schema(WEIGHTED) == WEIGHTED
    for task, said in (
        ("{headline: gauc}", "headline is 'gauc', which needs a group"),
        ("{headline: calibration}", "task.headline"),
        ("{name: ranking, headline: ndcg@7}", "did you mean 'ndcg@"),
        ("{name: next_item, headline: mrr_of_101}", "headline is 'mrr_of_101'"),
    ):
        with pytest.raises(UserError, match=said):
            load_config(None, [f"task={task}"])


@pytest.mark.parametrize(
    ("model", "task", "first"),
    [
        ("dlrm", "{name: click, headline: logloss}", "logloss"),
        ("dlrm", "{name: click, group: user, headline: gauc}", "gauc"),
        ("mf", "{name: rating, headline: mae}", "mae"),
        ("mf", "{name: ranking, headline: hr@5}", "hr@5"),
        ("sasrec", "{name: next_item, headline: ndcg@10_of_101}", "ndcg@10_of_101"),
    ],
)
def test_the_headline_metric_is_the_one_that_is_set(model: str, task: str, first: str) -> None:
    built = load_config(None, [f"model.name={model}", f"task={task}"]).task.build()
    assert built.headline.name == first
    assert len({metric.name for metric in built.reported_metrics}) == len(built.reported_metrics) > 1
