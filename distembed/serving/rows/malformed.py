"""Describes malformed rows: the row, its column, and the value with the problem."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from distembed.data.prepare.table.text_rows import RawRows
from distembed.data.table.blocks import RejectedRow
from distembed.data.table.raw_columns import TableColumns, as_lists, one_array, plain_array

_REASONS = {
    "label": "is no label",
    "weight": "is no weight of 0 or more",
    "dense": "is no finite number",
    "list": "is no list with one finite number for each value beside it",
    "times": "is no list with one finite time for each value beside it, none before the preceding one; give as many "
    "times as values, both sorted by time, in the unit of the prepared data (seconds since 1970 for dates)",
    "id": "is no value of this column's kind",
    "user": "is no user of the dataset",
    "sequence": "has no item of the dataset",
    "value": "is no text, number or truth value, nor a list of these where the column has lists",
}


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be scored: its number from 0, the name of a column, and its value with the problem."""

    row: int
    field: str
    reason: str


def bad_rows(raw: RawRows, rejected: Sequence[RejectedRow], columns: TableColumns) -> list[BadRow]:
    """Describes the rows that :func:`decode_rows` rejected, with the text of the bad value.

    The text is that of the value in a table of this row alone, so that it does not depend on the other rows.
    """
    described = []
    for row in rejected:
        value = row.text.decode(errors="replace")
        if row.reason != "value":
            table_row = int(np.searchsorted(raw.lines, row.line))  # row of the table; lines are in ascending order
            value = _shown_text(raw.table[row.column].slice(table_row, 1), row.column, columns)
        described.append(BadRow(row.line, row.column, f"{value} {_REASONS[row.reason]}"))
    return described


def bad_rows_text(bad: Sequence[BadRow], most: int = 5) -> str:
    """Lists the problems of the first ``most`` rows, for an error message."""
    listed = "; ".join(f"row {bad_row.row}, column {bad_row.field!r}: {bad_row.reason}" for bad_row in bad[:most])
    return listed + (f"; and {len(bad) - most} more" if len(bad) > most else "")


def _shown_text(column: pa.ChunkedArray, name: str, columns: TableColumns) -> str:
    """Returns the text of the one value of a column, or the texts of its list."""
    value = plain_array(one_array(column))
    if columns.takes_lists(name):
        texts = as_lists(value, columns.separators[name]).flatten().cast(pa.string())
        return reprlib.repr(texts.to_pylist())
    return reprlib.repr(value.cast(pa.string())[0].as_py())
