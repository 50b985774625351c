"""Metrics of a binary classifier, exact, from logits in float64.

=================== ======================================================================================
logloss             mean of ``-y log p - (1-y) log(1-p)``
auc                 share of (positive, negative) pairs in the right order, ties counted half (Mann-Whitney)
normalized_entropy  logloss over the entropy of the label rate (He et al., ADKDD 2014); below 1 is better than the rate
calibration         sum of predictions over number of positives; 1 is calibrated
accuracy            share of rows on the right side of p = 0.5
=================== ======================================================================================

What cannot be computed (AUC of one class, say) is NaN.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
    def from_logits(cls, logits: Floats, labels: Floats) -> "BinaryMetrics":
        """Computes every metric from the logits [N] and labels [N], each 0 or 1."""
        logits, labels = logits.astype(np.float64), labels.astype(np.float64)
        rows = len(labels)
        if rows == 0:
            return cls(0, *[math.nan] * 5)
        logloss = float(np.mean(np.logaddexp(0.0, logits) - labels * logits))
        rate = float(labels.mean())
        entropy = binary_entropy(rate)
        positives = float(labels.sum())
        return cls(
            rows=rows,
            logloss=logloss,
            auc=exact_auc(logits, labels),
            normalized_entropy=logloss / entropy if entropy > 0 else math.nan,
            calibration=float(sigmoid(logits).sum()) / positives if positives else math.nan,
            accuracy=float(np.mean((logits > 0) == (labels > 0.5))),
        )


def sigmoid(logits: Floats) -> npt.NDArray[np.float64]:
    """Returns ``1 / (1 + exp(-x))`` of each logit, without overflow."""
    return np.exp(-np.logaddexp(0.0, -logits.astype(np.float64)))


def binary_entropy(rate: float) -> float:
    """Returns the entropy, in nats, of a label that is 1 at this rate; 0 for a rate of 0 or 1."""
    return -sum(p * math.log(p) for p in (rate, 1.0 - rate) if p > 0)


def exact_auc(scores: Floats, labels: Floats) -> float:
    """Returns the area under the ROC curve by the rank-sum statistic, ties counted half; NaN without both classes."""
    positive = labels > 0.5
    num_positive, num_negative = int(positive.sum()), int((~positive).sum())
    if num_positive == 0 or num_negative == 0 or np.isnan(scores).any():
        return math.nan
    order = np.argsort(scores, kind="stable")
    ranked = scores[order]
    starts = np.flatnonzero(np.r_[True, ranked[1:] != ranked[:-1]])
    ends = np.r_[starts[1:], len(ranked)]
    # ranks are counted from 1; ties share the mean of their ranks
    mean_rank = (starts + ends + 1) / 2
    ranks_of_positives = np.add.reduceat(positive[order].astype(np.float64), starts) @ mean_rank
    return float((ranks_of_positives - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative))


def calibration_bins(logits: Floats, labels: Floats, num_bins: int = 20) -> list[dict[str, float]]:
    """Returns mean predictions and observed rates of bins of equally many rows, in the order of predictions."""
    probabilities = sigmoid(logits)
    order = np.argsort(probabilities, kind="stable")
    bins = [rows for rows in np.array_split(order, num_bins) if len(rows)]
    return [
        {
            "predicted": float(probabilities[rows].mean()),
            "observed": float(labels[rows].astype(np.float64).mean()),
            "rows": len(rows),
        }
        for rows in bins
    ]
