"""Rows of Python to tables: lists of dictionaries, dictionaries of columns, pandas and Arrow."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from distembed.base.errors import UserError
from distembed.data.prepare.table.text_rows import RawRows
from distembed.data.table.blocks import RejectedRow
from distembed.data.table.raw_columns import TableColumns
from distembed.data.table.values import given_column

_KINDS = (
    "a list of dictionaries, one a row; a dictionary of columns, each a list or an array; a pandas DataFrame; an Arrow "
    "table or record batch; or a distembed Batch"
)
_MOST_NAMES = 1000
"""Columns that an error about a missing column compares it with."""


def given_rows(rows: Any, columns: TableColumns) -> RawRows:
    """Turns rows of Python into a table; rows with a value that no table can hold are apart, in ``RawRows.bad``.

    Columns that are not needed become null. An Arrow table is taken as it is.

    Args:
        rows: Dictionaries, one a row, which may lack values; a dictionary of columns; a pandas DataFrame; an
            Arrow table or record batch.
        columns: The needed columns, with the types that each may have.

    Raises:
        UserError: ``rows`` is none of these, has columns of unequal lengths, or rows without any column.
    """
    if isinstance(rows, pa.Table | pa.RecordBatch):
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_batches([rows])
        return RawRows(table, np.arange(len(table)), len(table))
    if isinstance(rows, Mapping):
        return _rows_of_columns(rows, columns)
    if type(rows).__module__.partition(".")[0] == "pandas" and hasattr(rows, "columns"):
        _require_columns(rows, rows.columns)
        if not rows.columns.is_unique:
            repeated = rows.columns[rows.columns.duplicated()][0]
            raise UserError(f"rows has several columns named {repeated!r}; rename them.")
        return _rows_of_columns({str(name): rows[name] for name in rows.columns}, columns)
    if isinstance(rows, Sequence) and not isinstance(rows, str | bytes):
        return _rows_of_dictionaries(rows, columns)
    raise UserError(f"rows is {_described(rows)}; give {_KINDS}.")


def missing_columns(rows: Sequence[Mapping[str, Any]], columns: Iterable[str]) -> list[str]:
    """Returns the columns that none of the rows has; a row may lack a value that another row has."""
    first = rows[0] if rows else {}
    return [name for name in columns if name not in first and not any(name in row for row in rows)]


def _rows_of_dictionaries(rows: Sequence[Any], columns: TableColumns) -> RawRows:
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise UserError(f"row {number} is {_described(row)}; give {_KINDS}.")
    missing = missing_columns(rows, columns.names)
    names = [name for name in columns.names if name not in missing]
    if missing:  # the decoder refuses the table later, and its error names the columns that are there
        names = list(dict.fromkeys((*names, *islice((name for row in rows for name in row), _MOST_NAMES))))
    _require_columns(rows, names)
    return _rows_of_columns({name: [row.get(name) for row in rows] for name in names}, columns)


def _require_columns(rows: Sized, names: Collection[Any]) -> None:
    """Refuses rows without any value: a table without columns would have no rows, and there would be no predictions."""
    if len(rows) and not len(names):
        raise UserError(f"rows has {len(rows):,} rows and not one column; give each row's values by their columns.")


def _rows_of_columns(values_by_column: Mapping[Any, Any], columns: TableColumns) -> RawRows:
    lengths: dict[str, int] = {}
    for name, values in values_by_column.items():
        if not isinstance(name, str):
            raise UserError(f"a column is named {name!r}, {_described(name)}; names of columns are texts.")
        if isinstance(values, str | bytes) or not isinstance(values, Sized):
            raise UserError(
                f"the column {name!r} of rows is {_described(values)}; give a list or an array with a value a row, and "
                "a single row as a list of one dictionary."
            )
        lengths[name] = len(values)
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length:,}" for name, length in list(lengths.items())[:5])
        raise UserError(f"the columns of rows have unequally many values ({listed}, ...); give one a row.")
    num_rows = next(iter(lengths.values()), 0)
    arrays = {}
    bad: dict[int, RejectedRow] = {}
    for name, values in values_by_column.items():
        arrays[name], wrong = given_column(values, name, columns) if name in columns.kinds else (pa.nulls(num_rows), [])
        own_values = list(values) if wrong else []
        for row in wrong:
            text = reprlib.repr(own_values[row]).encode(errors="backslashreplace")
            bad.setdefault(row, RejectedRow(row, "value", text, name))
    table, good_rows = pa.table(arrays), np.delete(np.arange(num_rows), sorted(bad))
    return RawRows(table.take(good_rows) if bad else table, good_rows, num_rows, tuple(bad[row] for row in sorted(bad)))


def _described(value: Any) -> str:
    """Returns the type of a value as text, with the value where it is short."""
    text = repr(value)
    return f"of type {type(value).__name__}" + (f" ({text})" if len(text) < 60 else "")
