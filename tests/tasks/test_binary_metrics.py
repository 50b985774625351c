"""Metrics against scikit-learn."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score

from distembed.tasks.auc import exact_auc
from distembed.tasks.binary_metrics import BinaryMetrics, calibration_bins

LOGITS = st.lists(st.sampled_from([-30.0, -2.5, -0.1, 0.1, 1.0, 1.5, 20.0]) | st.floats(-8, 8), min_size=2, max_size=60)


@given(logits=LOGITS, seed=st.integers(0, 2**32 - 1))
def test_metrics_equal_scikit_learn(logits: list[float], seed: int) -> None:
    scores = np.array(logits, np.float32)
    labels = np.random.default_rng(seed).integers(0, 2, len(scores)).astype(np.float32)
    labels[:2] = [0, 1]
    found = BinaryMetrics.from_logits(scores, labels)
    probabilities = 1 / (1 + np.exp(-scores.astype(np.float64)))
    assert found.rows == len(scores)
    assert found.auc == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    assert found.logloss == pytest.approx(log_loss(labels, probabilities), rel=1e-7)  # 1 - p rounds at large p
    assert found.accuracy == pytest.approx(accuracy_score(labels, scores > 0))
    assert found.calibration == pytest.approx(probabilities.sum() / labels.sum())
    rate = labels.astype(np.float64).mean()
    assert found.normalized_entropy == pytest.approx(found.logloss / log_loss(labels, np.full(len(labels), rate)))


def test_extreme_logits_stay_finite() -> None:
    found = BinaryMetrics.from_logits(np.array([1e4, -1e4], np.float32), np.array([0.0, 1.0], np.float32))
    assert found.logloss == 1e4
    assert found.auc == 0.0


def test_what_cannot_be_computed_is_nan() -> None:
    one_class = BinaryMetrics.from_logits(np.zeros(3, np.float32), np.zeros(3, np.float32))
    assert math.isnan(one_class.auc) and math.isnan(one_class.calibration) and math.isnan(one_class.normalized_entropy)
    assert one_class.logloss == pytest.approx(math.log(2))
    assert math.isnan(BinaryMetrics.from_logits(np.empty(0, np.float32), np.empty(0, np.float32)).logloss)
    assert math.isnan(exact_auc(np.array([math.nan, 1.0]), np.array([0.0, 1.0])))


@given(num_rows=st.integers(1, 100))
def test_calibration_bins_hold_every_row_once(num_rows: int) -> None:
    rng = np.random.default_rng(num_rows)
    logits, labels = rng.normal(size=num_rows), rng.integers(0, 2, num_rows).astype(np.float64)
    bins = calibration_bins(logits, labels)
    assert sum(b["rows"] for b in bins) == num_rows
    assert sum(b["rows"] * b["observed"] for b in bins) == pytest.approx(labels.sum())
    assert [b["predicted"] for b in bins] == sorted(b["predicted"] for b in bins)
