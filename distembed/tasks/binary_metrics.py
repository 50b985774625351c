"""Metrics of a binary classifier, from logits in float64, of rows that may have weights.

=================== ======================================================================================
logloss             mean of ``-y log p - (1-y) log(1-p)``
auc                 share of (positive, negative) pairs in the right order, ties counted half (Mann-Whitney)
normalized_entropy  logloss over the entropy of the label rate (He et al., ADKDD 2014); below 1 is better than the rate
calibration         sum of predictions over number of positives; 1 is calibrated
accuracy            share of rows on the right side of p = 0.5
=================== ======================================================================================

Means, sums and shares are by the weights of rows; a pair weighs the product of its rows' weights. A metric that is not
defined, for example the AUC of one class, is NaN.

GAUC (Zhu et al., KDD 2017) pairs only rows of one group, for example of one user: a score that tells users apart, but
orders no user's own rows, gains nothing. It is the mean of the groups' areas, each counted by the weight of its rows::

    GAUC = sum_g w_g AUC_g / sum_g w_g      over the groups that have positive and negative rows

The AUC of training steps is that of logits in bins, whose counts are added up over steps and ranks.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

Floats = npt.NDArray[np.floating]


@dataclass(frozen=True)
class BinaryMetrics:
    """The metrics of the module's table, and the number of rows that they are computed from."""

    rows: int
    logloss: float
    auc: float
    normalized_entropy: float
    calibration: float
    accuracy: float

    @classmethod
    def from_logits(cls, logits: Floats, labels: Floats, weights: Floats | None = None) -> "BinaryMetrics":
        """Computes every metric from the logits [N], the labels [N] of 0 or 1, and the weights [N]; None weighs 1."""
        logits, labels = logits.astype(np.float64), labels.astype(np.float64)
        weights = None if weights is None else weights.astype(np.float64)
        rows = len(labels)
        if rows == 0 or (weights is not None and not weights.sum() > 0):
            return cls(rows, *[math.nan] * 5)
        # -y log p - (1 - y) log(1 - p) = log(1 + exp(x)) - y x
        logloss = float(np.average(np.logaddexp(0.0, logits) - labels * logits, weights=weights))
        entropy = binary_entropy(float(np.average(labels, weights=weights)))
        positives = _sum(labels, weights)
        return cls(
            rows=rows,
            logloss=logloss,
            auc=exact_auc(logits, labels, weights),
            normalized_entropy=logloss / entropy if entropy > 0 else math.nan,
            calibration=_sum(sigmoid(logits), weights) / positives if positives else math.nan,
            accuracy=float(np.average((logits > 0) == (labels > 0.5), weights=weights)),
        )


def _sum(values: Floats, weights: Floats | None) -> float:
    return float(values.sum() if weights is None else values @ weights)


def sigmoid(logits: Floats) -> npt.NDArray[np.float64]:
    """Returns ``1 / (1 + exp(-x))`` of each logit, without overflow."""
    return np.exp(-np.logaddexp(0.0, -logits.astype(np.float64)))


def binary_entropy(rate: float) -> float:
    """Returns the entropy, in nats, of a label that is 1 at this rate; 0 for a rate of 0 or 1."""
    return -sum(p * math.log(p) for p in (rate, 1.0 - rate) if p > 0)


def calibration_bins(
    logits: Floats, labels: Floats, weights: Floats | None = None, num_bins: int = 20
) -> list[dict[str, float]]:
    """Returns mean predictions and observed rates of bins of equally many rows, in the order of predictions.

    The arguments are as in :meth:`BinaryMetrics.from_logits`. Bins without rows or without weight are left out.
    """
    probabilities, labels = sigmoid(logits), labels.astype(np.float64)
    order = np.argsort(probabilities, kind="stable")
    bins = [rows for rows in np.array_split(order, num_bins) if len(rows)]
    calibration = []
    for rows in bins:
        row_weights = None if weights is None else weights[rows].astype(np.float64)
        if row_weights is None or row_weights.sum() > 0:
            predicted, observed = (
                float(np.average(values[rows], weights=row_weights)) for values in (probabilities, labels)
            )
            calibration.append({"predicted": predicted, "observed": observed, "rows": len(rows)})
    return calibration


Integers = npt.NDArray[np.integer]

NUM_BINS = 8192
_SCALE, _BINS_PER_UNIT = 8.0, 64.0
"""Bins are 1 / 64 wide around a logit of 0 and ever wider beyond; the outer ones begin at about 11,900."""


@dataclass(frozen=True)
class GroupedAUC:
    """The mean of the areas within groups.

    Attributes:
        value: The mean, by the groups' weights; NaN without groups, or where a score is NaN.
        num_groups: Number of groups that have positive and negative rows, of weights above 0.
        num_rows: Number of rows of these groups.
    """

    value: float
    num_groups: int
    num_rows: int


def exact_auc(scores: Floats, labels: Floats, weights: Floats | None = None) -> float:
    """Returns the area under the ROC curve; NaN without both classes.

    Args:
        scores: The higher, the likelier a row is positive [N].
        labels: 0 or 1 [N].
        weights: The weight of each row, 0 or more [N]; None where all weigh 1.
    """
    if len(scores) == 0 or np.isnan(scores).any():
        return math.nan
    pairs = _count_pairs(np.argsort(scores, kind="stable"), scores, labels, weights, None)
    num_pairs = float(pairs.positive[0]) * float(pairs.negative[0])
    return float(pairs.ordered[0]) / num_pairs if num_pairs > 0 else math.nan


def grouped_auc(scores: Floats, labels: Floats, groups: Integers, weights: Floats | None = None) -> GroupedAUC:
    """Returns the mean of the areas within groups; the arguments are as in :func:`exact_auc`."""
    if len(scores) == 0:
        return GroupedAUC(math.nan, 0, 0)
    pairs = _count_pairs(np.lexsort((scores, groups)), scores, labels, weights, groups)
    num_pairs = pairs.positive * pairs.negative
    has_both = num_pairs > 0
    num_groups, num_rows = int(has_both.sum()), int(pairs.num_rows[has_both].sum())
    if num_groups == 0 or np.isnan(scores).any():
        return GroupedAUC(math.nan, num_groups, num_rows)
    areas = pairs.ordered[has_both] / num_pairs[has_both]
    own_weights = (pairs.positive + pairs.negative)[has_both]
    return GroupedAUC(float(np.average(areas, weights=own_weights)), num_groups, num_rows)


@dataclass(frozen=True)
class _Pairs:
    """Of each group: the weights of its positive rows, negative rows and ordered pairs (ties half), and its rows."""

    positive: Floats
    negative: Floats
    ordered: Floats
    num_rows: Integers


def _count_pairs(
    order: Integers, scores: Floats, labels: Floats, weights: Floats | None, groups: Integers | None
) -> _Pairs:
    """Counts the pairs by group; ``order``, not empty, sorts rows by group, then by score.

    Rows of one group and score form a run. The negative rows below a run (``behind``) are the negative rows of all
    earlier runs, less the rows of earlier groups. Each positive row is ordered with them, and half with the negative
    rows of its own run. Without weights all sums are whole and half numbers, and exact.
    """
    scores, is_positive = scores[order], labels[order] > 0.5
    begins_group = np.zeros(len(order), dtype=bool)
    if groups is not None:
        sorted_groups = groups[order]
        begins_group[1:] = sorted_groups[1:] != sorted_groups[:-1]
    begins_run = begins_group.copy()
    begins_run[1:] |= scores[1:] != scores[:-1]
    begins_group[0] = begins_run[0] = True
    runs = np.flatnonzero(begins_run)
    row_weights = np.ones(len(order)) if weights is None else weights[order].astype(np.float64)
    positive = np.add.reduceat(np.where(is_positive, row_weights, 0.0), runs)
    negative = np.add.reduceat(np.where(is_positive, 0.0, row_weights), runs)
    negative_below = np.cumsum(negative) - negative
    starts = np.flatnonzero(begins_group[runs])
    negative_below -= np.repeat(negative_below[starts], np.diff(starts, append=len(runs)))
    return _Pairs(
        positive=np.add.reduceat(positive, starts),
        negative=np.add.reduceat(negative, starts),
        ordered=np.add.reduceat(positive * (negative_below + negative / 2), starts),
        num_rows=np.diff(runs[starts], append=len(order)),
    )


def bin_counts(
    logits: Float[Tensor, " rows"], labels: Float[Tensor, " rows"], weights: Float[Tensor, " rows"] | None = None
) -> Tensor:
    """Returns the rows of each bin ``[2, NUM_BINS + 1]``: first negative rows, then positive rows.

    The last column counts the rows whose logit is NaN. ``labels`` are 0 or 1. Without ``weights`` the numbers are
    int64, with weights they are sums of weights in float64.
    """
    # in float64, in which asinh is monotonic over all float32 numbers
    positions = (logits.double() / _SCALE).asinh() * (_SCALE * _BINS_PER_UNIT) + NUM_BINS / 2
    bins = positions.clamp(0, NUM_BINS - 1).nan_to_num(nan=NUM_BINS).long()
    cells = bins + (labels > 0.5) * (NUM_BINS + 1)
    counted = torch.ones_like(cells) if weights is None else weights.double()
    return counted.new_zeros(2 * (NUM_BINS + 1)).index_add_(0, cells, counted).view(2, -1)


def binned_auc(counts: npt.NDArray[Any]) -> float:
    """Returns the area of rows in bins, of :func:`bin_counts`; NaN without both classes, or where a logit is NaN."""
    negative, positive = counts.astype(np.float64)
    num_pairs = float(negative.sum()) * float(positive.sum())
    if num_pairs == 0 or negative[-1] or positive[-1]:
        return math.nan
    behind = np.cumsum(negative) - negative
    return float(positive @ (behind + negative / 2)) / num_pairs


def most_error(counts: npt.NDArray[Any]) -> float:
    """Returns by how much :func:`binned_auc` may differ from the exact area; NaN without both classes.

    Only pairs within a bin may be miscounted: as a half each, where the exact area counts 0 to 1.
    """
    negative, positive = counts.astype(np.float64)
    num_pairs = float(negative.sum()) * float(positive.sum())
    return float(positive @ negative) / 2 / num_pairs if num_pairs else math.nan
