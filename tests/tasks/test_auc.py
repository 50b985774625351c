"""Areas under the ROC curve against pairs counted one by one, and against scikit-learn."""

import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from distembed.tasks.binary_metrics import GroupedAUC, exact_auc, grouped_auc

ROW = st.tuples(
    st.sampled_from([-2.0, -0.5, 0.0, 0.5]) | st.floats(-3, 3, width=32),
    st.integers(0, 1),
    st.sampled_from([5, 2**40, -1]),
    st.sampled_from([0.0, 0.25, 1.0, 3.0]),
)
Row = tuple[float, int, int, float]


def area(rows: list[Row]) -> float:
    """The share of pairs in the right order, by a loop over all of them; NaN without any."""
    right = pairs = 0.0
    for score, label, _, weight in rows:
        for other, other_label, _, other_weight in rows:
            if label == 1 and other_label == 0:
                pairs += weight * other_weight
                right += weight * other_weight * ((score > other) + (score == other) / 2)
    return right / pairs if pairs > 0 else math.nan


def areas_within_groups(rows: list[Row]) -> tuple[float, int, int]:
    by_group = defaultdict(list)
    for row in rows:
        by_group[row[2]].append(row)
    known = [
        (area(own), sum(row[3] for row in own), len(own)) for own in by_group.values() if not math.isnan(area(own))
    ]
    total = sum(weight for _, weight, _ in known)
    mean = sum(value * weight for value, weight, _ in known) / total if known else math.nan
    return mean, len(known), sum(count for *_, count in known)


def columns(rows: list[Row]) -> list[np.ndarray]:
    kinds = np.float32, np.float32, np.int64, np.float32
    return [np.array([row[i] for row in rows], kind) for i, kind in enumerate(kinds)]


@settings(max_examples=40)
@given(st.lists(ROW, max_size=25))
def test_areas_are_those_of_a_loop_over_pairs(rows: list[Row]) -> None:
    scores, labels, groups, weights = columns(rows)
    alike = [(score, label, group, 1.0) for score, label, group, _ in rows]
    assert exact_auc(scores, labels) == pytest.approx(area(alike), nan_ok=True)
    assert exact_auc(scores, labels, weights) == pytest.approx(area(rows), nan_ok=True)
    for found, expected in (
        (grouped_auc(scores, labels, groups), areas_within_groups(alike)),
        (grouped_auc(scores, labels, groups, weights), areas_within_groups(rows)),
    ):
        assert found.value == pytest.approx(expected[0], nan_ok=True)
        assert (found.num_groups, found.num_rows) == expected[1:]


def test_many_groups_are_those_of_a_loop_over_groups() -> None:
    rng = np.random.default_rng(0)
    num_rows = 1_501
    groups = rng.zipf(1.3, num_rows).clip(max=5_000)
    scores = rng.normal(size=num_rows).round(2).astype(np.float32)
    labels = (rng.random(num_rows) < 0.3).astype(np.float32)
    weights = rng.gamma(1.0, size=num_rows).astype(np.float32)
    for own_weights in (None, weights):
        total = weighted = 0.0
        count = 0
        for group in np.unique(groups):
            own = groups == group
            if 0 < labels[own].sum() < own.sum():
                each = None if own_weights is None else own_weights[own].astype(np.float64)
                weight = float(own.sum()) if each is None else float(each.sum())
                weighted += weight * roc_auc_score(labels[own], scores[own], sample_weight=each)
                total, count = total + weight, count + 1
        found = grouped_auc(scores, labels, groups, own_weights)
        assert found.num_groups == count > 20
        assert found.value == pytest.approx(weighted / total, rel=1e-10)


def test_one_group_is_all_rows_and_no_rows_are_none() -> None:
    rng = np.random.default_rng(1)
    scores, labels = rng.normal(size=101), rng.integers(0, 2, 101).astype(np.float32)
    assert grouped_auc(scores, labels, np.full(101, 7)).value == exact_auc(scores, labels)
    nothing = grouped_auc(np.empty(0), np.empty(0), np.empty(0, np.int64))
    assert math.isnan(nothing.value) and (nothing.num_groups, nothing.num_rows) == (0, 0)
    assert math.isnan(grouped_auc(np.array([math.nan, 1.0]), np.array([0.0, 1.0]), np.zeros(2, int)).value)
    assert isinstance(nothing, GroupedAUC) and math.isnan(exact_auc(np.array([math.nan, 1.0]), np.array([0.0, 1.0])))
