"""Ids by frequency: the most frequent value first, equally frequent ones by key, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from distembed.data.prepare.key_counts import Counts, chunks


def by_frequency(counted: Counts, key_ids: NDArray[np.int64], first_id: int, max_keys: int) -> Iterator[Counts]:
    """Fills in ``key_ids``, and yields the keys with their counts in the order of the ids.

    A pass takes the keys of a range of counts, as many as fit. Those of a single count need no sorting, however many.

    Args:
        counted: Keys in ascending order, with their counts.
        key_ids: Array that gets the id of each key.
        first_id: The most frequent key's.
        max_keys: Most keys to hold in memory.
    """
    next_id = first_id
    for low, high in _count_ranges(counted.counts, max_keys):
        for positions in _positions(counted.counts, low, high, max_keys):
            counts = counted.counts[positions]
            order = np.argsort(-counts, kind="stable") if low < high else np.arange(len(counts))
            positions = positions[order]
            key_ids[positions] = np.arange(next_id, next_id + len(positions))
            yield counted.rows(positions)
            next_id += len(positions)


def _count_ranges(counts: NDArray[np.int64], max_keys: int) -> list[tuple[int, int]]:
    """Returns ranges of counts, both ends included, highest first; each has at most ``max_keys`` keys, or one count."""
    histogram: dict[int, int] = {}
    for chunk in chunks(len(counts), max_keys):
        values, frequencies = np.unique(counts[chunk], return_counts=True)
        for value, frequency in zip(values.tolist(), frequencies.tolist(), strict=True):
            histogram[value] = histogram.get(value, 0) + frequency
    ranges: list[tuple[int, int]] = []
    entries = 0
    for value in sorted(histogram, reverse=True):
        entries += histogram[value]
        if ranges and entries <= max_keys:
            ranges[-1] = (value, ranges[-1][1])
        else:
            ranges.append((value, value))
            entries = histogram[value]
    return ranges


def _positions(counts: NDArray[np.int64], low: int, high: int, max_keys: int) -> Iterator[NDArray[np.int64]]:
    """Yields where the counts lie in ``[low, high]``: all at once when they have to be sorted, by chunks otherwise."""
    parts = (
        chunk.start + np.flatnonzero((counts[chunk] >= low) & (counts[chunk] <= high))
        for chunk in chunks(len(counts), max_keys)
    )
    if low == high:
        yield from parts
    else:
        yield np.concatenate(list(parts))
