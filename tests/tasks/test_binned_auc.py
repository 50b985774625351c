"""Areas of rows in bins, against pairs of rows counted one by one, scikit-learn, and bins that are found one by one."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from distembed.tasks.binary_metrics import NUM_BINS, bin_counts, binned_auc, most_error

ROW = st.tuples(
    st.sampled_from([-2.0, 0.0, 1e-3, -4e6, 1e30, math.inf, -math.inf]) | st.floats(-3, 3, width=32),
    st.integers(0, 1),
    st.sampled_from([0.0, 0.25, 1.0, 3.0]),
)
Row = tuple[float, int, float]


def place(logit: float) -> int:
    """The bin of a logit, by Python's own arithmetic."""
    if math.isnan(logit):
        return NUM_BINS
    return int(min(max(math.asinh(logit / 8) * 512 + NUM_BINS / 2, 0), NUM_BINS - 1))


def area(rows: list[Row], places: bool) -> float:
    right = pairs = 0.0
    for own, label, weight in rows:
        for other, other_label, other_weight in rows:
            if label == 1 and other_label == 0:
                first, second = (place(own), place(other)) if places else (own, other)
                pairs += weight * other_weight
                right += weight * other_weight * ((first > second) + (first == second) / 2)
    return right / pairs if pairs > 0 else math.nan


def counts_of(rows: list[Row], weighted: bool) -> np.ndarray:
    logits, labels, weights = (torch.tensor([row[i] for row in rows], dtype=torch.float32) for i in range(3))
    return bin_counts(logits, labels, weights if weighted else None).numpy()


@pytest.mark.parametrize("weighted", [False, True])
@settings(max_examples=25)
@given(st.lists(ROW, max_size=20))
def test_areas_are_those_of_bins_and_near_those_of_rows(weighted: bool, rows: list[Row]) -> None:
    counts = counts_of(rows, weighted)
    rows = rows if weighted else [(logit, label, 1.0) for logit, label, _ in rows]
    assert counts.dtype == (np.float64 if weighted else np.int64)
    assert counts.sum() == sum(weight for *_, weight in rows)
    found, exact = binned_auc(counts), area(rows, places=False)
    assert found == pytest.approx(area(rows, places=True), nan_ok=True)
    assert math.isnan(exact) or abs(found - exact) <= most_error(counts) + 1e-12


@pytest.mark.parametrize("center", [-30.0, -7.0, -2.0, 0.0, 30.0])
@pytest.mark.parametrize("spread", [0.3, 2.0])
def test_the_difference_is_that_of_logits_rounded_to_bins(center: float, spread: float) -> None:
    """Rounding to bins of width h adds ``h^2 / 12`` to the variance of logits, and gives pairs of one bin any order.

    An area ``Phi(x)``, with ``x`` the distance of both classes over their spread s, so becomes that of a spread of
    ``sqrt(s^2 + h^2 / 12)``: a change of at most ``h^2 / (24 s^2)`` times the maximum of ``x phi(x)``, 0.242. The order
    within bins is chance, of which as much is left as the share of pairs in one bin, about ``h / (2 sqrt(pi) s)``.
    """
    draw = np.random.default_rng(3)
    logits = (center + spread * draw.normal(size=50_000)).astype(np.float32)
    labels = (draw.random(50_000) < 1 / (1 + np.exp(-(logits - center) - 1))).astype(np.float32)
    counts = np.zeros((2, NUM_BINS + 1))
    for rows in np.array_split(np.arange(50_000), 7):  # as steps and ranks have them
        counts += bin_counts(torch.from_numpy(logits[rows]), torch.from_numpy(labels[rows])).numpy()
    difference = abs(binned_auc(counts) - roc_auc_score(labels, logits))
    assert difference <= most_error(counts)
    width = math.sqrt(1 + ((abs(center) + spread) / 8) ** 2) / 64
    ratio = width / min(logits[labels == label].std() for label in (0, 1))
    # the chance error of an area of so many rows without a signal (Hanley and McNeil, 1982)
    chance = math.sqrt((1 / labels.sum() + 1 / (1 - labels).sum()) / 12)
    assert difference <= 0.242 * ratio**2 / 24 + 4 * chance * ratio / (2 * math.sqrt(math.pi))


def test_a_logit_that_is_no_number_gives_no_area() -> None:
    assert math.isnan(binned_auc(counts_of([(math.nan, 0, 1.0), (1.0, 0, 1.0), (2.0, 1, 1.0)], False)))
    assert binned_auc(counts_of([(1.0, 0, 1.0), (2.0, 1, 1.0)], False)) == 1.0
