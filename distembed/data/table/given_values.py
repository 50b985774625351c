"""Values of JSON and of Python as a column of a table; a value's meaning never depends on the values beside it.

Values of one type are a typed column. Values of several types become their texts, which mean the same (``keys.py``)::

    3  2  None     int64                    3  "3"  2.5           "3"  "3"  "2.5"
    0.5  NaN       float64, NaN missing     "a|b"  ["c", 1]       ["a", "b"]  ["c", "1"]      of lists, separator |
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa

from distembed.data.table.raw_columns import LIST, TableColumns, type_kind

ARROW_TYPES: dict[type, pa.DataType] = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
_LISTS = (list, tuple, np.ndarray)
_MOST_DIGITS = 4000
"""Digits up to which Python makes an integer of a text."""


def given_column(values: Any, name: str, wanted: TableColumns | None = None) -> tuple[pa.Array, list[int]]:
    """Returns values as a column, and the rows without a valid value: objects, lists, lone surrogates.

    Args:
        values: A value a row: texts, numbers, truth values, times, lists of these, None and NaN for missing ones; or
            an array with a type, which stays as it is.
        name: Name of the column.
        wanted: The types that the column may be of; None where it may be of any.
    """
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values, []
    if str(getattr(values, "dtype", "object")) != "object":
        with suppress(pa.ArrowException, ValueError):
            return pa.array(values, from_pandas=True), []
    values = list(values)
    if (wanted is None or wanted.takes_lists(name)) and any(isinstance(value, _LISTS) for value in values):
        return _list_column(values, None if wanted is None else wanted.separators.get(name))
    column, bad = _column(values)
    if wanted is not None and not wanted.takes(name, column.type):
        column = column.cast(pa.string())
    return column, bad


def _column(values: Sequence[Any]) -> tuple[pa.Array, list[int]]:
    """Returns single values as a column, and the places that have no valid value."""
    types = set(map(type, values)) - {type(None)}
    if not types:
        return pa.nulls(len(values)), []
    if len(types) == 1 and (type_ := ARROW_TYPES.get(next(iter(types)))) is not None:
        with suppress(pa.ArrowException, ValueError, OverflowError):  # more than 64 bits, or half of a surrogate pair
            return pa.array(values, type_), []
    texts: list[str | None] = []
    bad: list[int] = []
    for place, value in enumerate(values):
        try:
            texts.append(value_text(value))
        except ValueError:
            texts.append(None)
            bad.append(place)
    return pa.array(texts, pa.string()), bad


def value_text(value: Any) -> str | None:
    """Returns the text of a value, which means the same; None for a missing one, a ValueError where it has none."""
    if value is None:
        return None
    if isinstance(value, str):
        value.encode()  # half of a pair of surrogates is no character
        return value
    if isinstance(value, int):
        return str(value).lower()  # of true, too
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, (*_LISTS, dict)):
        raise ValueError("a list or an object where one value is wanted")
    try:
        scalar = pa.scalar(value, from_pandas=True)
        if type_kind(scalar.type) in (LIST, "other"):
            raise ValueError(f"{scalar.type} has no text")
        text: str | None = scalar.cast(pa.string()).as_py()
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise ValueError(str(error)) from error
    return text


def json_values(text: bytes) -> Any:
    """Returns the value of a text of JSON in UTF-8, NaN and Infinity included; an integer of too many digits is a text.

    Raises:
        ValueError: It is no JSON.
        RecursionError: It is too deep.
    """
    return json.loads(text.decode(), parse_int=lambda digits: int(digits) if len(digits) <= _MOST_DIGITS else digits)


def _list_column(values: Sequence[Any], separator: str | None) -> tuple[pa.Array, list[int]]:
    """Returns lists as a column, and the rows with an entry that is no value; a single value is a list of one."""
    rows, bad = [], []
    for row, value in enumerate(values):
        try:
            rows.append(_entries(value, separator))
        except ValueError:
            rows.append([])
            bad.append(row)
    lengths = np.array([len(entries) for entries in rows], np.int64)
    entries, bad_entries = _column([entry for own in rows for entry in own])
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    bad += np.repeat(np.arange(len(rows)), lengths)[bad_entries].tolist()
    return pa.ListArray.from_arrays(offsets, entries), sorted(set(bad))


def _entries(value: Any, separator: str | None) -> Sequence[Any]:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return value
    text = value_text(value)
    if text is None:
        return []
    return [text] if separator is None else text.split(separator)
