"""Raw rows to batches: parsed by the schema of the run's dataset, encoded by its vocabularies, malformed rows apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.records import RecordBlock
from distembed.data.dataset.schema import Schema
from distembed.data.prepare.table.text_rows import RawRows
from distembed.data.reader import Batch
from distembed.data.reader.batch import BatchAssembler
from distembed.data.table.blocks import RejectedRow
from distembed.data.table.encoder import RowEncoder, raw_schema
from distembed.data.table.parser import TableParser
from distembed.data.table.raw_columns import TableColumns, as_lists, one_array, plain_array
from distembed.data.table.schema import TableSchema
from distembed.serving.given_rows import shown

_REASONS = {
    "label": "is no label",
    "weight": "is no weight of 0 or more",
    "dense": "is no finite number",
    "id": "is no value of this column's kind",
    "user": "is no user of the dataset",
    "sequence": "has no item of the dataset",
    "value": "is no text, number or truth value, nor a list of these where the column has lists",
}
Extra = Literal["label", "weight"]
"""What raw rows may have beside the columns that a model is shown."""


@dataclass(frozen=True, eq=False)
class DecodedRows:
    """Rows of a table, as the columns of the dataset.

    Attributes:
        is_good: Which rows are well-formed.
        block: These rows.
        rejected: The others.
    """

    is_good: NDArray[np.bool_]
    block: RecordBlock
    rejected: tuple[RejectedRow, ...]


class RowDecoder(Protocol):
    """Makes the dataset's columns of raw rows; any number of threads may use it.

    Attributes:
        schema: The columns of the tables.
        columns: The same, and of which types each may be.
    """

    schema: TableSchema
    columns: TableColumns

    def decode(self, table: pa.Table) -> DecodedRows:
        """Returns the rows of a table.

        Raises:
            UserError: The table lacks a column, or one is of a type that has no such values.
        """

    def ids_of(self, feature: str, values: Sequence[Any]) -> NDArray[np.int64]:
        """Returns the ids of raw values of a feature; None is a missing value.

        Raises:
            UserError: The feature has no such values, or they are not known.
        """


class TableRowDecoder:
    """Decodes rows of a table, of Criteo's, or of ratings.

    Args:
        folder: Folder of the dataset, or of what a run keeps of it.
        manifest: Its manifest.
        extras: What the rows have beside the columns that the model is shown.

    Raises:
        UserError: The dataset was made otherwise, or a vocabulary is missing or damaged.
    """

    def __init__(self, folder: Path, manifest: Manifest, extras: Collection[Extra] = ()) -> None:
        self.schema = _with_extras(raw_schema(manifest), extras)
        self._parser = TableParser(self.schema)
        self.columns = self._parser.columns
        self._encoder = RowEncoder(folder, manifest, self._parser.layout)

    def decode(self, table: pa.Table) -> DecodedRows:
        """Returns the rows of a table, as :meth:`RowDecoder.decode` says."""
        parsed = self._parser.parse(table)
        is_good = np.ones(table.num_rows, bool)
        is_good[[row.line for row in parsed.rejected]] = False
        return DecodedRows(is_good, self._encoder.encode(parsed), parsed.rejected)

    def ids_of(self, feature: str, values: Sequence[Any]) -> NDArray[np.int64]:
        """Returns the ids of raw values of a feature, as :meth:`RowDecoder.ids_of` says."""
        return self._encoder.ids_of(feature, values)


def _with_extras(schema: TableSchema, extras: Collection[Extra]) -> TableSchema:
    """Returns the schema of rows that have these extras, and neither times nor splits."""
    return dataclasses.replace(
        schema,
        label=schema.label if "label" in extras else None,
        weight=schema.weight if "weight" in extras else None,
        time=None,
        split=TableSchema.split,
        parser="table",
    )


def batches_of(schema: Schema, block: RecordBlock, batch_size: int) -> Iterator[Batch]:
    """Yields decoded rows as batches, in order; the last one may have fewer rows.

    Args:
        schema: Columns of the dataset.
        block: The rows.
        batch_size: Rows of a batch.
    """
    assembler = BatchAssembler(schema)
    num_rows = len(block.records)
    for start in range(0, num_rows, batch_size):
        rows = range(start, min(start + batch_size, num_rows))
        part = block if len(rows) == num_rows else block.gather(np.arange(rows.start, rows.stop))
        yield from assembler.assemble([part], [len(rows)])


def decode_rows(decode: Callable[[pa.Table], DecodedRows], raw: RawRows) -> DecodedRows:
    """Returns rows as the columns of the dataset; those that are no rows of the table are rejected too.

    Args:
        decode: :meth:`RowDecoder.decode`.
        raw: The rows.

    Raises:
        UserError: The table lacks a column, or one is of a type that has no such values.
    """
    decoded = decode(raw.table)
    is_good = np.zeros(raw.num_lines, bool)
    is_good[raw.lines[decoded.is_good]] = True
    rejected = [dataclasses.replace(row, line=int(raw.lines[row.line])) for row in decoded.rejected]
    return DecodedRows(is_good, decoded.block, tuple(sorted([*raw.bad, *rejected], key=lambda row: row.line)))


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be scored.

    Attributes:
        row: Its number, from 0.
        field: Name of the column.
        reason: The value, and what is wrong with it.
    """

    row: int
    field: str
    reason: str


def bad_rows(raw: RawRows, rejected: Sequence[RejectedRow], columns: TableColumns) -> list[BadRow]:
    """Returns what is wrong with rejected rows; a value is shown as its text, which does not depend on other rows.

    Args:
        raw: The rows that were decoded.
        rejected: The rejected ones.
        columns: The columns of their table.
    """
    found = []
    for row in rejected:
        value = row.text.decode(errors="replace")
        if row.reason != "value":
            place = int(np.searchsorted(raw.lines, row.line))
            value = _shown_text(raw.table[row.column].slice(place, 1), row.column, columns)
        found.append(BadRow(row.line, row.column, f"{value} {_REASONS[row.reason]}"))
    return found


def bad_rows_text(bad: Sequence[BadRow], most: int = 5) -> str:
    """Returns what is wrong with rows in a sentence."""
    listed = "; ".join(f"row {each.row}, column {each.field!r}: {each.reason}" for each in bad[:most])
    return listed + (f"; and {len(bad) - most} more" if len(bad) > most else "")


def _shown_text(column: pa.ChunkedArray, name: str, columns: TableColumns) -> str:
    """Returns the text of the one value of a column, or those of its list."""
    value = plain_array(one_array(column))
    if columns.takes_lists(name):
        return shown(as_lists(value, columns.separators[name]).flatten().cast(pa.string()).drop_null().to_pylist())
    return shown(value.cast(pa.string())[0].as_py())
