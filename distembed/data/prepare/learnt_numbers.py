"""The means, deviations and bins that are learnt of columns of numbers over the training rows, and applied to all.

The distinct numbers are counted (``count.py``) and added up exactly, so that the result depends neither on the order
of the rows, nor on how they were cut into blocks, nor on the memory.

Bins: of n numbers in rising order, x_0 to x_(n-1), a bin begins at x_(k n // num_bins) for k = 1, 2, ..., and the first
at the lowest number of all. Bins that would begin with the same number are one, so that equal numbers stay together::

    numbers    1 1 1 1 2 3 7 9        4 bins would begin at 1, 1, 2, 7: edges 2, 7
    ids        1 1 1 1 2 2 3 3        0 is a missing number
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distembed.data.prepare.blocks import NumberColumn
from distembed.data.prepare.count import Database
from distembed.data.prepare.row_splits import RowSplits, count_numbers, values_at_ranks

Change = Callable[[NDArray[Any]], NDArray[Any]]


def learn_numbers(splits: RowSplits, place: int, column: NumberColumn, database: Database) -> dict[str, Any]:
    """Returns the parameters of a column's transform, learnt of the training rows.

    They are ``{"mean": float, "std": float}`` of ``standardize``, where a deviation of 0 counts as 1, and
    ``{"edges": [float, ...]}`` of ``quantile_bins``. The column is given with its number among those of numbers.
    """

    def training() -> Iterator[NDArray[np.float32]]:
        for block in splits.blocks:
            numbers = block.numbers(place)[splits.train_rows(block)]
            yield numbers[~np.isnan(numbers)] + np.float32(0)  # one zero of both

    total = count_numbers(database, training(), pa.float32())
    if not total:
        return {"edges": []} if column.transform == "quantile_bins" else {"mean": 0.0, "std": 1.0}
    if column.transform == "quantile_bins":
        ranks = [k * total // column.num_bins for k in range(column.num_bins)]
        return {"edges": np.unique(values_at_ranks(database, ranks, pa.float32()))[1:].astype(float).tolist()}
    mean = math.fsum(value * count for value, count in _values(database)) / total
    squares = math.fsum((value - mean) ** 2 * count for value, count in _values(database))
    return {"mean": mean, "std": math.sqrt(squares / total) or 1.0}


def _values(database: Database) -> Iterator[tuple[float, int]]:
    for batch in database.batches("select value, count from counted order by value"):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _changed(numbers: NDArray[Any], learnt: Mapping[str, Any] | None, keeps_missing: bool) -> NDArray[Any]:
    """Returns numbers, less the mean and divided by the deviation where these are learnt; NaN may become 0."""
    if learnt is not None:
        numbers = ((numbers.astype(np.float64) - learnt["mean"]) / learnt["std"]).astype(np.float32)
    return numbers if keeps_missing else np.nan_to_num(numbers, copy=False, nan=0.0)


def number_change(column: NumberColumn, learnt: Mapping[str, Any] | None) -> Change | None:
    """Returns the function that makes a dataset's numbers or bins of a column's; None where they stay as they are.

    ``learnt`` has the parameters of the column's transform; it is None where the transform learns none.
    """
    if column.role == "bins":
        return partial(bin_ids, learnt=learnt or {})
    keeps_missing = column.role != "dense" or column.keeps_missing
    return None if learnt is None and keeps_missing else partial(_changed, learnt=learnt, keeps_missing=keeps_missing)


def bin_ids(numbers: NDArray[np.float32], learnt: Mapping[str, Any]) -> NDArray[np.int32]:
    """Returns the number of the bin of each number, from 1; 0 of NaN."""
    edges = np.array(learnt["edges"], np.float32)
    bins = np.searchsorted(edges, numbers, side="right").astype(np.int32) + 1
    return np.where(np.isnan(numbers), np.int32(0), bins)


def num_bins(learnt: Mapping[str, Any]) -> int:
    """Returns the number of ids of a column of bins, that of missing numbers included."""
    return len(learnt["edges"]) + 2
