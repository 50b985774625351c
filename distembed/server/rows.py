"""Rows of requests as tables: columns of values as JSON has them, with the rows that no table can hold apart.

Requests are joined column by column, so that decoding, which costs microseconds a value and much more a column, is done
once for all of them. What a value means never depends on the rows beside it::

    C1     "a"  "b"  null      a column of one type                          as it is
    I1      3   "3"   2.5      types of which the texts mean the same        as texts, which a CSV file has too
    C2    "10"   10   "1f"     types that mean different things (hex, or     the rows are divided by type, and each
                               a list and a text with separators)            group is decoded by itself
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from distembed.data.table.raw_columns import BOOLEAN, INTEGER, NUMBER, TEXT, TableColumns
from distembed.data.table.schema import TableSchema

_KINDS: Mapping[type, str] = {str: TEXT, int: INTEGER, float: NUMBER, bool: BOOLEAN}
_ARROW_TYPES: Mapping[str, pa.DataType] = {
    TEXT: pa.string(),
    INTEGER: pa.int64(),
    NUMBER: pa.float64(),
    BOOLEAN: pa.bool_(),
}
_WHAT = {TEXT: "texts", INTEGER: "whole numbers", NUMBER: "numbers", BOOLEAN: "true and false", "list": "lists"}
_NOT_CONVERTED = (pa.ArrowException, TypeError, ValueError, OverflowError)


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
class RowGroup:
    """Rows that are decoded together.

    Attributes:
        table: The rows; the values of bad ones are null.
        rows: Their numbers; None where these are all rows in order.
    """

    table: pa.Table
    rows: Sequence[int] | None = None


@dataclass(frozen=True)
class _MixedColumn:
    """Values of several types, of which each means something else.

    Attributes:
        values: The values, None for missing and bad ones.
        types: Type of each value.
    """

    values: list[Any]
    types: list[pa.DataType]

    def array(self, rows: Sequence[int]) -> pa.Array:
        """Returns the values of rows that have one type."""
        return pa.array([self.values[row] for row in rows], self.types[rows[0]])


def missing_columns(rows: Sequence[Mapping[str, Any]], columns: Collection[str]) -> list[str]:
    """Returns the columns that no row of a request has."""
    first = rows[0].keys() if rows else columns
    missing = [name for name in columns if name not in first]
    return [name for name in missing if not any(name in row for row in rows)]


def shown(value: Any) -> str:
    """Returns a value as a short text, however large or deep it is."""
    return reprlib.repr(value)


class RowJoiner:
    """Makes tables of rows; any number of threads may use it.

    Args:
        schema: What the columns mean.
        columns: The columns that are looked at, and of which types each may be.
    """

    def __init__(self, schema: TableSchema, columns: TableColumns) -> None:
        self._columns = columns
        self._as_texts = _columns_as_texts(schema)

    def join(self, rows: Sequence[Mapping[str, Any]]) -> tuple[list[RowGroup], list[BadRow]]:
        """Returns rows as tables, and the bad ones; a value that a row lacks is missing."""
        bad: list[BadRow] = []
        arrays: dict[str, pa.Array] = {}
        mixed: dict[str, _MixedColumn] = {}
        for name in self._columns.kinds:
            column = self._column(name, [row.get(name) for row in rows], bad)
            if isinstance(column, _MixedColumn):
                mixed[name] = column
            else:
                arrays[name] = column
        if not mixed:
            return [RowGroup(pa.table(arrays))], bad
        groups: dict[tuple[pa.DataType, ...], list[int]] = {}
        for row, types in enumerate(zip(*(column.types for column in mixed.values()), strict=True)):
            groups.setdefault(types, []).append(row)
        whole = pa.table(arrays)
        return [_group(whole, mixed, own) for own in groups.values()], bad

    def _column(self, name: str, values: list[Any], bad: list[BadRow]) -> pa.Array | _MixedColumn:
        """Returns the values of a column, and adds the rows whose values it cannot have."""
        try:
            array = pa.array(values)
            if self._columns.takes(name, array.type) and not self._is_promoted(name, array.type, values):
                return array
        except _NOT_CONVERTED:
            pass
        return self._odd_column(name, values, bad)

    def _is_promoted(self, name: str, type_: pa.DataType, values: list[Any]) -> bool:
        """Returns whether whole numbers may have become others beside those with a fraction, whose texts differ."""
        if pa.types.is_floating(type_):
            return self._as_texts.get(name) != NUMBER and any(type(value) is int for value in values)
        return pa.types.is_list(type_) and pa.types.is_floating(type_.value_type)

    def _odd_column(self, name: str, values: list[Any], bad: list[BadRow]) -> pa.Array | _MixedColumn:
        """Returns the values of a column that has not one type, or one that it does not take."""
        kept: list[Any] = []
        types: list[pa.DataType] = []
        for row, value in enumerate(values):
            type_ = _type_of(value)
            if type_ is None or not self._columns.takes(name, type_):
                bad.append(
                    BadRow(row, name, f"{shown(value)} is no value of this column, which takes {self._wanted(name)}")
                )
                value, type_ = None, pa.null()
            kept.append(_plain(value, type_))
            types.append(type_)
        distinct = _distinct(types)
        if len(distinct) <= 1:
            return pa.array(kept, distinct[0] if distinct else pa.null())
        if name in self._as_texts:
            return pa.array([_text(value, self._as_texts[name]) for value in kept], pa.string())
        return _MixedColumn(kept, [type_ if type_ in distinct else distinct[0] for type_ in types])

    def _wanted(self, name: str) -> str:
        return " or ".join(_WHAT[kind] for kind in self._columns.kinds[name] if kind in _WHAT)


def _group(whole: pa.Table, mixed: Mapping[str, _MixedColumn], rows: list[int]) -> RowGroup:
    places = pa.array(rows)
    arrays = {name: whole[name].take(places) for name in whole.column_names}
    return RowGroup(pa.table(arrays | {name: column.array(rows) for name, column in mixed.items()}), rows)


def _type_of(value: Any) -> pa.DataType | None:
    """Returns the type that a value has by itself; None where no column has such a value."""
    if not isinstance(value, list):
        return _single_type(value)
    entries = {_single_type(each) for each in value} - {pa.null()}
    if entries == {pa.int64(), pa.float64()}:
        entries = {pa.float64()}
    if len(entries) > 1 or None in entries:
        return None
    return pa.list_(next(iter(entries), pa.null()))


def _single_type(value: Any) -> pa.DataType | None:
    """Returns the type of a single value; a whole number of more than 64 bits has none but that of its text."""
    if value is None:
        return pa.null()
    if type(value) is int and not -(2**63) <= value < 2**63:
        return pa.string()
    return _ARROW_TYPES.get(_KINDS.get(type(value), ""))


def _distinct(types: Sequence[pa.DataType]) -> list[pa.DataType]:
    """Returns the types of values, without those that missing values and empty lists have where there are others."""
    distinct = list(dict.fromkeys(type_ for type_ in types if type_ != pa.null()))
    lists = [type_ for type_ in distinct if pa.types.is_list(type_) and type_.value_type != pa.null()]
    return [*lists, *(type_ for type_ in distinct if not pa.types.is_list(type_))] if lists else distinct


def _plain(value: Any, type_: pa.DataType) -> Any:
    """Returns a value as Arrow takes it for its type."""
    if isinstance(value, list):
        return [_plain(each, type_.value_type) for each in value]
    if pa.types.is_string(type_) and value is not None:
        return str(value)
    return float(value) if pa.types.is_floating(type_) and value is not None else value


def _text(value: Any, kind: str) -> str | None:
    """Returns the text that means what a value does, in a column of numbers or one of texts."""
    if value is None or isinstance(value, str):
        return value
    if kind == NUMBER:
        return str(int(value)) if isinstance(value, bool) else repr(value)
    found: str = pa.scalar(value).cast(pa.string()).as_py()
    return found


def _columns_as_texts(schema: TableSchema) -> dict[str, Literal["number", "text"]]:
    """Returns the columns in which texts mean what other values do: those that are numbers, and those that are texts.

    A column that is both, or hexadecimal, or of lists is none of these; nor is any where the text of a number or of a
    truth value stands for a missing value.
    """
    if any(_is_plain_value(text) for text in schema.text.missing_values):
        return {}
    uses: dict[str, set[str]] = {}
    for column in schema.dense_columns.values():
        uses.setdefault(column, set()).add(NUMBER)
    for name, columns in schema.categorical_columns.items():
        categorical = schema.categorical[name]
        kind = {"string": TEXT, "hexadecimal": "hexadecimal"}.get(categorical.kind, NUMBER)
        for column in columns:
            uses.setdefault(column, set()).add("list" if categorical.holds_lists else kind)
    found: dict[str, Literal["number", "text"]] = {}
    for column, kinds in uses.items():
        if kinds == {NUMBER}:
            found[column] = "number"
        elif kinds == {TEXT}:
            found[column] = "text"
    return found


def _is_plain_value(text: str) -> bool:
    """Returns whether a text is that of a finite number or of a truth value."""
    try:
        return math.isfinite(float(text))
    except ValueError:
        return text in ("true", "false")
