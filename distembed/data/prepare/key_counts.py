"""How often each key occurs, counted in bounded memory: sorted runs on disk are merged by ranges of keys.

Trade-off: keys and counts are written twice when they do not fit in memory, and not at all when they do, as those of
any of Criteo's features do with a few million rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MAX_KEY = 2**32 - 1


@dataclass(frozen=True)
class Counts:
    """Distinct keys in ascending order, and how often each occurs; the arrays may be mapped files."""

    keys: NDArray[np.uint32]
    counts: NDArray[np.int64]


class KeyCounter:
    """Adds up counts of keys that come in any order.

    Args:
        folder: Existing folder for what does not fit in memory.
        max_keys: Most keys to hold in memory.

    Attributes:
        num_dropped: Number of distinct keys that :meth:`finish` left out.
        rows_dropped: Sum of their counts.
    """

    def __init__(self, folder: Path, max_keys: int) -> None:
        self._folder = folder
        self._limit = max_keys
        self._waiting: list[Counts] = []
        self._num_waiting = 0
        self._runs: list[Counts] = []
        self.num_dropped = 0
        self.rows_dropped = 0

    def add(self, keys: NDArray[np.uint32], counts: NDArray[np.int64]) -> None:
        """Adds to the count of each key; a key may come more than once."""
        self._waiting.append(Counts(keys, counts))
        self._num_waiting += len(keys)
        if self._num_waiting > self._limit:
            merged = _merge(self._waiting)
            # Few distinct keys shrink when merged: only what stays large goes to disk.
            if len(merged.keys) > self._limit // 2:
                self._runs.append(_write(merged, self._folder / f"run{len(self._runs)}"))
                self._waiting, self._num_waiting = [], 0
            else:
                self._waiting, self._num_waiting = [merged], len(merged.keys)

    def finish(self, min_count: int) -> Counts:
        """Returns the keys that were counted at least ``min_count`` times, with their counts."""
        parts = [*self._runs, _merge(self._waiting)]
        if not self._runs:
            return self._drop_rare(parts[0], min_count)
        files = _AppendedCounts(self._folder / "counted")
        for low, high in _key_ranges(parts, self._limit):
            files.append(self._drop_rare(_merge([_between(part, low, high) for part in parts]), min_count))
        return files.finish()

    def _drop_rare(self, counted: Counts, min_count: int) -> Counts:
        frequent = counted.counts >= min_count
        self.num_dropped += int(len(frequent) - frequent.sum())
        self.rows_dropped += int(counted.counts[~frequent].sum())
        return Counts(counted.keys[frequent], counted.counts[frequent])


def chunks(length: int, size: int) -> Iterator[slice]:
    """Yields ``[0, length)`` in slices of this size, of which the last may be shorter."""
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def sort_keys(keys: NDArray[np.uint32]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Returns the keys in ascending order, and where each was; equal keys stay in order."""
    # key and place sorted as one number: faster than argsort
    packed = keys.astype(np.uint64) << np.uint64(32) | np.arange(len(keys), dtype=np.uint64)
    packed.sort()
    return (packed >> np.uint64(32)).astype(np.uint32), (packed & np.uint64(_MAX_KEY)).astype(np.int64)


def create_mapped(path: Path, dtype: type[Any], length: int) -> NDArray[Any]:
    """Returns a new array in a file, which the system may put out of memory."""
    # an empty file cannot be mapped
    return np.memmap(path, dtype, "w+", shape=(length,)) if length else np.zeros(0, dtype)


def _merge(parts: Sequence[Counts]) -> Counts:
    """Returns every distinct key of all parts once, with the sum of its counts."""
    keys = np.concatenate([np.zeros(0, np.uint32), *(part.keys for part in parts)])
    counts = np.concatenate([np.zeros(0, np.int64), *(part.counts for part in parts)])
    if not len(keys):
        return Counts(keys, counts)
    keys, order = sort_keys(keys)
    first = np.flatnonzero(np.concatenate([np.ones(1, bool), keys[1:] != keys[:-1]]))
    return Counts(keys[first], np.add.reduceat(counts[order], first))


def _write(counted: Counts, path: Path) -> Counts:
    files = _AppendedCounts(path)
    files.append(counted)
    return files.finish()


class _AppendedCounts:
    """Two files, one of keys and one of counts, that grow and are mapped in the end."""

    def __init__(self, path: Path) -> None:
        self._paths = path.with_suffix(".keys"), path.with_suffix(".counts")
        self._length = 0

    def append(self, counted: Counts) -> None:
        for path, values in zip(self._paths, (counted.keys, counted.counts), strict=True):
            with open(path, "ab") as file:
                file.write(np.ascontiguousarray(values).tobytes())
        self._length += len(counted.keys)

    def finish(self) -> Counts:
        if not self._length:
            return Counts(np.zeros(0, np.uint32), np.zeros(0, np.int64))
        keys, counts = self._paths
        return Counts(np.memmap(keys, np.uint32, "r"), np.memmap(counts, np.int64, "r"))


def _between(part: Counts, low: int, high: int) -> Counts:
    """Returns the part's keys in ``[low, high]``, with their counts."""
    start, stop = _rank(part.keys, low), _rank(part.keys, high + 1)
    return Counts(part.keys[start:stop], part.counts[start:stop])


def _rank(keys: NDArray[np.uint32], key: int) -> int:
    """Returns how many of the ascending keys are below ``key``."""
    return len(keys) if key > _MAX_KEY else int(np.searchsorted(keys, np.uint32(key)))


def _key_ranges(parts: Sequence[Counts], max_keys: int) -> Iterator[tuple[int, int]]:
    """Yields ranges of keys, both ends included, that cover all; each has at most ``max_keys`` entries, or one key."""
    low = 0
    while low <= _MAX_KEY:
        before = sum(_rank(part.keys, low) for part in parts)
        smallest, largest = low, _MAX_KEY
        while smallest < largest:
            middle = (smallest + largest + 1) // 2
            if sum(_rank(part.keys, middle + 1) for part in parts) - before <= max_keys:
                smallest = middle
            else:
                largest = middle - 1
        yield low, smallest
        low = smallest + 1
