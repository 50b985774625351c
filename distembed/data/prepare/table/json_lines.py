"""Rows of JSON lines: an object a line, whose keys are the columns' names.

A line that is no such object is no row, by the reason ``json``; so is one with an object or a list of lists where a
value is wanted, or with a list where one value is. A key that a line lacks is a missing value, as null is, and so
is one that a whole file lacks; that another has it is made sure of elsewhere (``source.py``).

Arrow parses a block whose values are all of the types of its first lines, and Python any other, value by value, 20
times slower; a value means the same by both (:mod:`distembed.data.table.given_values`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pjson

from distembed.data.prepare.blocks import RejectedRow
from distembed.data.prepare.table.raw_rows import Lines, RawRows
from distembed.data.table.given_values import ARROW_TYPES, given_column, json_values
from distembed.data.table.raw_columns import TableColumns

_FIRST_LINES = 20
_EXACT = 2.0**53


@dataclass(frozen=True)
class JsonBlock:
    """Whole lines of a file of JSON lines."""

    text: bytes
    wanted: TableColumns | None = None  # the types that columns may be of, texts among them; None where of any

    def rows(self, columns: Sequence[str], numbers: Collection[str] = ()) -> RawRows:
        """Returns the rows of the block, with these columns, typed or as texts."""
        lines = Lines(self.text)
        table = _typed(self.text, lines, columns, self.wanted)
        if table is not None:
            return RawRows(table, np.arange(len(lines)), len(lines), line_text=lines.line)
        values: list[list[Any]] = []
        bad = set[int]()
        for number in range(len(lines)):
            try:
                row = json_values(lines.line(number))
                values.append([row.get(name) for name in columns])
            except (ValueError, AttributeError, RecursionError):
                values.append([None] * len(columns))
                bad.add(number)
        arrays = {}
        for place, name in enumerate(columns):
            arrays[name], wrong = given_column([row[place] for row in values], name, self.wanted)
            bad.update(wrong)
        table, kept = pa.table(arrays), np.delete(np.arange(len(lines)), sorted(bad))
        rejected = tuple(RejectedRow(number, "json", lines.line(number)) for number in sorted(bad))
        return RawRows(table.take(kept) if bad else table, kept, len(lines), rejected, lines.line)


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
    """Returns the columns as Arrow parses them; None where Python has to find the lines at fault one by one."""
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
    if any(_loses_digits(table[name]) for name in columns if wanted is None or name not in wanted.numbers):
        return None
    # Arrow passes over empty lines
    return table.select(list(columns)) if table.num_rows == len(lines) else None


def _arrow_type(values: Sequence[Any]) -> pa.DataType:
    """Returns the type of values like these, null of none; a KeyError where they are of several types."""
    if not values:
        return pa.null()
    entries = [entry for value in values for entry in (value if isinstance(value, list) else [value])]
    kinds = {type(entry) for entry in entries}
    if len(kinds) != 1 or len({isinstance(value, list) for value in values}) != 1:
        raise KeyError
    kind = ARROW_TYPES[kinds.pop()]
    return pa.list_(kind) if isinstance(values[0], list) else kind


def _loses_digits(column: pa.ChunkedArray) -> bool:
    """Returns whether numbers may have been integers with digits that a float has not."""
    column = pc.list_flatten(column) if pa.types.is_list(column.type) else column
    return pa.types.is_floating(column.type) and bool((np.abs(column.to_numpy()) >= _EXACT).any())
