"""The columns of a row group as arrays, and mean, deviation and quantiles of a column of numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from distembed.base.errors import UserError
from distembed.data.dataset.row_groups import RowGroup
from distembed.data.dataset.schema import CategoricalFeature, Schema
from distembed.data.hashing import mix64_array
from distembed.reports.statistics.values import QUANTILES, NumbersOfSplit

Lengths = NDArray[np.int64] | None
"""Number of values of each row of lists; None for a column with one value in each row."""
MOST_KEPT = 1_000_000
"""Most numbers of a column and a split that are kept for quantiles."""


class GroupColumns:
    """All columns of a row group."""

    def __init__(self, group: RowGroup, schema: Schema) -> None:
        table = group.read([*schema.columns, *([schema.time] if schema.time is not None else [])])
        self.num_rows: int = len(table)
        # a hash of each row, times left out; NaN equals NaN, and 0 equals -0
        self.hashes = np.zeros(self.num_rows, np.uint64)
        # columns of numbers, label and weight, row after row; NaN where there are none
        self.numbers: dict[str, tuple[NDArray[np.float32], Lengths]] = {}
        for name in (*filter(None, (schema.label, schema.weight)), *schema.dense, *schema.dense_sequences):
            values, lengths = _values(table, name)
            numbers = pc.cast(values, pa.float32(), safe=False).to_numpy(zero_copy_only=False)
            self.numbers[name] = numbers, lengths
            numbers = np.where(np.isnan(numbers), np.float32(np.nan), numbers + np.float32(0))
            self.hashes = _mixed(self.hashes, numbers.view(np.uint32), lengths)
        self.ids: dict[str, tuple[NDArray[np.int64], Lengths]] = {}
        for feature in schema.categorical:
            values, lengths = _values(table, feature.name)
            ids = _checked_ids(values, feature, str(group))
            self.ids[feature.name] = ids, lengths
            self.hashes = _mixed(self.hashes, ids.view(np.uint64), lengths)
        self.days = None  # of each row, counted from 1970
        if schema.time is not None:
            self.days = table[schema.time].to_numpy().astype(np.int64) // 86_400

    def doubles(self, name: str | None, default: float) -> NDArray[np.float64]:
        """Returns the number of each row, or ``default`` for all rows of a dataset without the column."""
        return np.full(self.num_rows, default) if name is None else self.numbers[name][0].astype(np.float64)


def _values(table: pa.Table, name: str) -> tuple[pa.Array, Lengths]:
    column = table[name].combine_chunks()
    column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    if not pa.types.is_nested(column.type):
        return column, None
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    return column.flatten(), lengths.astype(np.int64)


def _checked_ids(values: pa.Array, feature: CategoricalFeature, group: str) -> NDArray[np.int64]:
    """Returns ids that are in the feature's table."""
    if values.null_count:
        raise UserError(f"{group}, column {feature.name!r}: {values.null_count} rows have no id")
    ids = values.to_numpy(zero_copy_only=False).astype(np.int64)
    if len(ids) and (ids.min() < 0 or ids.max() >= feature.num_embeddings):
        wrong = ids[((ids < 0) | (ids >= feature.num_embeddings)).argmax()]
        raise UserError(
            f"{group}, column {feature.name!r} has the id {wrong}: ids are in [0, {feature.num_embeddings})"
        )
    return ids


def _mixed(hashes: NDArray[np.uint64], values: NDArray[Any], lengths: Lengths) -> NDArray[np.uint64]:
    """Returns the hashes of rows with one more column, whose values in lists count with their places."""
    values = values.astype(np.uint64, copy=False)
    if lengths is None:
        return mix64_array(hashes ^ values)
    offsets = np.cumsum(lengths) - lengths
    places = (np.arange(len(values)) - np.repeat(offsets, lengths)).astype(np.uint64)
    # sums modulo 2**64 from differences of running sums, which may overflow
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mix64_array(values ^ mix64_array(places)))])
    hashes = mix64_array(hashes ^ (sums[offsets + lengths] - sums[offsets]))
    return mix64_array(hashes ^ lengths.astype(np.uint64))


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
        """Returns the share of missing numbers, mean, deviation and quantiles."""
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
