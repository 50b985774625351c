"""Metrics of a binary classifier, exact, from logits in float64, of rows that may have weights.

=================== ======================================================================================
logloss             mean of ``-y log p - (1-y) log(1-p)``
auc                 share of (positive, negative) pairs in the right order, ties counted half (Mann-Whitney)
normalized_entropy  logloss over the entropy of the label rate (He et al., ADKDD 2014); below 1 is better than the rate
calibration         sum of predictions over number of positives; 1 is calibrated
accuracy            share of rows on the right side of p = 0.5
=================== ======================================================================================

Means, sums and shares are by the weights of rows; for the pairs of AUC see ``auc.py``. A metric that is not defined,
for example the AUC of one class, is NaN.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from distembed.tasks.auc import Floats, exact_auc


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
    found = []
    for rows in bins:
        own = None if weights is None else weights[rows].astype(np.float64)
        if own is None or own.sum() > 0:
            predicted, observed = (float(np.average(each[rows], weights=own)) for each in (probabilities, labels))
            found.append({"predicted": predicted, "observed": observed, "rows": len(rows)})
    return found
