"""The one text of a value, which decides its key: CSV, JSON, Parquet, pandas and Python write a value in several ways.

::

    true  True  TRUE                                       true
    10  10.0  1.0E1  Decimal("10.00")                      10               0  -0  -0.0        0
    0.50  5e-01                                            0.5
    2026-01-01  2026-01-01T00:00:00.000Z                   2026-01-01
    2026-01-01 12:30:00+02:00                              2026-01-01 10:30:00

A text is a number where JSON would read one. An exponent needs a sign or a point before it, since codes like 12e3
have neither. All other texts, 007, +7, .5, 12e3, NaN and texts with blanks among them, are as they are written.

A text that may change is found by its first and last byte, and by a regular expression if these fit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from distembed.data.table.raw_columns import LIST, TableColumns, type_kind

_WHOLE = r"-?(?:0|[1-9][0-9]*)"
_TIME = (
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})[ T]([0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.0+|(\.[0-9]*[1-9])0*)?"
    r"(Z| UTC|[+-][0-9]{2}:?[0-9]{2})?"
)
_CHANGES = (
    r"True|TRUE|False|FALSE|-0"
    rf"|{_WHOLE}\.[0-9]*0|{_WHOLE}(?:\.[0-9]+)?[eE][+-][0-9]{{1,3}}|{_WHOLE}\.[0-9]+[eE][0-9]{{1,3}}"
    rf"|{_TIME}"
)
_CHANGING, _TIMES = re.compile(_CHANGES, re.ASCII), re.compile(_TIME, re.ASCII)
_MARKS = (b".", b":", b"+", b"-")  # a number or a time that changes has one of them
_LAST = np.isin(np.arange(256), np.frombuffer(b"0123456789eEZC", np.uint8))
_FIRST_OF_BOOLEANS = np.isin(np.arange(256), np.frombuffer(b"TF", np.uint8))
_FIRST = _FIRST_OF_BOOLEANS | np.isin(np.arange(256), np.frombuffer(b"-0123456789", np.uint8))
_FEW = 64  # texts, up to which Python looks at them in less time than Arrow is called
_UTC = (None, "Z", " UTC", "+00:00", "+0000", "-00:00", "-0000")


def value_texts(values: pa.Array) -> pa.Array:
    """Converts values to their canonical texts (see the module's table) as Arrow's string; nulls stay null."""
    if pa.types.is_timestamp(values.type) and values.type.tz is not None:
        values = values.cast(pa.timestamp(values.type.unit))
    texts = values if pa.types.is_string(values.type) else values.cast(pa.string())
    if pa.types.is_integer(values.type) or pa.types.is_boolean(values.type) or not len(texts):
        return texts
    positions = _changing(texts)
    if not len(positions):
        return texts
    mask = np.zeros(len(texts), bool)
    mask[positions] = True
    changed = [_changed(text) for text in texts.take(pa.array(positions)).to_pylist()]
    return pc.replace_with_mask(texts, pa.array(mask), pa.array(changed, pa.string()))


def _changing(texts: pa.Array) -> NDArray[np.int64]:
    """Returns the positions of the texts that :data:`_CHANGES` matches: all other texts are canonical already."""
    if len(texts) <= _FEW:
        values = texts.to_pylist()
        return np.array([index for index, text in enumerate(values) if text and _CHANGING.fullmatch(text)], np.int64)
    ends = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset : texts.offset + len(texts) + 1]
    data = bytes(memoryview(texts.buffers()[2] or b"")[ends[0] : ends[-1]])
    if not data:
        return np.zeros(0, np.int64)
    # Tests the first and last byte of every text at once, in numpy; the regular expression then sees only few texts.
    first = _FIRST if any(mark in data for mark in _MARKS) else _FIRST_OF_BOOLEANS
    letters, ends = np.frombuffer(data, np.uint8), ends - ends[0]
    may_change = first[letters[np.minimum(ends[:-1], len(data) - 1)]] & _LAST[letters[np.maximum(ends[1:] - 1, 0)]]
    positions = np.flatnonzero(may_change)
    if not len(positions):
        return positions
    changes = pc.match_substring_regex(texts.take(pa.array(positions)), f"^(?:{_CHANGES})$")
    return positions[pc.fill_null(changes, False).to_numpy(zero_copy_only=False)]


def _changed(text: str) -> str:
    """Converts one text that :data:`_CHANGES` matches to the canonical text of its value."""
    if text[0] in "TF":
        return text.lower()
    if (time := _TIMES.fullmatch(text)) is not None:
        return _time_text(text, *time.groups())
    number = f"{Decimal(text):f}"
    number = number.rstrip("0").rstrip(".") if "." in number else number
    return "0" if number == "-0" else number


def _time_text(text: str, day: str, clock: str, fraction: str | None, zone: str | None) -> str:
    """Formats the parts of a time in UTC, midnight as the day alone; returns ``text`` itself for a day like Feb 30.

    Days are checked only where the zone is not UTC, since only these times are computed with.
    """
    if zone not in _UTC:
        try:
            moved = datetime.fromisoformat(f"{day} {clock}{zone}").astimezone(UTC)
        except (ValueError, OverflowError):  # no such day
            return text
        day, clock = moved.replace(tzinfo=None).isoformat(" ").split(" ")
    return f"{day} {clock}{fraction or ''}".removesuffix(" 00:00:00")


ARROW_TYPES: dict[type, pa.DataType] = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
_LISTS = (list, tuple, np.ndarray)
_MOST_DIGITS = 4000  # digits up to which Python makes an integer of a text


def given_column(values: Any, name: str, wanted: TableColumns | None = None) -> tuple[pa.Array, list[int]]:
    """Converts Python, numpy or pandas values to an Arrow column, null or an empty list in rows with an invalid value.

    Returns the column and these rows: their value is an object, an unwanted list, or a text with a lone surrogate.
    Typed arrays keep their type. Objects of a type that ``wanted`` does not allow become texts; None allows any type.
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
    """Converts single values to a column: typed if all have one type of ARROW_TYPES, else texts.

    Returns it with the positions of invalid values, which are null.
    """
    types = set(map(type, values)) - {type(None)}
    if not types:
        return pa.nulls(len(values)), []
    if len(types) == 1 and (type_ := ARROW_TYPES.get(next(iter(types)))) is not None:
        with suppress(pa.ArrowException, ValueError, OverflowError):  # more than 64 bits, or half of a surrogate pair
            return pa.array(values, type_), []
    texts: list[str | None] = []
    bad: list[int] = []
    for index, value in enumerate(values):
        try:
            texts.append(value_text(value))
        except ValueError:
            texts.append(None)
            bad.append(index)
    return pa.array(texts, pa.string()), bad


def value_text(value: Any) -> str | None:
    """Converts a value to a text that parses as the same value; None if missing. Lists and objects: ValueError."""
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
    """Parses JSON, NaN and Infinity included; integers of over 4000 digits, which Python may refuse, stay texts."""
    return json.loads(text.decode(), parse_int=lambda digits: int(digits) if len(digits) <= _MOST_DIGITS else digits)


def _list_column(values: Sequence[Any], separator: str | None) -> tuple[pa.Array, list[int]]:
    """Converts values to a column of lists, and returns it with the rows that have an invalid entry.

    The text of a value that is no list is split at the separator, or is one entry without a separator; a missing value
    is an empty list.
    """
    rows, bad = [], []
    for row, value in enumerate(values):
        try:
            rows.append(_entries(value, separator))
        except ValueError:
            rows.append([])
            bad.append(row)
    lengths = np.array([len(entries) for entries in rows], np.int64)
    entries, bad_entries = _column([entry for row_entries in rows for entry in row_entries])
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    bad += np.repeat(np.arange(len(rows)), lengths)[bad_entries].tolist()
    return pa.ListArray.from_arrays(offsets, entries), sorted(set(bad))


def _entries(value: Any, separator: str | None) -> Sequence[Any]:
    if isinstance(value, _LISTS):
        return value.tolist() if isinstance(value, np.ndarray) else value
    text = value_text(value)
    if text is None:
        return []
    return [text] if separator is None else text.split(separator)
