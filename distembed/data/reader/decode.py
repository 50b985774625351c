"""Decodes row groups of Parquet files into blocks of rows that batches are gathered from.

Single-valued columns become one row-major array, so that gathering a random row touches two or three cache lines
instead of one for each of forty columns::

    records[row] = [ id of feature 0 | id of feature 1 | ... | dense 0 | dense 1 | ... | label ]   int32 (or int64)

Dense values and the label are float32 bits in the same array. Multi-hot columns keep their values and offsets.

Every value is checked here, a whole row group at a time: an id outside its table or a label that is not a number would
otherwise crash a kernel or end in a silent NaN hours later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from distembed.data.dataset.row_groups import RowGroup
from distembed.data.dataset.schema import CategoricalFeature, Schema
from distembed.errors import UserError

# Columns are copied into the row-major block this many rows at a time, so that the rows being filled stay in cache.
_TILE_ROWS = 1024


@dataclass(frozen=True)
class RecordLayout:
    """Where each single-valued column stands in a record.

    Attributes:
        single: Single-valued features, in the order of their ids in a record.
        multi_hot: Multi-hot features, which are not in the record.
        num_dense: Number of dense columns.
        dtype: int32, or int64 where the ids of a table need it.
    """

    single: tuple[CategoricalFeature, ...]
    multi_hot: tuple[CategoricalFeature, ...]
    num_dense: int
    dtype: np.dtype[Any]

    @classmethod
    def from_schema(cls, schema: Schema) -> RecordLayout:
        """Returns the layout for the rows of this schema."""
        single = tuple(feature for feature in schema.categorical if not feature.multi_hot)
        multi_hot = tuple(feature for feature in schema.categorical if feature.multi_hot)
        wide = any(feature.num_embeddings > 2**31 for feature in single)
        return cls(single, multi_hot, len(schema.dense), np.dtype(np.int64 if wide else np.int32))

    @property
    def first_float(self) -> int:
        """Index of the first dense value when a record is viewed as float32."""
        return len(self.single) * (self.dtype.itemsize // 4)

    @property
    def width(self) -> int:
        """Number of elements of ``dtype`` in a record."""
        floats_each = self.dtype.itemsize // 4
        return len(self.single) + -(-(self.num_dense + 1) // floats_each)


@dataclass(frozen=True)
class Jagged:
    """One multi-hot column.

    Attributes:
        values: Ids of all rows, end to end.
        offsets: Where the ids of each row begin, and where the last ones end, ``[num_rows + 1]``.
    """

    values: NDArray[np.int64]
    offsets: NDArray[np.int64]

    @classmethod
    def from_lengths(cls, values: NDArray[np.int64], lengths: NDArray[np.int64]) -> Jagged:
        """Returns a column from the number of ids of each row."""
        return cls(values, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of ids of each row."""
        return np.diff(self.offsets)

    def gather(self, rows: NDArray[np.int64]) -> Jagged:
        """Returns these rows, in this order."""
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        shift = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
        return Jagged.from_lengths(self.values[shift + np.arange(len(shift))], lengths)


@dataclass(frozen=True)
class Block:
    """Decoded rows.

    Attributes:
        records: Row-major array of the single-valued columns, ``[num_rows, width]``; see :class:`RecordLayout`.
        jagged: Multi-hot columns by feature.
    """

    records: NDArray[Any]
    jagged: dict[str, Jagged]

    def gather(self, rows: NDArray[np.int64]) -> Block:
        """Returns these rows, in this order."""
        return Block(
            np.take(self.records, rows, axis=0), {name: column.gather(rows) for name, column in self.jagged.items()}
        )

    @classmethod
    def concatenate(cls, blocks: Sequence[Block]) -> Block:
        """Returns the rows of all blocks, of which there is at least one, end to end."""
        records = np.concatenate([block.records for block in blocks])
        return cls(records, {name: _concatenate([b.jagged[name] for b in blocks]) for name in blocks[0].jagged})


def _concatenate(columns: Sequence[Jagged]) -> Jagged:
    values = np.concatenate([column.values for column in columns])
    return Jagged.from_lengths(values, np.concatenate([column.lengths for column in columns]))


@dataclass(frozen=True)
class Decoder:
    """Reads row groups of one split into blocks.

    Attributes:
        schema: Columns to read.
        groups: Row groups of the split.
    """

    schema: Schema
    groups: tuple[RowGroup, ...]

    def decode(self, segments: Sequence[tuple[int, int, int]]) -> Block:
        """Reads rows into one block.

        Args:
            segments: Rows as (number of the row group, first row, row after the last one), end to end.

        Raises:
            UserError: A row group is damaged; or a value is missing, not finite, or an id outside its table, and the
                error says in which column.
        """
        layout = RecordLayout.from_schema(self.schema)
        records = np.empty((sum(stop - start for _, start, stop in segments), layout.width), layout.dtype)
        parts: dict[str, list[Jagged]] = {feature.name: [] for feature in layout.multi_hot}
        filled = 0
        for index, start, stop in segments:
            table = self.groups[index].read(self.schema.columns).slice(start, stop - start)
            target = records[filled : filled + stop - start]
            self._fill_records(target, table, layout, self.groups[index])
            for feature in layout.multi_hot:
                parts[feature.name].append(_jagged_column(table, feature, self.groups[index]))
            filled += stop - start
        return Block(records, {name: _concatenate(columns) for name, columns in parts.items()})

    def _fill_records(self, out: NDArray[Any], table: pa.Table, layout: RecordLayout, group: RowGroup) -> None:
        floats = out.view(np.float32)
        ids = [_id_column(table, feature, group) for feature in layout.single]
        numbers = [_float_column(table, name, group) for name in (*self.schema.dense, self.schema.label)]
        _check_label(numbers[-1], self.schema.label, group)
        first = layout.first_float
        for low in range(0, len(out), _TILE_ROWS):
            high = low + _TILE_ROWS
            for column, values in enumerate(ids):
                out[low:high, column] = values[low:high]
            for column, values in enumerate(numbers, start=first):
                floats[low:high, column] = values[low:high]


def _id_column(table: pa.Table, feature: CategoricalFeature, group: RowGroup) -> NDArray[Any]:
    column = _combined(table, feature.name)
    if column.null_count:
        raise UserError(
            f"{_where(group, feature.name)}: {column.null_count} rows have no id; a single-valued feature needs one in "
            "every row: give missing values an id of their own, or make it a list column with multi_hot=True"
        )
    values: NDArray[Any] = column.to_numpy()
    _check_ids(values, feature, group)
    return values


def _jagged_column(table: pa.Table, feature: CategoricalFeature, group: RowGroup) -> Jagged:
    column = _combined(table, feature.name)
    flat = column.flatten()
    if flat.null_count:
        raise UserError(f"{_where(group, feature.name)}: a list holds a null; leave it out of the list")
    values = flat.to_numpy()
    _check_ids(values, feature, group)
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
    return Jagged.from_lengths(values.astype(np.int64), lengths.astype(np.int64))


def _float_column(table: pa.Table, name: str, group: RowGroup) -> NDArray[np.float32]:
    column = _combined(table, name)
    if column.null_count:
        raise UserError(f"{_where(group, name)}: {column.null_count} values are null; fill them in, say with 0")
    if pa.types.is_boolean(column.type):
        column = pc.cast(column, pa.uint8())
    values: NDArray[np.float32] = column.to_numpy().astype(np.float32, copy=False)
    finite = np.isfinite(values)
    if not finite.all():
        row = int(np.argmin(finite))
        raise UserError(f"{_where(group, name)}: row {row} is {values[row]}; every value must be a finite number")
    return values


def _check_label(values: NDArray[np.float32], name: str, group: RowGroup) -> None:
    wrong = (values != 0) & (values != 1)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise UserError(f"{_where(group, name)}: row {row} is {values[row]}; a label is 0 or 1")


def _check_ids(values: NDArray[Any], feature: CategoricalFeature, group: RowGroup) -> None:
    if len(values) == 0:
        return
    for extreme in (int(values.min()), int(values.max())):
        if not 0 <= extreme < feature.num_embeddings:
            raise UserError(
                f"{_where(group, feature.name)}: id {extreme} is outside [0, {feature.num_embeddings}); "
                "num_embeddings in the manifest's schema must exceed every id"
            )


def _combined(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _where(group: RowGroup, column: str) -> str:
    return f"{group}, column {column!r}"
