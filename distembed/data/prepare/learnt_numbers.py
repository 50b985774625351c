"""What is learnt of columns of numbers over the training rows, and applied to all: means and deviations, and bins.

The distinct numbers are counted (``key_counts.py``) and added up exactly, so that what is learnt depends neither on
the order of the rows, nor on how they were cut into blocks, nor on the memory.

Bins: of n numbers in rising order, x_0 to x_(n-1), a bin begins at x_(k n // num_bins) for k = 1, 2, ..., and the first
at the lowest number of all. Bins that would begin with the same number are one, so that equal numbers stay together::

    numbers    1 1 1 1 2 3 7 9        4 bins would begin at 1, 1, 2, 7: edges 2, 7
    ids        1 1 1 1 2 2 3 3        0 is a missing number
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distembed.data.prepare.blocks import NumberColumn
from distembed.data.prepare.key_counts import Counts, KeyCounter, chunks, from_ordered_bits, ordered_bits
from distembed.data.prepare.row_splits import RowSplits, values_at_ranks
from distembed.data.prepare.spool import SpooledBlock

_FLOAT32 = np.dtype(np.float32)


def learn_numbers(
    blocks: Sequence[SpooledBlock],
    splits: RowSplits,
    place: int,
    column: NumberColumn,
    scratch: Path,
    max_keys: int,
) -> dict[str, Any]:
    """Returns what a column's transform learns of the training rows, in plain values.

    That is ``{"mean": float, "std": float}`` of ``standardize``, where a deviation of 0 counts as 1, and
    ``{"edges": [float, ...]}`` of ``quantile_bins``.

    Args:
        blocks: All blocks.
        splits: Which rows train.
        place: Number of the column among those of numbers.
        column: The column.
        scratch: Existing folder that nothing else uses.
        max_keys: Most distinct numbers that may be in memory.
    """
    counter = KeyCounter(scratch, max_keys)
    for block in blocks:
        numbers = block.numbers(place)[splits.train_rows(block)]
        bits, counts = np.unique(ordered_bits(numbers[~np.isnan(numbers)]), return_counts=True)
        counter.add(bits, counts)
    counted = counter.finish(1)
    if column.transform == "quantile_bins":
        return {"edges": _edges(counted, column.num_bins, max_keys)}
    return _moments(counted, max_keys)


def _edges(counted: Counts, num_bins: int, max_keys: int) -> list[float]:
    total = int(counted.counts.sum())
    ranks = [k * total // num_bins for k in range(1, num_bins)] if total else []
    bits = np.unique(values_at_ranks(counted.keys, counted.counts, ranks, max_keys))
    return from_ordered_bits(bits[bits > counted.keys[0]] if total else bits, _FLOAT32).astype(float).tolist()


def _moments(counted: Counts, max_keys: int) -> dict[str, Any]:
    total = int(counted.counts.sum())
    if not total:
        return {"mean": 0.0, "std": 1.0}
    mean = math.fsum(value * count for value, count in _values(counted, max_keys)) / total
    squares = math.fsum((value - mean) ** 2 * count for value, count in _values(counted, max_keys))
    return {"mean": mean, "std": math.sqrt(squares / total) or 1.0}


def _values(counted: Counts, max_keys: int) -> Iterator[tuple[float, int]]:
    for rows in chunks(len(counted.keys), max_keys):
        values = from_ordered_bits(np.asarray(counted.keys[rows]), _FLOAT32).astype(float)
        yield from zip(values.tolist(), counted.counts[rows].tolist(), strict=True)


def standardized(numbers: NDArray[np.float32], learnt: Mapping[str, Any]) -> NDArray[np.float32]:
    """Returns numbers less the mean, divided by the standard deviation; NaN stays NaN."""
    result: NDArray[np.float32] = ((numbers.astype(np.float64) - learnt["mean"]) / learnt["std"]).astype(np.float32)
    return result


def number_change(
    column: NumberColumn, learnt: Mapping[str, Any] | None
) -> Callable[[NDArray[Any]], NDArray[Any]] | None:
    """Returns what becomes of a column's numbers, those that are missing included; None where they stay as they are.

    Args:
        column: A column that is not one of bins.
        learnt: What its transform learnt; None where it learns nothing.
    """
    standardize = None if learnt is None else partial(standardized, learnt=learnt)
    if column.role != "dense" or column.keeps_missing:
        return standardize

    def change(numbers: NDArray[Any]) -> NDArray[Any]:
        changed = numbers if standardize is None else standardize(numbers)
        return np.nan_to_num(changed, copy=False, nan=0.0)

    return change


def bin_ids(numbers: NDArray[np.float32], learnt: Mapping[str, Any]) -> NDArray[np.int32]:
    """Returns the number of the bin of each number, from 1; 0 of NaN."""
    edges = np.array(learnt["edges"], np.float32)
    bins = np.searchsorted(edges, numbers, side="right").astype(np.int32) + 1
    return np.where(np.isnan(numbers), np.int32(0), bins)


def num_bins(learnt: Mapping[str, Any]) -> int:
    """Returns the number of ids of a column of bins, that of missing numbers included."""
    return len(learnt["edges"]) + 2
