"""How often each key occurs, in bounded memory: sorted runs on disk, merged by ranges of keys.

Trade-off: entries are written twice when the keys do not fit in memory, and not at all when they do, which is every
feature of Criteo's with a few million rows.
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
    """Distinct keys in ascending order, and how often each occurs. The arrays may be mapped files."""

    keys: NDArray[np.uint32]
    counts: NDArray[np.int64]


class KeyCounter:
    """Adds up counts of keys that come in any order."""

    def __init__(self, folder: Path, limit_entries: int) -> None:
        """Count nothing yet.

        Args:
            folder: for what does not fit.
            limit_entries: how many keys to hold in memory.
        """
        self._folder = folder
        self._limit = limit_entries
        self._waiting: list[Counts] = []
        self._num_waiting = 0
        self._runs: list[Counts] = []
        self.num_dropped = 0
        self.rows_dropped = 0

    def add(self, keys: NDArray[np.uint32], counts: NDArray[np.int64]) -> None:
        """Count each key so many times; a key may come more than once."""
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
        """The keys that were counted at least ``min_count`` times; the others are tallied in ``num_dropped``."""
        parts = [*self._runs, _merge(self._waiting)]
        if not self._runs:
            return self._keep(parts[0], min_count)
        files = _AppendedCounts(self._folder / "counted")
        for low, high in _key_ranges(parts, self._limit):
            files.append(self._keep(_merge([_between(part, low, high) for part in parts]), min_count))
        return files.finish()

    def _keep(self, counted: Counts, min_count: int) -> Counts:
        kept = counted.counts >= min_count
        self.num_dropped += int(len(kept) - kept.sum())
        self.rows_dropped += int(counted.counts[~kept].sum())
        return Counts(counted.keys[kept], counted.counts[kept])


def chunks(length: int, size: int) -> Iterator[slice]:
    """``[0, length)`` in slices of this size."""
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def sort_keys(keys: NDArray[np.uint32]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """The keys in ascending order, and where each was; both sorted as one number, which is faster than argsort."""
    packed = keys.astype(np.uint64) << np.uint64(32) | np.arange(len(keys), dtype=np.uint64)
    packed.sort()
    return (packed >> np.uint64(32)).astype(np.uint32), (packed & np.uint64(_MAX_KEY)).astype(np.int64)


def create_mapped(path: Path, dtype: type[Any], length: int) -> NDArray[Any]:
    """A new array in a file, which the system may put out of memory; empty ones cannot be mapped."""
    return np.memmap(path, dtype, "w+", shape=(length,)) if length else np.zeros(0, dtype)


def _merge(parts: Sequence[Counts]) -> Counts:
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
    """Two files, of keys and of counts, that grow and are mapped in the end."""

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
    """Keys in ``[low, high]``."""
    start, stop = _rank(part.keys, low), _rank(part.keys, high + 1)
    return Counts(part.keys[start:stop], part.counts[start:stop])


def _rank(keys: NDArray[np.uint32], key: int) -> int:
    return len(keys) if key > _MAX_KEY else int(np.searchsorted(keys, np.uint32(key)))


def _key_ranges(parts: Sequence[Counts], limit_entries: int) -> Iterator[tuple[int, int]]:
    """Ranges of keys, both ends included, with at most ``limit_entries`` entries each, or of a single key."""
    low = 0
    while low <= _MAX_KEY:
        before = sum(_rank(part.keys, low) for part in parts)
        smallest, largest = low, _MAX_KEY
        while smallest < largest:
            middle = (smallest + largest + 1) // 2
            if sum(_rank(part.keys, middle + 1) for part in parts) - before <= limit_entries:
                smallest = middle
            else:
                largest = middle - 1
        yield low, smallest
        low = smallest + 1
