"""Decodes row groups of Parquet files into blocks of rows, and checks each value before it is in a batch.

An id outside its table or a label that is not a number would otherwise crash a kernel, or end in a silent NaN hours
later. Where the schema allows missing numbers, null and NaN alike are NaN.

A run may skip some row groups that cannot be read. The rows of the next readable row group take their place, repeated
if it has fewer. So every batch keeps its size, every rank takes as many steps, and the rows depend on the damage alone,
not on the number of ranks. Trade-off: some rows are trained on twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from distembed.base.errors import RunError, UserError
from distembed.data.dataset.records import Jagged, RecordBlock, RecordLayout
from distembed.data.dataset.row_groups import RowGroup, too_many_unreadable
from distembed.data.dataset.schema import CategoricalFeature, Schema
from distembed.data.reader.age import AgeWeights
from distembed.data.reader.order import Segment, require_at_least

_LABEL_REMEDY = "leave such rows out"
_MISSING_REMEDY = (
    "fill them in, say with 0, or set missing_dense in the manifest's schema and train a model that tells missing "
    "numbers apart"
)


@dataclass(frozen=True)
class GroupRows:
    """Rows of one row group; each method raises a :class:`UserError` where a value cannot be used."""

    group: RowGroup
    schema: Schema
    start: int  # number of the first of the rows in the row group, for errors
    table: pa.Table
    ages: AgeWeights | None = None  # by which the weights of rows are multiplied

    def ids(self, feature: CategoricalFeature) -> NDArray[Any]:
        column = self._column(feature.name)
        if column.null_count:
            raise self._error(
                feature.name,
                f"{column.null_count} rows have no id; a single-valued feature needs one in every row: give missing "
                "values an id of their own, or make it a list column with multi_hot=True",
            )
        return self._ids(column, feature)

    def numbers(self, name: str) -> NDArray[np.float32]:
        """Returns a dense, label or weight column; refuses negative weights, and binary labels other than 0 and 1.

        A row may lack one of several labels, and dense numbers with ``missing_dense``: they are NaN. Rows that are
        weighted by age alone have the column of times as their weight.
        """
        schema = self.schema
        if self.ages is not None and name == self.ages.time:
            return self.ages.weights(self.times(name)).astype(np.float32)
        kinds = {label.name: label.kind for label in schema.all_labels}
        may_miss = schema.label is None if name in kinds else schema.missing_dense and name in schema.dense
        values = self._finite(self._column(name), name, may_miss)
        if name == schema.weight:
            self._refuse(name, values, values < 0, "a weight is 0 or more")
            if self.ages is not None:
                values = (values * self.ages.weights(self.times(self.ages.time))).astype(np.float32)
        if kinds.get(name) == "binary":
            setting = "label_kind" if name == schema.label else "the kind"
            law = f"a label is 0 or 1, unless the manifest's schema has {setting} 'number'"
            self._refuse(name, values, (values != 0) & (values != 1) & ~np.isnan(values), law)
        return values

    def times(self, name: str) -> NDArray[np.int64]:
        """Returns the column of times, in seconds since 1970; refuses a row without one."""
        return self.group.times(self.table, name, self.start)

    def lists(self) -> dict[str, Jagged]:
        """Returns the columns of lists by name: ids of multi-hot features, then dense sequences.

        Refuses null entries, and a row whose dense sequence is not as long as each list beside it. Lists longer than a
        feature's ``max_ids_per_row`` are cut to their last ids, with the numbers beside them.
        """
        columns = {}
        for feature in (categorical for categorical in self.schema.categorical if categorical.multi_hot):
            column = self._column(feature.name)
            flat = column.flatten()
            if flat.null_count:
                raise self._error(feature.name, "a list holds a null; leave it out of the list")
            columns[feature.name] = Jagged.from_lengths(self._ids(flat, feature).astype(np.int64), _lengths(column))
        for name in self.schema.dense_sequences:
            column = self._column(name)
            lengths = _lengths(column)
            numbers = self._finite(column.flatten(), name, self.schema.missing_dense, lengths)
            columns[name] = Jagged.from_lengths(numbers, lengths)
        for name in self.schema.dense_sequences:
            lengths = columns[name].lengths
            others = self.schema.lists_beside(name) if self.schema.beside else columns
            for other_name in others:
                other_lengths = columns[other_name].lengths
                for row in np.flatnonzero(other_lengths != lengths)[:1]:
                    raise self._error(
                        name,
                        f"row {self.start + row} has {lengths[row]} numbers, and {other_name!r} has "
                        f"{other_lengths[row]} values there; dense_sequences have one number for each id of the list "
                        "columns",
                    )
        return self._cut(columns)

    def _cut(self, columns: Mapping[str, Jagged]) -> dict[str, Jagged]:
        """Returns columns of lists without the ids, and numbers beside them, before a feature's last ids."""
        limits = {feature.name: feature.max_ids_per_row for feature in self.schema.categorical if feature.multi_hot}
        for name in self.schema.dense_sequences:
            limits[name] = min(
                (limit for other in self.schema.lists_beside(name) if (limit := limits[other]) is not None),
                default=None,
            )
        return {
            name: column if (limit := limits[name]) is None else column.last(limit) for name, column in columns.items()
        }

    def _ids(self, column: pa.Array, feature: CategoricalFeature) -> NDArray[Any]:
        """Returns ids, and refuses an id outside its table."""
        values: NDArray[Any] = column.to_numpy()
        for extreme in (int(values.min()), int(values.max())) if len(values) else ():
            if not 0 <= extreme < feature.num_embeddings:
                raise self._error(
                    feature.name,
                    f"id {extreme} is outside [0, {feature.num_embeddings}); num_embeddings in the manifest's schema "
                    "must exceed every id",
                )
        return values

    def _finite(
        self, column: pa.Array, name: str, may_miss: bool, lengths: NDArray[np.int64] | None = None
    ) -> NDArray[np.float32]:
        """Converts a column to float32, NaN if missing; refuses infinities, and missing values unless ``may_miss``.

        ``lengths`` has the number of values of each row of a list column, to name the row in an error.
        """
        remedy = _LABEL_REMEDY if name in self.schema.label_names else _MISSING_REMEDY
        if column.null_count and not may_miss:
            raise self._error(name, f"{column.null_count} values are null; {remedy}")
        if pa.types.is_boolean(column.type):
            column = pc.cast(column, pa.uint8())
        with np.errstate(over="ignore"):  # a number beyond float32 is infinite, and refused
            values: NDArray[np.float32] = column.to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
        wrong = np.isinf(values) if may_miss else ~np.isfinite(values)
        self._refuse(name, values, wrong, "every value must be a finite number", remedy, lengths)
        return values

    def _refuse(
        self,
        name: str,
        values: NDArray[np.float32],
        wrong: NDArray[np.bool_],
        law: str,
        missing_remedy: str = "",
        lengths: NDArray[np.int64] | None = None,
    ) -> None:
        """Raises a UserError that names the first row with a ``wrong`` value; ``law`` says which values are allowed."""
        if wrong.any():
            index = int(np.argmax(wrong))
            row = index if lengths is None else int(np.searchsorted(np.cumsum(lengths), index, side="right"))
            suffix = f"; {missing_remedy}" if np.isnan(values[index]) else ""
            raise self._error(name, f"row {self.start + row} is {values[index]}; {law}{suffix}")

    def _column(self, name: str) -> pa.Array:
        column = self.table.column(name)
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()

    def _error(self, column: str, problem: str) -> UserError:
        return UserError(f"{self.group}, column {column!r}: {problem}")


def _lengths(column: pa.Array) -> NDArray[np.int64]:
    """Returns the number of values of each row of a column of lists; a null list has none."""
    lengths: NDArray[np.int64] = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
    return lengths


# Columns are copied into the row-major block this many rows at a time, so that the rows being filled stay in cache.
_TILE_ROWS = 1024


@dataclass(frozen=True)
class Decoding:
    """How a reader decodes row groups, and into which memory."""

    threads: int = 0  # that decode rows ahead; 0 decodes them where batches are made
    skip_unreadable: int = 0  # row groups that may be unreadable, whose rows others take the place of
    pins: bool = False  # whether batches are in page-locked memory, from which a GPU copies asynchronously
    ages: AgeWeights | None = None  # weights by times, with which batches have weights even if the dataset has none

    def __post_init__(self) -> None:
        require_at_least("decode_threads", self.threads, 0)
        require_at_least("skip_unreadable", self.skip_unreadable, 0)


class Decoder:
    """Reads row groups of one split into blocks; threads share it."""

    def __init__(
        self, schema: Schema, groups: Sequence[RowGroup], most_unreadable: int = 0, ages: AgeWeights | None = None
    ) -> None:
        self._groups, self._most_unreadable, self._ages = groups, most_unreadable, ages
        self._columns = schema.columns if ages is None else (*schema.columns, ages.time)
        # without weights of their own, rows have the weights that are computed from their times
        self.schema = schema if ages is None or schema.weight else replace(schema, weight=ages.time, time=None)
        self._layout = RecordLayout.from_schema(self.schema)
        # the problem of each row group that could not be read, by its name
        self.unreadable: dict[str, str] = {} if ages is None else dict(ages.unreadable)

    def decode(self, segments: Sequence[Segment]) -> RecordBlock:
        """Reads the rows of one or more segments into one block, in the order of the segments.

        A row group that cannot be read raises a UserError, or is replaced as the module says while few enough are.
        """
        records = np.empty((sum(stop - start for _, start, stop in segments), self._layout.width), self._layout.dtype)
        lists: list[dict[str, Jagged]] = []
        filled = 0
        for index, start, stop in segments:
            rows, out = self._rows(index, start, stop), records[filled : filled + stop - start]
            ids = [rows.ids(feature) for feature in self._layout.single]
            numbers = [rows.numbers(name) for name in self._layout.numbers]
            floats = out.view(np.float32)
            for low in range(0, len(out), _TILE_ROWS):
                high = low + _TILE_ROWS
                for column, values in enumerate(ids):
                    out[low:high, column] = values[low:high]
                for column, values in enumerate(numbers, start=self._layout.first_float):
                    floats[low:high, column] = values[low:high]
            lists.append(rows.lists())
            filled += stop - start
        columns = {name: Jagged.concatenate([segment[name] for segment in lists]) for name in lists[0]}
        return RecordBlock(records, columns)

    def _rows(self, index: int, start: int, stop: int) -> GroupRows:
        """Reads rows ``[start, stop)`` of a row group, or of the next readable one, whose rows repeat if too few."""
        for number in (*range(index, len(self._groups)), *range(index)):
            group = self._groups[number]
            try:
                table = group.read(self._columns)
            except (UserError, RunError) as error:
                self.unreadable.setdefault(str(group), str(error))
                if not self._most_unreadable:
                    raise
                if len(self.unreadable) > self._most_unreadable:
                    raise too_many_unreadable(self.unreadable, self._most_unreadable) from error
                continue
            if number == index:
                return GroupRows(group, self.schema, start, table.slice(start, stop - start), self._ages)
            taken = table.take(np.arange(start, stop) % group.num_rows)
            return GroupRows(group, self.schema, 0, taken, self._ages)
        raise UserError(f"no row group can be read: {'; '.join(self.unreadable.values())}")
