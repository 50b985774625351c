"""Reads rows of files as edges between ids: which values are ids, which rows are left out, what is an error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from distembed.data.prepare.column_numbers import positive_numbers
from distembed.data.prepare.count import Database
from distembed.data.prepare.progress import ProgressCallback, ProgressUpdate
from distembed.data.prepare.table.inputs import TableInput
from distembed.data.prepare.table.rows import NamedRows, RowReader
from distembed.data.table.raw_columns import INTEGER, LIST, NUMBER, TEXT, type_kind
from distembed.data.table.schema import TableSchema
from distembed.errors import UserError
from distembed.graph.edges import Edges, stored_edges
from distembed.graph.prepare.counted_edges import EdgeTables
from distembed.graph.prepare.dropped import DroppedCounts
from distembed.graph.prepare.options import GraphOptions
from distembed.graph.prepare.value_ids import ValueMap

_PAIRS = pa.schema({"value": pa.string(), "id": pa.int64()})
_WEIGHTS = pa.schema({"place": pa.int64(), "weight": pa.float64()})
_KEYS = pa.schema({"key": pa.int64()})
_NO_SEPARATOR = "\x1f"
"""The separator of units, which no text has: a text is a list of one word."""
_MOST_READ_BYTES = 16 << 20


@dataclass(frozen=True)
class _Batch:
    """Rows of an input: its place, the number of the first row, from 1, and the columns in the order asked for."""

    place: str
    first_row: int
    columns: list[pa.Array]


class EdgeReader:
    """Reads the input once.

    Args:
        inputs: Inputs to read.
        options: How rows become edges.
        values: How values become ids.
        memory_bytes: About what may be read at a time.
        report: Function that is called with the progress.

    Attributes:
        dropped: Counts of what was left out so far.
        rows: Reads the inputs.
    """

    def __init__(
        self,
        inputs: Sequence[TableInput],
        options: GraphOptions,
        values: ValueMap,
        memory_bytes: int,
        report: ProgressCallback,
    ) -> None:
        self.dropped = DroppedCounts()
        names: dict[str, Any] = dict.fromkeys(
            [options.source] if options.attribute is not None else [options.source, options.target], {}
        )
        columns: dict[str, Any] = {"categorical": names}
        if options.attribute is not None:
            names[options.attribute] = {"is_list": True, "separator": _NO_SEPARATOR}
        if options.weight is not None:
            columns["dense"] = {options.weight: {}}
        self.rows = RowReader(inputs, TableSchema.from_json(columns, "the columns"))
        self._options, self._values = options, values
        self._memory_bytes, self._report = memory_bytes, report
        self._first_unknown = ""

    @property
    def num_rows(self) -> int:
        """Number of rows read so far."""
        return sum(self.rows.num_lines)

    def edges(self, database: Database) -> Iterator[Edges]:
        """Yields all edges in ascending order, each once.

        Raises:
            UserError: A row is malformed, or has a value without an id where that is an error.
        """
        tables = EdgeTables(database, self._values.num_nodes, self._options, self.dropped, self._report)
        if self._options.attribute is None:
            schema = pa.schema([*_KEYS, *(_WEIGHTS if self._options.weighted else ())])
            database.add("edges", self._named_edges(schema), schema)
        else:
            database.add("pairs", self._pairs(), _PAIRS)
        if self.dropped.unknown and self._options.unknown == "error":
            raise UserError(
                f"{self._first_unknown}. {self.dropped.unknown:,} of {self.num_rows:,} rows have such a "
                "value: mend them, or leave these rows out (unknown=drop, on the command line --unknown drop)"
            )
        return tables.named() if self._options.attribute is None else tables.of_values()

    def _named_edges(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Reads rows that name both ends of an edge."""
        place = 0
        for batch in self._batches((INTEGER,), (INTEGER,), (INTEGER, NUMBER)):
            sources, source_known = self._ids(batch, 0)
            targets, target_known = self._ids(batch, 1)
            known = self._known(source_known & target_known)
            weights = self._weights(batch)[known] if self._options.weighted else None
            sources, targets = sources[known], targets[known]
            stored = stored_edges(self._values.num_nodes, sources, targets, weights, self._options.directed)
            self.dropped.self_loops += int(np.count_nonzero(sources == targets))
            columns: list[NDArray[Any]] = [stored.keys]
            if stored.weights is not None:
                columns += [place + np.arange(len(stored)), stored.weights]
            yield pa.record_batch(columns, schema=schema)
            place += len(stored)

    def _pairs(self) -> Iterator[pa.RecordBatch]:
        """Reads rows of ids and attributes, as text: an integer is its decimal digits."""
        for batch in self._batches((INTEGER,), (INTEGER, TEXT, LIST)):
            ids, known = self._ids(batch, 0)
            lengths, values = _entries(batch.columns[1])
            self.dropped.missing += int(np.count_nonzero(lengths == 0))
            known = self._known(known | (lengths == 0))
            ids, known = np.repeat(ids, lengths), np.repeat(known, lengths)
            values = values.filter(pa.array(known)).cast(pa.string())
            yield pa.record_batch([values, ids[known]], schema=_PAIRS)

    def _batches(self, *kinds: Sequence[str]) -> Iterator[_Batch]:
        """Yields all rows.

        Args:
            *kinds: Kinds of values that each of the columns may hold besides texts.
        """
        num_rows = [0] * len(self.rows.inputs)
        for rows in self.rows.blocks(min(_MOST_READ_BYTES, self._memory_bytes), self._report):
            place = self.rows.inputs[rows.source].place
            if rows.bad:
                bad = rows.bad[0]
                raise UserError(f"{place} cannot be read: line {bad.line} is no row of its columns: {bad.text!r}")
            names = zip(self._options.columns, kinds, strict=False)
            columns = [_allowed(place, rows, name, allowed) for name, allowed in names]
            yield _Batch(place, num_rows[rows.source] + 1, columns)
            num_rows[rows.source] += len(rows.lines)
        num_bytes = sum(source.bytes for source in self.rows.sources())
        self._report(ProgressUpdate("read", num_bytes, num_bytes, self.num_rows))

    def _ids(self, batch: _Batch, column: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Returns the ids of a column, and which values have one.

        Raises:
            UserError: A value is malformed.
        """
        found = self._values.find(batch.columns[column])
        self._require_well_formed(batch, column, found.malformed, self._values.allowed)
        if not self._first_unknown and found.unknown.any():
            place = _place(batch, column, int(found.unknown.argmax()), self._options)
            self._first_unknown = f"{place}, which {self._values.unknown_means}"
        return found.ids, ~found.unknown

    def _weights(self, batch: _Batch) -> NDArray[np.float64]:
        weights, malformed = positive_numbers(batch.columns[2])
        self._require_well_formed(batch, 2, malformed, "a finite number above 0")
        return weights

    def _require_well_formed(self, batch: _Batch, column: int, malformed: NDArray[np.bool_], allowed: str) -> None:
        if malformed.any():
            raise UserError(f"{_place(batch, column, int(malformed.argmax()), self._options)}; it must be {allowed}")

    def _known(self, known: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Returns the mask itself, and counts the rows whose values are not known."""
        self.dropped.unknown += int(np.count_nonzero(~known))
        return known


def _allowed(place: str, rows: NamedRows, name: str, kinds: Sequence[str]) -> pa.Array:
    """Returns a column, null where a text is empty.

    Raises:
        UserError: Its type is not allowed.
    """
    column = rows.columns[name]
    column = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
    kind = type_kind(column.type)
    if kind == LIST and type_kind(column.type.value_type) not in (None, INTEGER, TEXT):
        kind = "other"
    if kind not in (None, *kinds, TEXT):
        allowed = " or ".join(dict.fromkeys((*kinds, TEXT)))
        raise UserError(f"{place}, column {name!r}: its type is {column.type}; it must be {allowed}.")
    if kind is None:
        return column.cast(pa.string())
    return pc.if_else(pc.equal(column, ""), None, column) if kind == TEXT else column


def _entries(column: pa.Array) -> tuple[NDArray[np.int64], pa.Array]:
    """Returns how many values each row of a column of values or of lists has, and the values without missing ones."""
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        return column.is_valid().to_numpy(zero_copy_only=False).astype(np.int64), column.drop_null()
    values = column.flatten()
    rows = pc.list_parent_indices(column).filter(values.is_valid())
    return np.bincount(rows.to_numpy(), minlength=len(column)), values.drop_null()


def _place(batch: _Batch, column: int, row: int, options: GraphOptions) -> str:
    """Returns such as ``edges.csv, row 3: source is 'x'``, for an error."""
    value = batch.columns[column][row].as_py()
    shown = "nothing" if value is None else repr(value)
    return f"{batch.place}, row {batch.first_row + row}: {options.columns[column]} is {shown}"
