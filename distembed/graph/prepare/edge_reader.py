"""Reads rows of files as edges between ids: which values are ids, which rows are left out, what is an error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from distembed.base.errors import UserError
from distembed.data.prepare.options import ProgressUpdate
from distembed.data.prepare.table.inputs import TableInput
from distembed.data.prepare.table.source import NamedRows, RowReader
from distembed.data.table.keys import coded
from distembed.data.table.numbers import finite_numbers
from distembed.data.table.raw_columns import INTEGER, LIST, NUMBER, TEXT, type_kind
from distembed.data.table.schema import TableSchema
from distembed.graph.edges import Edges, stored_edges
from distembed.graph.prepare.counted_edges import EdgeTables
from distembed.graph.prepare.options import GraphOptions
from distembed.graph.prepare.value_ids import ValueIds

_MISSING = pa.array([""])
_PAIRS = pa.schema({"value": pa.string(), "id": pa.int64()})
_KEYS = pa.schema({"key": pa.int64()})
_WEIGHTED_KEYS = pa.schema({"key": pa.int64(), "place": pa.int64(), "weight": pa.float64()})
_NO_SEPARATOR = "\x1f"
"""The separator of units, which no text has: a text is a list of one word."""
_MOST_READ_BYTES = 16 << 20


class EdgeReader:
    """Reads the input once.

    Args:
        inputs: Inputs to read.
        options: How rows become edges.
        values: How values become ids.
        memory_bytes: About what may be read at a time.
    """

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
        """Returns what ``graph.json`` says of the inputs, once all rows were read."""
        names = ("name", "bytes", "sha256", "num_rows")
        return [{name: getattr(source, name) for name in names} for source in self._rows.sources()]

    def edges(self, tables: EdgeTables) -> Iterator[Edges]:
        """Yields all edges in ascending order, each once."""
        if self._options.attribute is None:
            schema = _WEIGHTED_KEYS if self._options.weighted else _KEYS
            held = tables.add_named(self._named_edges(tables, schema), schema)
        else:
            tables.database.add("pairs", self._pairs(tables), _PAIRS)
        num_bytes = sum(source.bytes for source in self._rows.sources())
        tables.report(ProgressUpdate("read", num_bytes, num_bytes, self.num_rows))
        tables.dropped["unknown"] = self._num_unknown
        if self._num_unknown and self._options.unknown == "error":
            raise UserError(
                f"{self._first_unknown}. {self._num_unknown:,} of {self.num_rows:,} rows have such a "
                "value: mend them, or leave these rows out (unknown=drop, on the command line --unknown drop)"
            )
        return tables.named(held) if self._options.attribute is None else tables.of_values()

    def _named_edges(self, tables: EdgeTables, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Reads rows that name both ends of an edge."""
        options, place = self._options, 0
        for rows in self._blocks(tables):
            sources, source_known = self._ids(rows, options.source)
            targets, target_known = self._ids(rows, options.target)
            known = self._known(source_known & target_known)
            weights = self._weights(rows, options.weight)[known] if options.weight is not None else None
            sources, targets = sources[known], targets[known]
            stored = stored_edges(self._values.num_nodes, sources, targets, weights, options.directed)
            tables.dropped["self_loops"] += int(np.count_nonzero(sources == targets))
            columns: list[NDArray[Any]] = [stored.keys]
            if stored.weights is not None:
                columns += [place + np.arange(len(stored)), stored.weights]
            yield pa.record_batch(columns, schema=schema)
            place += len(stored)

    def _pairs(self, tables: EdgeTables) -> Iterator[pa.RecordBatch]:
        """Reads rows of ids and attributes, as text: an integer is its decimal digits."""
        for rows in self._blocks(tables):
            ids, known = self._ids(rows, self._options.source)
            lengths, values = _entries(self._column(rows, str(self._options.attribute), INTEGER, TEXT, LIST))
            tables.dropped["missing"] += int(np.count_nonzero(lengths == 0))
            known = self._known(known | (lengths == 0))
            ids, known = np.repeat(ids, lengths), np.repeat(known, lengths)
            values = values.filter(pa.array(known)).cast(pa.string())
            yield pa.record_batch([values, ids[known]], schema=_PAIRS)

    def _blocks(self, tables: EdgeTables) -> Iterator[NamedRows]:
        for rows in self._rows.blocks(min(_MOST_READ_BYTES, self._memory_bytes), tables.report):
            if rows.bad:
                bad, place = rows.bad[0], self._rows.inputs[rows.source].place
                raise UserError(f"{place} cannot be read: line {bad.line} is no row of its columns: {bad.text!r}")
            yield rows

    def _column(self, rows: NamedRows, name: str, *kinds: str) -> pa.Array:
        """Returns a column."""
        column = rows.columns[name]
        kind = type_kind(column.type)
        if kind == LIST and type_kind(column.type.value_type) not in (None, INTEGER, TEXT):
            kind = "other"
        if kind not in (None, *kinds, TEXT):
            place, allowed = self._rows.inputs[rows.source].place, " or ".join(dict.fromkeys((*kinds, TEXT)))
            raise UserError(f"{place}, column {name!r}: its type is {column.type}; it must be {allowed}.")
        return column.cast(pa.string()) if kind is None else column

    def _ids(self, rows: NamedRows, name: str) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Returns the ids of a column, and which values have one."""
        column = self._column(rows, name, INTEGER)
        values = coded(column, _MISSING)
        found = self._values.find(values.distinct)
        ids = np.concatenate([[0], found.ids])[values.codes]
        malformed = np.concatenate([[True], found.malformed])[values.codes]
        unknown = np.concatenate([[False], found.unknown])[values.codes]
        self._require_well_formed(rows, name, column, malformed, self._values.allowed)
        if not self._first_unknown and unknown.any():
            place = self._place(rows, name, column, int(unknown.argmax()))
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
            raise UserError(f"{self._place(rows, name, column, int(malformed.argmax()))}; it must be {allowed}")

    def _place(self, rows: NamedRows, name: str, column: pa.Array, row: int) -> str:
        """Returns such as ``edges.csv, row 3: source is 'x'``, for an error."""
        value = column[row].as_py()
        number = self._rows.num_lines[rows.source] - len(rows.lines) + row + 1
        shown = "nothing" if value is None or value == "" else repr(value)
        return f"{self._rows.inputs[rows.source].place}, row {number}: {name} is {shown}"

    def _known(self, known: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Returns the mask itself, and counts the rows whose values are not known."""
        self._num_unknown += int(np.count_nonzero(~known))
        return known


def _entries(column: pa.Array) -> tuple[NDArray[np.int64], pa.Array]:
    """Returns how many values each row of a column of values or of lists has, and the values without missing ones."""
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        column = pc.if_else(pc.equal(column, ""), None, column) if pa.types.is_string(column.type) else column
        return column.is_valid().to_numpy(zero_copy_only=False).astype(np.int64), column.drop_null()
    values = column.flatten()
    rows = pc.list_parent_indices(column).filter(values.is_valid())
    return np.bincount(rows.to_numpy(), minlength=len(column)), values.drop_null()
