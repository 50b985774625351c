"""The one text of a value, which decides its key: CSV, JSON, Parquet, pandas and Python write a value in several ways.

::

    true  True  TRUE                                       true
    10  10.0  1.0E1  Decimal("10.00")                      10               0  -0  -0.0        0
    0.50  5e-01                                            0.5
    2026-01-01  2026-01-01T00:00:00.000Z                   2026-01-01
    2026-01-01 12:30:00+02:00                              2026-01-01 10:30:00

A text is a number where JSON would read one. An exponent needs a sign or a point before it, since codes such as 12e3
have neither. All other texts, 007, +7, .5, 12e3, NaN and texts with blanks among them, are as they are written.

A text that may change is found by its first and last byte, and by a regular expression if these fit.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

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
_MARKS = (b".", b":", b"+", b"-")  # of which a number or a time that changes has one
_LAST = np.isin(np.arange(256), np.frombuffer(b"0123456789eEZC", np.uint8))
_FIRST_OF_BOOLEANS = np.isin(np.arange(256), np.frombuffer(b"TF", np.uint8))
_FIRST = _FIRST_OF_BOOLEANS | np.isin(np.arange(256), np.frombuffer(b"-0123456789", np.uint8))
_FEW = 64  # texts, up to which Python looks at them in less time than Arrow is called
_UTC = (None, "Z", " UTC", "+00:00", "+0000", "-00:00", "-0000")


def value_texts(values: pa.Array) -> pa.Array:
    """Returns the text of each text, number, truth value, day or time as Arrow's string; a missing value stays null."""
    if pa.types.is_timestamp(values.type) and values.type.tz is not None:
        values = values.cast(pa.timestamp(values.type.unit))
    texts = values if pa.types.is_string(values.type) else values.cast(pa.string())
    if pa.types.is_integer(values.type) or pa.types.is_boolean(values.type) or not len(texts):
        return texts
    places = _changing(texts)
    if not len(places):
        return texts
    mask = np.zeros(len(texts), bool)
    mask[places] = True
    changed = [_changed(text) for text in texts.take(pa.array(places)).to_pylist()]
    return pc.replace_with_mask(texts, pa.array(mask), pa.array(changed, pa.string()))


def vocabulary_texts(texts: pa.Array) -> pa.Array:
    """Returns the values' own texts for those of a vocabulary; a text whose value an earlier one has stays as it is.

    Vocabularies of earlier versions have 10.0 where a file of text had it.
    """
    own = value_texts(texts)
    if own.equals(texts):
        return own
    _, places = np.unique(own.dictionary_encode("encode").indices.to_numpy(), return_index=True)
    is_first = np.zeros(len(own), bool)
    is_first[places] = True
    return pc.if_else(pa.array(is_first), own, texts)


def _changing(texts: pa.Array) -> NDArray[np.int64]:
    """Returns the places of the texts that may be written otherwise than the value's own text."""
    if len(texts) <= _FEW:
        given = texts.to_pylist()
        return np.array([place for place, text in enumerate(given) if text and _CHANGING.fullmatch(text)], np.int64)
    ends = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset : texts.offset + len(texts) + 1]
    data = bytes(memoryview(texts.buffers()[2] or b"")[ends[0] : ends[-1]])
    if not data:
        return np.zeros(0, np.int64)
    first = _FIRST if any(mark in data for mark in _MARKS) else _FIRST_OF_BOOLEANS
    letters, ends = np.frombuffer(data, np.uint8), ends - ends[0]
    may_change = first[letters[np.minimum(ends[:-1], len(data) - 1)]] & _LAST[letters[np.maximum(ends[1:] - 1, 0)]]
    places = np.flatnonzero(may_change)
    if not len(places):
        return places
    changes = pc.match_substring_regex(texts.take(pa.array(places)), f"^(?:{_CHANGES})$")
    return places[pc.fill_null(changes, False).to_numpy(zero_copy_only=False)]


def _changed(text: str) -> str:
    """Returns the value's own text for a text that :data:`_CHANGES` matches."""
    if text[0] in "TF":
        return text.lower()
    if (time := _TIMES.fullmatch(text)) is not None:
        return _time_text(text, *time.groups())
    number = f"{Decimal(text):f}"
    number = number.rstrip("0").rstrip(".") if "." in number else number
    return "0" if number == "-0" else number


def _time_text(text: str, day: str, clock: str, fraction: str | None, zone: str | None) -> str:
    """Returns a time in UTC; the day alone at midnight."""
    if zone not in _UTC:
        try:
            moved = datetime.fromisoformat(f"{day} {clock}{zone}").astimezone(UTC)
        except (ValueError, OverflowError):  # no such day
            return text
        day, clock = moved.replace(tzinfo=None).isoformat(" ").split(" ")
    return f"{day} {clock}{fraction or ''}".removesuffix(" 00:00:00")
