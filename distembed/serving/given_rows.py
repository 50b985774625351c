"""Rows as Python holds them, as a table of Arrow's: dictionaries, columns, pandas, Arrow."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from typing import Any

import pyarrow as pa

from distembed.errors import UserError

_KINDS = (
    "a list of dictionaries, one a row; a dictionary of columns, each a list or an array; a pandas DataFrame; an Arrow "
    "table or record batch; or a distembed Batch"
)


def rows_table(rows: Any) -> pa.Table:
    """Returns rows as a table.

    Args:
        rows: Dictionaries, one a row, of which some may lack a value; a dictionary of columns; a pandas DataFrame; an
            Arrow table or record batch.

    Raises:
        UserError: They are none of these, or a column has values of several types.
    """
    if isinstance(rows, pa.Table):
        return rows
    if isinstance(rows, pa.RecordBatch):
        return pa.Table.from_batches([rows])
    if isinstance(rows, Mapping):
        return _of_columns(rows)
    if type(rows).__module__.partition(".")[0] == "pandas" and hasattr(rows, "columns"):
        _require_columns(rows, rows.columns)
        return _of_columns({str(name): rows[name] for name in rows.columns})
    if isinstance(rows, Sequence) and not isinstance(rows, str | bytes):
        return _of_dictionaries(rows)
    raise UserError(f"rows is {_described(rows)}; give {_KINDS}.")


def _of_dictionaries(rows: Sequence[Any]) -> pa.Table:
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise UserError(f"row {number} is {_described(row)}; give {_KINDS}.")
    names = dict.fromkeys(name for row in rows for name in row)
    _require_columns(rows, names)
    return _of_columns({name: [row.get(name) for row in rows] for name in names})


def _require_columns(rows: Sized, names: Collection[Any]) -> None:
    """Refuses rows without any value: a table without columns would have no rows, and there would be no predictions."""
    if len(rows) and not len(names):
        raise UserError(f"rows has {len(rows):,} rows and not one column; give each row's values by their columns.")


def _of_columns(columns: Mapping[Any, Any]) -> pa.Table:
    arrays = {_name(name): _array(name, values) for name, values in columns.items()}
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length:,}" for name, length in list(lengths.items())[:5])
        raise UserError(f"the columns of rows have unequally many values ({listed}, ...); give one a row.")
    return pa.table(arrays)


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise UserError(f"a column is named {name!r}, {_described(name)}; names of columns are texts.")
    return name


def _array(name: str, values: Any) -> pa.Array | pa.ChunkedArray:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise UserError(
            f"the column {name!r} of rows is {_described(values)}; give a list or an array with a value a row, and a "
            "single row as a list of one dictionary."
        )
    try:
        is_pandas = type(values).__module__.partition(".")[0] == "pandas"
        return pa.array(values, from_pandas=True) if is_pandas else pa.array(values)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise UserError(
            f"the column {name!r} of rows has values of several types, or of one that is no text, number, time or list "
            f"of these ({error})."
        ) from error


def _described(value: Any) -> str:
    """Returns the type of a value as text, with the value where it is short."""
    text = repr(value)
    return f"of type {type(value).__name__}" + (f" ({text})" if len(text) < 60 else "")
