"""Rows of JSON lines: an object a line, whose keys are the columns' names.

A line that is no such object is no row, by the reason ``json``; so is one with an object or a list of lists where a
value is wanted, or with a list where one value is. A key that a line lacks is a missing value, as null is, and so
is one that a whole file lacks; that another has it is made sure of elsewhere (``source.py``).

Arrow parses a block whose values are all of the types of its first lines, and Python any other, value by value, 20
times slower: it gives texts, of which a number's is that of its decimal digits, so that both give the same rows.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json as pjson

from distembed.data.prepare.blocks import RejectedRow
from distembed.data.prepare.table.raw_rows import Lines, RawRows
from distembed.data.table.raw_columns import TableColumns

_FIRST_LINES = 20
_TYPES: dict[type, pa.DataType] = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}


@dataclass(frozen=True)
class JsonBlock:
    """Whole lines of a file of JSON lines.

    Attributes:
        text: The lines.
        wanted: Says of which types columns may be, texts among them; None where they may be of any.
    """

    text: bytes
    wanted: TableColumns | None = None

    def rows(self, columns: Sequence[str], numbers: Collection[str] = ()) -> RawRows:
        """Returns the rows of the block, with these columns, typed or as texts."""
        lines = Lines(self.text)
        table = _typed(self.text, lines, columns, self.wanted)
        if table is not None:
            return RawRows(table, np.arange(len(lines)), len(lines), line_text=lines.line)
        takes_lists = {name: self.wanted is None or self.wanted.takes_lists(name) for name in columns}
        values: list[list[Any]] = []
        kept, bad = [], []
        for number in range(len(lines)):
            try:
                row = json.loads(lines.line(number), parse_constant=_refuse)
                values.append([_as_text(row.get(name), takes_lists[name]) for name in columns])
                kept.append(number)
            except (ValueError, AttributeError, RecursionError):
                bad.append(RejectedRow(number, "json", lines.line(number)))
        table = pa.table({name: _column([row[place] for row in values]) for place, name in enumerate(columns)})
        return RawRows(table, np.array(kept, np.int64), len(lines), tuple(bad), lines.line)


def keys_of_lines(text: bytes) -> list[str]:
    """Returns the keys of all objects of some lines, in the order in which they come."""
    keys: dict[str, None] = {}
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        keys |= dict.fromkeys(row) if isinstance(row, dict) else {}
    return list(keys)


def _typed(text: bytes, lines: Lines, columns: Sequence[str], wanted: TableColumns | None) -> pa.Table | None:
    """Returns the columns as Arrow parses them; None where values are of several types, or a line is no object.

    So it is where a column is of a type that it may not be of: which lines are at fault is found line by line, and does
    not depend on those beside them.
    """
    try:
        text.decode()
        first = [json.loads(lines.line(number)) for number in range(min(len(lines), _FIRST_LINES))]
        fields = [(name, _arrow_type([row[name] for row in first if row.get(name) is not None])) for name in columns]
        if wanted is not None and not all(wanted.takes(name, type_) for name, type_ in fields):
            return None
        table = pjson.read_json(
            pa.BufferReader(text),
            pjson.ReadOptions(use_threads=False, block_size=len(text) + 1),
            pjson.ParseOptions(explicit_schema=pa.schema(fields), unexpected_field_behavior="ignore"),
        )
    except (ValueError, KeyError, AttributeError, RecursionError, pa.ArrowException):  # Python finds the lines at fault
        return None
    # Arrow passes over empty lines
    return table.select(list(columns)) if table.num_rows == len(lines) else None


def _arrow_type(values: Sequence[Any]) -> pa.DataType:
    """Returns the type of values like these; null of none, as of a key that may be in no line.

    Raises:
        KeyError: They are of several types, or do not say.
    """
    if not values:
        return pa.null()
    entries = [entry for value in values for entry in (value if isinstance(value, list) else [value])]
    kinds = {type(entry) for entry in entries}
    if len(kinds) != 1 or len({isinstance(value, list) for value in values}) != 1:
        raise KeyError
    kind = _TYPES[kinds.pop()]
    return pa.list_(kind) if isinstance(values[0], list) else kind


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _as_text(value: Any, takes_lists: bool) -> str | list[str] | None:
    """Returns a value as text, or the entries of a list.

    Raises:
        ValueError: It is an object or a list of lists, or a list where none is taken, or holds what no text is.
    """
    if value is None:
        return None
    if isinstance(value, list):
        if not takes_lists:
            raise ValueError("a list where one value is wanted")
        entries = [_as_text(entry, takes_lists=False) for entry in value]
        return [entry for entry in entries if isinstance(entry, str)]
    if isinstance(value, dict):
        raise ValueError("an object")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return str(pa.scalar(value).cast(pa.string()))
    text = str(value)
    text.encode()  # half of a pair of surrogates is no character
    return text


def _column(values: list[Any]) -> pa.Array:
    """Returns texts, or lists of texts where one value is a list."""
    if any(isinstance(value, list) for value in values):
        lists = [value if isinstance(value, list) else [] if value is None else [value] for value in values]
        return pa.array(lists, pa.list_(pa.string()))
    return pa.array(values, pa.string()) if any(value is not None for value in values) else pa.nulls(len(values))
