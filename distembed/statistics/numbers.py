"""Mean, deviation and quantiles of one column of numbers in one split, as its rows go by."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from distembed.statistics.values import QUANTILES, NumbersOfSplit

MOST_KEPT = 1_000_000
"""Most numbers of a column and a split that are kept for quantiles."""


class NumberCounter:
    """Takes the numbers of a column, row after row.

    Args:
        num_rows: Number of rows of the split.
    """

    def __init__(self, num_rows: int) -> None:
        self._every = max(1, -(-num_rows // MOST_KEPT))
        self._kept: list[NDArray[np.float32]] = []
        self._num_rows = self._num_numbers = 0
        self._mean = self._squares = 0.0
        self._lowest, self._highest = math.inf, -math.inf

    def add(self, values: NDArray[np.float32]) -> None:
        """Takes the next rows; NaN is no number."""
        first = -self._num_rows % self._every
        self._num_rows += len(values)
        kept = values[first :: self._every]
        self._kept.append(kept[~np.isnan(kept)])
        numbers = values[~np.isnan(values)].astype(np.float64)
        if not len(numbers):
            return
        self._lowest, self._highest = min(self._lowest, numbers.min()), max(self._highest, numbers.max())
        # the means of both parts, and how far they are apart (Chan, Golub and LeVeque, 1979)
        mean, before = float(numbers.mean()), self._num_numbers
        self._num_numbers += len(numbers)
        apart = mean - self._mean
        self._mean += apart * len(numbers) / self._num_numbers
        self._squares += float(((numbers - mean) ** 2).sum()) + apart**2 * before * len(numbers) / self._num_numbers

    def result(self) -> NumbersOfSplit:
        """Returns what the numbers are like."""
        kept = np.concatenate([np.zeros(0, np.float32), *self._kept]).astype(np.float64)
        missing = 1 - self._num_numbers / self._num_rows if self._num_rows else math.nan
        if not self._num_numbers:
            return NumbersOfSplit(missing, math.nan, math.nan, (math.nan,) * len(QUANTILES), self._every)
        inner = np.quantile(kept if len(kept) else [math.nan], QUANTILES[1:-1]).tolist()
        deviation = math.sqrt(self._squares / self._num_numbers)
        quantiles = (float(self._lowest), *inner, float(self._highest))
        return NumbersOfSplit(missing, self._mean, deviation, quantiles, self._every)
