"""Mean, deviation and quantiles of one column of numbers in one split, as its rows go by."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from distembed.reports.statistics.values import QUANTILES, NumbersOfSplit

MOST_KEPT = 1_000_000
"""Most numbers of a column and a split that are kept for quantiles."""


class NumberCounter:
    """Takes the numbers of a column, row after row."""

    def __init__(self, num_rows: int) -> None:
        self._every = max(1, -(-num_rows // MOST_KEPT))
        self._kept: list[NDArray[np.float32]] = []
        self._num_rows = 0
        self._parts: list[tuple[float, ...]] = []  # number, mean, variance, least and most of some rows

    def add(self, values: NDArray[np.float32]) -> None:
        """Takes the next rows; NaN is no number."""
        kept = values[-self._num_rows % self._every :: self._every]
        self._kept.append(kept[~np.isnan(kept)])
        self._num_rows += len(values)
        numbers = values[~np.isnan(values)].astype(np.float64)
        if len(numbers):
            self._parts.append((len(numbers), numbers.mean(), numbers.var(), numbers.min(), numbers.max()))

    def result(self) -> NumbersOfSplit:
        """Returns what the numbers are like."""
        if not self._parts:
            missing = 1.0 if self._num_rows else math.nan
            return NumbersOfSplit(missing, math.nan, math.nan, (math.nan,) * len(QUANTILES), self._every)
        counts, means, variances, lows, highs = np.array(self._parts).T
        mean = float(np.average(means, weights=counts))
        # the variance of all is the mean of the parts' variances and the variance of their means
        deviation = math.sqrt(np.average(variances + (means - mean) ** 2, weights=counts))
        kept = np.concatenate(self._kept).astype(np.float64)
        inner = np.quantile(kept if len(kept) else [math.nan], QUANTILES[1:-1]).tolist()
        quantiles = (float(lows.min()), *inner, float(highs.max()))
        return NumbersOfSplit(1 - counts.sum() / self._num_rows, mean, deviation, quantiles, self._every)
