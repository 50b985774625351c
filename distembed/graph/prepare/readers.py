"""Reads edges between ids from rows of files, or from the ids that occur together in a dataset's training split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from distembed.base.errors import UserError
from distembed.base.names import one_of
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.row_groups import list_row_groups
from distembed.data.dataset.schema import ITEM, USER
from distembed.data.prepare.options import ProgressCallback, ProgressUpdate
from distembed.data.prepare.table.inputs import TableInput
from distembed.data.prepare.table.source import NamedRows, RowReader
from distembed.data.table.keys import coded
from distembed.data.table.numbers import finite_numbers
from distembed.data.table.raw_columns import INTEGER, LIST, NUMBER, TEXT, type_kind
from distembed.data.table.schema import TableSchema
from distembed.graph.prepare.counted_edges import EdgeTables
from distembed.graph.prepare.options import GraphOptions
from distembed.graph.prepare.value_ids import ValueIds
from distembed.graph.rows import Edges, stored_edges

_MISSING = pa.array([""])
_NAMED_VALUES = pa.schema({"value": pa.string(), "id": pa.int64()})
_KEYS = pa.schema({"key": pa.int64()})
_WEIGHTED_KEYS = pa.schema({"key": pa.int64(), "place": pa.int64(), "weight": pa.float64()})
_NO_SEPARATOR = "\x1f"
"""The separator of units, which no text has: a text is a list of one word."""
_MOST_READ_BYTES = 16 << 20


class EdgeReader:
    """Reads rows of files once; ``memory_bytes`` limits about how much is read at a time."""

    def __init__(
        self, inputs: Sequence[TableInput], options: GraphOptions, values: ValueIds, memory_bytes: int
    ) -> None:
        names: dict[str, Any] = {options.source: {}, options.attribute or options.target: {}}
        if options.attribute is not None:
            names[options.attribute] = {"is_list": True, "separator": _NO_SEPARATOR}
        dense: dict[str, Any] = {options.weight: {}} if options.weight is not None else {}
        schema = TableSchema.from_json({"categorical": names, "dense": dense}, "the columns")
        self._rows = RowReader(inputs, schema)
        self._options, self._values, self._memory_bytes = options, values, memory_bytes
        self._first_unknown, self._num_unknown = "", 0

    @property
    def num_rows(self) -> int:
        """Number of rows read so far."""
        return sum(self._rows.num_lines)

    def sources(self) -> list[dict[str, Any]]:
        """Returns the descriptions of the inputs for ``graph.json``, once all rows were read."""
        names = ("name", "bytes", "sha256", "num_rows")
        return [{name: getattr(source, name) for name in names} for source in self._rows.sources()]

    def edges(self, tables: EdgeTables) -> Iterator[Edges]:
        """Reads all rows into ``tables``, then yields distinct ascending edges; refuses bad rows and unknown values."""
        if self._options.attribute is None:
            schema = _WEIGHTED_KEYS if self._options.weighted else _KEYS
            in_memory = tables.add_named(self._named_edges(tables, schema), schema)
        else:
            tables.database.add("pairs", self._pairs(tables), _NAMED_VALUES)
        num_bytes = sum(source.bytes for source in self._rows.sources())
        tables.report(ProgressUpdate("read", num_bytes, num_bytes, self.num_rows))
        tables.dropped["unknown"] = self._num_unknown
        if self._num_unknown and self._options.unknown == "error":
            raise UserError(
                f"{self._first_unknown}. {self._num_unknown:,} of {self.num_rows:,} rows have such a "
                "value: mend them, or leave these rows out (unknown=drop, on the command line --unknown drop)"
            )
        return tables.named(in_memory) if self._options.attribute is None else tables.value_edges()

    def _named_edges(self, tables: EdgeTables, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yields batches of edge keys; weighted edges have their input position too, which orders equal keys."""
        options, first_position = self._options, 0
        for rows in self._blocks(tables):
            sources, source_known = self._ids(rows, options.source)
            targets, target_known = self._ids(rows, options.target)
            has_ids = self._count_unknown(source_known & target_known)
            weights = self._weights(rows, options.weight)[has_ids] if options.weight is not None else None
            sources, targets = sources[has_ids], targets[has_ids]
            stored = stored_edges(self._values.num_nodes, sources, targets, weights, options.directed)
            tables.dropped["self_loops"] += int(np.count_nonzero(sources == targets))
            columns: list[NDArray[Any]] = [stored.keys]
            if stored.weights is not None:
                columns += [first_position + np.arange(len(stored)), stored.weights]
            yield pa.record_batch(columns, schema=schema)
            first_position += len(stored)

    def _pairs(self, tables: EdgeTables) -> Iterator[pa.RecordBatch]:
        """Yields (attribute value, id) pairs, one for each value of a row's list; values are converted to text."""
        for rows in self._blocks(tables):
            ids, has_id = self._ids(rows, self._options.source)
            lengths, values = _list_values(self._column(rows, str(self._options.attribute), INTEGER, TEXT, LIST))
            tables.dropped["missing"] += int(np.count_nonzero(lengths == 0))
            # a row without a value makes no pair: it counts as ``missing``, even where its id is unknown
            has_id = self._count_unknown(has_id | (lengths == 0))
            ids, has_id = np.repeat(ids, lengths), np.repeat(has_id, lengths)
            values = values.filter(pa.array(has_id)).cast(pa.string())
            yield pa.record_batch([values, ids[has_id]], schema=_NAMED_VALUES)

    def _blocks(self, tables: EdgeTables) -> Iterator[NamedRows]:
        for rows in self._rows.blocks(min(_MOST_READ_BYTES, self._memory_bytes), tables.report):
            if rows.bad:
                bad, place = rows.bad[0], self._rows.inputs[rows.source].place
                raise UserError(f"{place} cannot be read: line {bad.line} is no row of its columns: {bad.text!r}")
            yield rows

    def _column(self, rows: NamedRows, name: str, *kinds: str) -> pa.Array:
        column = rows.columns[name]
        kind = type_kind(column.type)
        if kind == LIST and type_kind(column.type.value_type) not in (None, INTEGER, TEXT):
            kind = "other"
        if kind not in (None, *kinds, TEXT):
            place, allowed = self._rows.inputs[rows.source].place, " or ".join(dict.fromkeys((*kinds, TEXT)))
            raise UserError(f"{place}, column {name!r}: its type is {column.type}; it must be {allowed}.")
        return column.cast(pa.string()) if kind is None else column

    def _ids(self, rows: NamedRows, name: str) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Returns each row's id and a mask of the rows that have one; refuses malformed and missing values at once."""
        column = self._column(rows, name, INTEGER)
        values = coded(column, _MISSING)
        ids_of_values = self._values.find(values.distinct)
        # Code 0 stands for a missing value, which is malformed; code i for the distinct value i - 1.
        ids = np.concatenate([[0], ids_of_values.ids])[values.codes]
        malformed = np.concatenate([[True], ids_of_values.malformed])[values.codes]
        unknown = np.concatenate([[False], ids_of_values.unknown])[values.codes]
        self._require_well_formed(rows, name, column, malformed, self._values.allowed)
        if not self._first_unknown and unknown.any():
            place = self._row_text(rows, name, column, int(unknown.argmax()))
            self._first_unknown = f"{place}, which {self._values.unknown_means}"
        return ids, ~unknown

    def _weights(self, rows: NamedRows, name: str) -> NDArray[np.float64]:
        column = self._column(rows, name, INTEGER, NUMBER)
        weights, malformed = finite_numbers(column)
        self._require_well_formed(rows, name, column, malformed | (weights <= 0), "a finite number above 0")
        return weights

    def _require_well_formed(
        self, rows: NamedRows, name: str, column: pa.Array, malformed: NDArray[np.bool_], allowed: str
    ) -> None:
        if malformed.any():
            raise UserError(f"{self._row_text(rows, name, column, int(malformed.argmax()))}; it must be {allowed}")

    def _row_text(self, rows: NamedRows, name: str, column: pa.Array, row: int) -> str:
        """Returns a text like ``edges.csv, row 3: source is 'x'``, for an error."""
        value = column[row].as_py()
        number = self._rows.num_lines[rows.source] - len(rows.lines) + row + 1
        shown = "nothing" if value is None or value == "" else repr(value)
        return f"{self._rows.inputs[rows.source].place}, row {number}: {name} is {shown}"

    def _count_unknown(self, has_id: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Adds the rows outside the mask to the count of rows without an id, and returns the mask unchanged."""
        self._num_unknown += int(np.count_nonzero(~has_id))
        return has_id


def _list_values(column: pa.Array) -> tuple[NDArray[np.int64], pa.Array]:
    """Returns the number of values in each row, and all values in order; skips nulls, and empty texts outside lists."""
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        column = pc.if_else(pc.equal(column, ""), None, column) if pa.types.is_string(column.type) else column
        return column.is_valid().to_numpy(zero_copy_only=False).astype(np.int64), column.drop_null()
    values = column.flatten()
    rows = pc.list_parent_indices(column).filter(values.is_valid())
    return np.bincount(rows.to_numpy(), minlength=len(column)), values.drop_null()


_SPLIT = "train"
_PAIRS = pa.schema({"value": pa.int64(), "id": pa.int64()})
_ENTRIES = pa.schema({"list": pa.int64(), "place": pa.int64(), "id": pa.int64()})


class CoOccurrenceReader:
    """Reads the ids that occur together in a dataset's training split.

    Items of a user are neighbours of each other, and so are users of an item. In sequences, items may also be
    neighbours only ``within`` a number of steps.
    """

    def __init__(self, dataset: Path, table: str, within: int | None) -> None:
        self._manifest = Manifest.load(dataset)
        features = {feature.name: feature for feature in self._manifest.schema.categorical}
        one_of("table", table, features)
        self._other_feature = ITEM if table == USER else USER
        if self._other_feature not in features:
            raise UserError(
                f"{dataset} has no column {self._other_feature!r}: co_occurrence reads datasets of `distembed prepare "
                "ratings` or `prepare sequences`"
            )
        if within is not None and not features[table].multi_hot:
            raise UserError(
                f"within counts steps, and a row of {dataset} has a single {table}: give a dataset of `distembed "
                "prepare sequences`, or leave within out"
            )
        self.num_rows = self._manifest.split(_SPLIT).num_rows
        self._dataset, self._table, self._within = dataset, table, within

    def sources(self) -> list[dict[str, Any]]:
        """Returns an empty list, as the edges come from a dataset and from no input file."""
        return []

    def edges(self, tables: EdgeTables) -> Iterator[Edges]:
        """Reads the training split into ``tables``, then yields distinct edges in ascending order of their keys."""
        if self._within is not None:
            tables.database.add("entries", _list_entries(self._columns(tables.report, self._table)), _ENTRIES)
            return tables.step_edges(self._within)
        columns = self._columns(tables.report, self._other_feature, self._table)
        tables.database.add("pairs", map(_pairs, columns), _PAIRS)
        return tables.value_edges()

    def _columns(self, report: ProgressCallback, *names: str) -> Iterator[list[pa.Array]]:
        """Yields columns of the training split, a row group at a time."""
        num_rows = 0
        for group in list_row_groups(self._dataset, self._manifest, _SPLIT):
            table = group.read(names)
            yield [table[name].combine_chunks() for name in names]
            num_rows += group.num_rows
            report(ProgressUpdate("read", num_rows, self.num_rows, num_rows))


def _list_entries(columns: Iterator[list[pa.Array]]) -> Iterator[pa.RecordBatch]:
    """Yields (list number, position in the list, id) for each entry; numbers continue from group to group."""
    num_lists = 0
    for (lists,) in columns:
        rows, ids = pc.list_parent_indices(lists).to_numpy(), lists.flatten()
        lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
        # position in the flattened column minus the position where the entry's list begins
        positions = np.arange(len(rows)) - (np.cumsum(lengths) - lengths)[rows]
        yield pa.record_batch([rows + num_lists, positions, _integers(ids)], schema=_ENTRIES)
        num_lists += len(lists)


def _pairs(columns: list[pa.Array]) -> pa.RecordBatch:
    """Pairs the values of two columns row by row; if one holds lists, pairs each entry with its row's other value."""
    lists = next((column for column in columns if pa.types.is_list(column.type)), None)
    if lists is not None:
        rows = pc.list_parent_indices(lists)
        columns = [column.flatten() if column is lists else column.take(rows) for column in columns]
    return pa.record_batch(list(map(_integers, columns)), schema=_PAIRS)


def _integers(column: pa.Array) -> NDArray[np.int64]:
    return column.to_numpy().astype(np.int64)
