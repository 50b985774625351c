"""Sorts records by an integer key in bounded memory: sorted runs on disk are merged by ranges of keys.

Records are filled into arrays of a fixed length. Full arrays are sorted and written to disk as a run; with fewer
records nothing touches the disk. Records of equal keys stay in the order in which they came, so the result does not
depend on the memory that there was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Columns = tuple[NDArray[Any], ...]

_RUN_RECORDS = 2**27
_MERGED_RECORDS = 2**20
"""Most records of a run, and most that are merged at a time: more are no faster."""


class SortedRuns:
    """Takes records in any order and gives them sorted by their first column.

    Args:
        folder: Empty folder for what does not fit in memory.
        dtypes: Types of the columns; the first one, the key, is int64.
        memory_bytes: Memory that the records may take, sorting included.

    Attributes:
        num_records: Number of records so far.
    """

    def __init__(self, folder: Path, dtypes: Sequence[Any], memory_bytes: int) -> None:
        self._folder = folder
        self._limit = min(max(1, memory_bytes // record_bytes(dtypes)), _RUN_RECORDS)
        self._dtypes = tuple(np.dtype(dtype) for dtype in dtypes)
        self._waiting = self._empty()
        self._num_waiting = 0
        self._runs: list[Columns] = []
        self.num_records = 0

    def _empty(self) -> Columns:
        return tuple(np.empty(self._limit, dtype) for dtype in self._dtypes)  # takes memory once it is filled

    def add(self, *columns: NDArray[Any]) -> None:
        """Takes records, given column by column."""
        start, length = 0, len(columns[0])
        self.num_records += length
        while start < length:
            count = min(length - start, self._limit - self._num_waiting)
            for waiting, values in zip(self._waiting, columns, strict=True):
                waiting[self._num_waiting : self._num_waiting + count] = values[start : start + count]
            start, self._num_waiting = start + count, self._num_waiting + count
            if self._num_waiting == self._limit:
                self._write_run()

    def _write_run(self) -> None:
        self._sort_waiting()
        paths = [self._folder / f"run{len(self._runs)}.{column}" for column in range(len(self._dtypes))]
        for path, values in zip(paths, self._waiting, strict=True):
            with open(path, "wb") as file:
                file.write(values.data)
        self._runs.append(tuple(np.memmap(path, dtype, "r") for path, dtype in zip(paths, self._dtypes, strict=True)))
        self._num_waiting = 0

    def _sort_waiting(self) -> None:
        waiting = tuple(values[: self._num_waiting] for values in self._waiting)
        if len(waiting) == 1:
            waiting[0].sort()
            return
        order = np.argsort(waiting[0], kind="stable")
        for values in waiting:
            values[:] = values[order]

    def merged(self) -> Iterator[Columns]:
        """Yields all records in ascending order of their keys, some at a time; those of equal keys come in one part."""
        self._sort_waiting()
        runs = [*self._runs, tuple(values[: self._num_waiting] for values in self._waiting)]
        limit = min(self._limit, _MERGED_RECORDS)
        for bounds in _ranges([run[0] for run in runs], limit):
            parts = [
                tuple(values[start:stop] for values in run) for run, (start, stop) in zip(runs, bounds, strict=True)
            ]
            yield _merge([part for part in parts if len(part[0])])


def new_runs(folder: Path, dtypes: Sequence[Any], memory_bytes: int) -> SortedRuns:
    """Returns empty runs in a new folder; see :class:`SortedRuns`."""
    folder.mkdir()
    return SortedRuns(folder, dtypes, memory_bytes)


def record_bytes(dtypes: Sequence[Any]) -> int:
    """Returns the memory that a record takes while it is sorted."""
    # itself, and with columns beside the key an order and a column's copy
    sizes = [np.dtype(dtype).itemsize for dtype in dtypes]
    return sum(sizes) + (0 if len(sizes) == 1 else 2 * 8 + max(sizes))


def _merge(parts: Sequence[Columns]) -> Columns:
    if len(parts) == 1:
        return parts[0]
    columns = tuple(np.concatenate(values) for values in zip(*parts, strict=True))
    if len(columns) == 1:
        columns[0].sort()
        return columns
    order = np.argsort(columns[0], kind="stable")
    return tuple(values[order] for values in columns)


def _ranges(keys: Sequence[NDArray[np.int64]], limit: int) -> Iterator[list[tuple[int, int]]]:
    """Yields where successive ranges of keys lie in each run.

    A range has at most ``limit`` records, or those of a single key.

    Args:
        keys: Ascending keys of each run.
        limit: Most records of a range.
    """
    starts = [0] * len(keys)
    ends = [len(run) for run in keys]
    while starts != ends:
        stops = _stops(keys, starts, ends, limit)
        yield list(zip(starts, stops, strict=True))
        starts = stops


def _stops(keys: Sequence[NDArray[np.int64]], starts: list[int], ends: list[int], limit: int) -> list[int]:
    """Returns where the largest range of keys from ``starts`` on with at most ``limit`` records ends, by bisection."""
    if sum(ends) - sum(starts) <= limit:
        return ends
    low = min(int(run[start]) for run, start in zip(keys, starts, strict=True) if start < len(run))
    high = max(int(run[-1]) for run in keys if len(run))
    while low < high:
        middle = (low + high + 1) // 2
        if sum(_below(run, middle) for run in keys) - sum(starts) <= limit:
            low = middle
        else:
            high = middle - 1
    stops = [_below(run, low) for run in keys]
    if stops == starts:  # the first key alone has too many records
        stops = [int(np.searchsorted(run, np.int64(low), side="right")) for run in keys]
    return stops


def _below(keys: NDArray[np.int64], key: int) -> int:
    """Returns how many of the ascending keys are below ``key``."""
    return int(np.searchsorted(keys, np.int64(key)))
