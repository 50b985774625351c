"""The area under the ROC curve of rows that are counted in bins, on the device where they lie and without a wait.

Exact areas need all scores in one place, in order. Lines of metrics while training need them only about right, so each
step adds its rows to two histograms of logits, of positive and of negative rows, and an area is computed from the sums
over steps and ranks. Rows of one bin count as tied. What that changes is at most half the share of pairs that lie in
one bin (:func:`most_error`), and in practice much less, since about as many of these are in the right order as not: of
50,000 rows 1e-4 for bins a twentieth as wide as the logits spread, 3e-4 for a fifth. Only where all logits lie in a few
bins, as a model's may before it has learnt anything, does an area mean little.

Bins are equally wide in ``8 asinh(logit / 8)``: 1/64 about 0, 1/48 about -7 (a rate of 0.001), and 1/512 of the logit
itself for large ones, so that no model's logits are out of range. Trade-off: 128 KiB a rank.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

NUM_BINS = 8192
_SCALE, _BINS_PER_UNIT = 8.0, 64.0
"""The outer bins begin at a logit of about 11,900, and hold all that is beyond too."""


def bin_counts(
    logits: Float[Tensor, " rows"], labels: Float[Tensor, " rows"], weights: Float[Tensor, " rows"] | None = None
) -> Tensor:
    """Returns the rows of each bin ``[2, NUM_BINS + 1]``: first negative ones, then positive ones.

    The last column has the rows whose logit is NaN.

    Args:
        logits: The logits of the predictions.
        labels: 0 or 1.
        weights: The weight of each row, 0 or more; None where all weigh 1.

    Returns:
        Numbers of rows in int64, or their weights in float64.
    """
    # in float64, in which asinh is monotonic over all float32 numbers
    places = (logits.double() / _SCALE).asinh() * (_SCALE * _BINS_PER_UNIT) + NUM_BINS / 2
    bins = places.clamp(0, NUM_BINS - 1).nan_to_num(nan=NUM_BINS).long()
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
    """Returns by how much :func:`binned_auc` may differ from the exact area; NaN without both classes."""
    negative, positive = counts.astype(np.float64)
    num_pairs = float(negative.sum()) * float(positive.sum())
    return float(positive @ negative) / 2 / num_pairs if num_pairs else math.nan
