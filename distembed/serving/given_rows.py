"""Rows as Python and JSON hold them, as a table of Arrow's: dictionaries, columns, pandas, Arrow."""

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
"""Columns that are looked at for what a missing one may have been named."""


def given_rows(rows: Any, columns: TableColumns) -> RawRows:
    """Returns rows as a table of the columns that are looked at, with the rows that no table has apart.

    Args:
        rows: Dictionaries, one a row, of which some may lack a value; a dictionary of columns; a pandas DataFrame; an
            Arrow table or record batch.
        columns: The columns that are looked at, and of which types each may be.

    Raises:
        UserError: They are none of these, or lack a column.
    """
    if isinstance(rows, pa.Table | pa.RecordBatch):
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_batches([rows])
        return RawRows(table, np.arange(len(table)), len(table))
    if isinstance(rows, Mapping):
        return _of_columns(rows, columns)
    if type(rows).__module__.partition(".")[0] == "pandas" and hasattr(rows, "columns"):
        _require_columns(rows, rows.columns)
        if not rows.columns.is_unique:
            repeated = rows.columns[rows.columns.duplicated()][0]
            raise UserError(f"rows has several columns named {repeated!r}; rename them.")
        return _of_columns({str(name): rows[name] for name in rows.columns}, columns)
    if isinstance(rows, Sequence) and not isinstance(rows, str | bytes):
        return _of_dictionaries(rows, columns)
    raise UserError(f"rows is {_described(rows)}; give {_KINDS}.")


def shown(value: Any) -> str:
    """Returns a value as a short text, however large or deep it is."""
    return reprlib.repr(value)


def missing_columns(rows: Sequence[Mapping[str, Any]], columns: Iterable[str]) -> list[str]:
    """Returns the columns that none of the rows has."""
    first = rows[0] if rows else {}
    return [name for name in columns if name not in first and not any(name in row for row in rows)]


def _of_dictionaries(rows: Sequence[Any], columns: TableColumns) -> RawRows:
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise UserError(f"row {number} is {_described(row)}; give {_KINDS}.")
    missing = missing_columns(rows, columns.names)
    names = [name for name in columns.names if name not in missing]
    if missing:  # an error names the columns that are there
        names = list(dict.fromkeys((*names, *islice((name for row in rows for name in row), _MOST_NAMES))))
    _require_columns(rows, names)
    return _of_columns({name: [row.get(name) for row in rows] for name in names}, columns)


def _require_columns(rows: Sized, names: Collection[Any]) -> None:
    """Refuses rows without any value: a table without columns would have no rows, and there would be no predictions."""
    if len(rows) and not len(names):
        raise UserError(f"rows has {len(rows):,} rows and not one column; give each row's values by their columns.")


def _of_columns(given: Mapping[Any, Any], columns: TableColumns) -> RawRows:
    lengths = {_name(name): _length(name, values) for name, values in given.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length:,}" for name, length in list(lengths.items())[:5])
        raise UserError(f"the columns of rows have unequally many values ({listed}, ...); give one a row.")
    num_rows = next(iter(lengths.values()), 0)
    arrays = {}
    bad: dict[int, RejectedRow] = {}
    for name, values in given.items():
        arrays[name], wrong = given_column(values, name, columns) if name in columns.kinds else (pa.nulls(num_rows), [])
        own_values = list(values) if wrong else []
        for row in wrong:
            text = shown(own_values[row]).encode(errors="backslashreplace")
            bad.setdefault(row, RejectedRow(row, "value", text, name))
    table, kept = pa.table(arrays), np.delete(np.arange(num_rows), sorted(bad))
    return RawRows(table.take(kept) if bad else table, kept, num_rows, tuple(bad[row] for row in sorted(bad)))


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise UserError(f"a column is named {name!r}, {_described(name)}; names of columns are texts.")
    return name


def _length(name: str, values: Any) -> int:
    if isinstance(values, str | bytes) or not isinstance(values, Sized):
        raise UserError(
            f"the column {name!r} of rows is {_described(values)}; give a list or an array with a value a row, and a "
            "single row as a list of one dictionary."
        )
    return len(values)


def _described(value: Any) -> str:
    """Returns the type of a value as text, with the value where it is short."""
    text = repr(value)
    return f"of type {type(value).__name__}" + (f" ({text})" if len(text) < 60 else "")
