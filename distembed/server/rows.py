"""Rows of requests as one table: columns of values as JSON has them, with the rows that no table can hold apart.

Requests are joined column by column, so that decoding, which costs milliseconds a column and little a row, is done once
for all of them. A column whose values are of several types is taken as texts, as a CSV file has them: the text of a
number and the number are the same value.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from distembed.data.table.raw_columns import TableColumns

_PLAIN = (str, int, float)


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be scored.

    Attributes:
        row: Its number, from 0.
        field: Name of the column.
        reason: What is wrong with the value.
    """

    row: int
    field: str
    reason: str


@dataclass(frozen=True)
class JoinedRows:
    """Rows as a table.

    Attributes:
        table: The rows; the values of bad ones are null.
        bad: Rows with a value that no column of such a table has.
    """

    table: pa.Table
    bad: list[BadRow] = field(default_factory=list)


def missing_columns(rows: Sequence[Mapping[str, Any]], columns: Collection[str]) -> list[str]:
    """Returns the columns that no row of a request has."""
    first = rows[0].keys() if rows else columns
    missing = [name for name in columns if name not in first]
    return [name for name in missing if not any(name in row for row in rows)]


def join_rows(rows: Sequence[Mapping[str, Any]], columns: TableColumns) -> JoinedRows:
    """Returns rows as a table of the columns that are looked at; a value that a row lacks is missing."""
    joined = JoinedRows(pa.table({}))
    arrays = {name: _column(name, [row.get(name) for row in rows], columns, joined.bad) for name in columns.kinds}
    return JoinedRows(pa.table(arrays), joined.bad)


def _column(name: str, values: list[Any], columns: TableColumns, bad: list[BadRow]) -> pa.Array:
    """Returns the values of a column, and adds the rows whose values it cannot have."""
    try:
        array = pa.array(values)
        if columns.takes(name, array.type):
            return array
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        pass
    takes_lists = columns.takes_lists(name)
    texts = [_text(value, takes_lists) for value in values]
    for row, (value, text) in enumerate(zip(values, texts, strict=True)):
        if text is None and value is not None:
            wanted = "a list of texts or numbers" if takes_lists else "a text or a number"
            bad.append(BadRow(row, name, f"{_shown(value)} is no value of this column, which takes {wanted}"))
    if takes_lists:
        return pa.array([[text] if isinstance(text, str) else text for text in texts], pa.list_(pa.string()))
    return pa.array(texts, pa.string())


def _text(value: Any, takes_lists: bool) -> Any:
    """Returns a value as a text, or a list of texts; None where it is missing or none."""
    if isinstance(value, _PLAIN) and not isinstance(value, bool):
        return str(value)
    if takes_lists and isinstance(value, list):
        texts = [_text(each, takes_lists=False) for each in value if each is not None]
        return None if None in texts else texts
    return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
