"""Finds rows that are equal in all columns, by hashes of 64 bits.

All rows that are equal have the same hash, so that comparing those whose hash lies in a share of all hashes tells what
share of the distinct rows is repeated. Among 10 million hashes two different rows are taken for equal with a
probability of 3 in a million.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from distembed.data.splitmix import mix64_array
from distembed.statistics.values import EqualRows

MOST_HASHES = 8_000_000
"""Most rows that are compared, about; each takes 9 bytes, and some 50 while they are sorted in the end."""


class RowHashes:
    """The hashes of rows, built up column by column.

    Args:
        num_rows: Number of rows.
    """

    def __init__(self, num_rows: int) -> None:
        self._hashes = np.zeros(num_rows, np.uint64)

    def add_numbers(self, values: NDArray[np.float32]) -> None:
        """Adds a column of numbers, in which NaN equals NaN and 0 equals -0."""
        values = np.where(np.isnan(values), np.float32(np.nan), values + np.float32(0))
        self._hashes = mix64_array(self._hashes ^ values.view(np.uint32).astype(np.uint64))

    def add_ids(self, ids: NDArray[np.int64]) -> None:
        """Adds a column of ids."""
        self._hashes = mix64_array(self._hashes ^ ids.astype(np.uint64))

    def add_lists(self, values: NDArray[np.uint64], lengths: NDArray[np.int64]) -> None:
        """Adds a column of lists, whose values count with their places."""
        offsets = np.cumsum(lengths) - lengths
        places = (np.arange(len(values)) - np.repeat(offsets, lengths)).astype(np.uint64)
        mixed = mix64_array(values ^ mix64_array(places))
        # sums modulo 2**64 from differences of running sums, which may overflow as they like
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])
        self._hashes = mix64_array(self._hashes ^ (sums[offsets + lengths] - sums[offsets]))
        self._hashes = mix64_array(self._hashes ^ lengths.astype(np.uint64))

    @property
    def values(self) -> NDArray[np.uint64]:
        """The hash of each row."""
        return self._hashes


class EqualRowsCounter:
    """Compares hashes of all rows, or of a share.

    Args:
        num_rows: Number of rows of all splits.
        splits: Names of the splits, first the one that others are compared with.
    """

    def __init__(self, num_rows: int, splits: list[str]) -> None:
        self._one_in = max(1, -(-num_rows // MOST_HASHES))
        self._splits = splits
        self._hashes: list[NDArray[np.uint64]] = []
        self._split_of: list[NDArray[np.int8]] = []

    def add(self, split: str, hashes: NDArray[np.uint64]) -> None:
        """Takes the hashes of some rows."""
        kept = hashes[hashes % np.uint64(self._one_in) == 0]
        self._hashes.append(kept)
        self._split_of.append(np.full(len(kept), self._splits.index(split), np.int8))

    def result(self) -> EqualRows:
        """Returns how many rows are equal to others."""
        hashes = np.concatenate([np.zeros(0, np.uint64), *self._hashes])
        split_of = np.concatenate([np.zeros(0, np.int8), *self._split_of])
        _, inverse, counts = np.unique(hashes, return_inverse=True, return_counts=True)
        is_in_training = np.zeros(len(counts), bool)
        is_in_training[inverse[split_of == 0]] = True
        shares: Mapping[str, float] = {
            name: float(is_in_training[inverse[split_of == number]].mean()) if (split_of == number).any() else 0.0
            for number, name in enumerate(self._splits)
            if number
        }
        return EqualRows((len(hashes) - len(counts)) * self._one_in, shares, 1 / self._one_in)
