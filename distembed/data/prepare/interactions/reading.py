"""Reads interactions into tables of a database, and sets the malformed rows aside.

A row is malformed, for the first of these reasons that holds:

- ``columns``, ``text``, ``json``: a line is no row (``table/delimited.py``, ``table/json_lines.py``);
- ``user``, ``item``: it is missing;
- ``rating``, ``time``: it is missing, or no finite number;
- ``attribute``: a number among the attributes is there and not finite;
- ``items``: a line of a user and items has no item.

The table ``rows`` has a row for each interaction, and ``keys`` the text of each code::

    rows  place   part   k0 k1 k2 ...                rating   time, whole                   d0 d1 ...
          0, 1,   split  codes of user, item and     float32  float64, and an int64 that    numbers, NaN
          2 ...          categorical values, null             tells equal ones apart        where missing
                         where missing
    keys  code, key

Texts are numbered block by block, so that the database compares numbers: a text has another code in each block, and
all codes of a text become its first one at the end. Codes of a column are in the order of the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from distembed.data.dataset.manifest import Rejected, SourceFile
from distembed.data.prepare.count import Database
from distembed.data.prepare.interactions.options import InteractionColumns
from distembed.data.prepare.options import ProgressCallback
from distembed.data.prepare.row_source import RejectedRows
from distembed.data.prepare.table.inputs import TableInput
from distembed.data.prepare.table.rows import NamedRows, RowReader
from distembed.data.table.keys import coded
from distembed.data.table.numbers import Bools, dense_values, finite_numbers
from distembed.data.table.schema import TableSchema
from distembed.data.table.values import value_texts

REASONS = ("columns", "text", "json", "user", "item", "rating", "time", "attribute", "items")

_LINE = {
    "categorical": {"line": {}},
    "text": {"header": False, "columns": ["line"], "separator": "\x1f", "quote": None},
}
"""Schema of lines of a user and items: text whose separator no line has."""
_BLOCK_BYTES = 16 << 20
_WHOLE_NUMBER = "^-?[0-9]{1,19}$"
_MISSING = pa.array([""])
_TEXTS = pa.schema({"number": pa.int32(), "code": pa.int32(), "key": pa.string()})

Wrong = dict[str, Bools]
"""Reason -> which rows are malformed by it."""


@dataclass(frozen=True)
class InteractionInput:
    """The files to read."""

    inputs: Sequence[TableInput]
    parts: Sequence[int]  # number of the split that each input is for
    columns: InteractionColumns | None  # None for lines of a user and items
    max_rejected: float

    @property
    def schema(self) -> TableSchema:
        if self.columns is None:
            return TableSchema.from_json(_LINE, "a line")
        keys, numbers, time = self.columns.keys, self.columns.numbers, self.columns.time
        values = {"dense": dict.fromkeys(numbers), "categorical": dict.fromkeys(keys)}
        values |= {"time": {"column": time, "name": time}} if time is not None else {}
        text = {"header": self.columns.has_header, "newlines_in_values": self.columns.newlines_in_values}
        return TableSchema.from_json({**values, "text": text}, "the columns")

    @property
    def wanted(self) -> str:
        if self.columns is None:
            return "A line is a user and one or more items, separated by blanks."
        named = [("rating", self.columns.rating), ("time", self.columns.time)]
        numbers = "".join(f", a number for the {role} ({name})" for role, name in named if name is not None)
        return (
            f"A row is a user ({self.columns.user_column}), an item ({self.columns.item_column}){numbers}; "
            "with --newlines-in-values a value in quotation marks may have several lines."
        )


def read_interactions(
    database: Database, given: InteractionInput, folder: Path, memory_bytes: int, report: ProgressCallback
) -> tuple[tuple[SourceFile, ...], Rejected]:
    """Reads all interactions into tables, lists malformed rows in the folder, and returns the inputs and the counts."""
    reader = RowReader(given.inputs, given.schema)
    inputs = [each.raw for each in given.inputs]
    rejected = RejectedRows(folder, inputs, REASONS, given.max_rejected, given.wanted)
    columns = given.columns or InteractionColumns()
    schema = _row_schema(columns)
    database.add("rows", [], schema)
    database.add("texts", [], _TEXTS)
    num_kept, num_codes = 0, 1
    try:
        for rows in reader.blocks(min(_BLOCK_BYTES, memory_bytes // 32), report):
            keys, numbers, wrong = _listed(rows) if given.columns is None else _named(rows, given.columns)
            _reject(rows, wrong, rejected)
            rejected.require_hope(sum(reader.num_lines))
            coded_keys: list[pa.Array] = []
            for number, column in enumerate(keys):
                codes = column.indices.dictionary_encode()  # in the order of the rows
                coded_keys.append(pc.add_checked(codes.indices, np.int32(num_codes)))
                texts = column.dictionary.take(codes.dictionary)
                new = np.arange(num_codes, num_codes + len(texts), dtype=np.int32)
                database.append("texts", pa.record_batch([np.full(len(texts), number), new, texts], names=_TEXTS.names))
                num_codes += len(texts)
            places = np.arange(num_kept, num_kept + len(keys[0]))
            parts = np.full(len(places), given.parts[rows.source], np.uint8)
            database.append("rows", pa.record_batch([places, parts, *coded_keys, *numbers], names=schema.names))
            num_kept += len(places)
    finally:
        rejected.close()
    rejected.require_few(sum(reader.num_lines))
    _join_codes(database, len(columns.keys))
    return reader.sources(rejected.by_source), rejected.counts()


def _row_schema(columns: InteractionColumns) -> pa.Schema:
    keys = [(f"k{n}", pa.int32()) for n in range(len(columns.keys))]
    rating = [("rating", pa.float32())] if columns.rating is not None else []
    time = [("time", pa.float64()), ("whole", pa.int64())] if columns.time is not None else []
    dense = [(f"d{n}", pa.float32()) for n in range(len(columns.dense))]
    return pa.schema([("place", pa.int64()), ("part", pa.uint8()), *keys, *rating, *time, *dense])


def _join_codes(database: Database, num_keys: int) -> None:
    first = "min(code) over (partition by number, key)"
    database.run(f"create table keys as select code, key, {first} as first_code from texts")
    database.run("drop table texts")
    for n in range(num_keys):
        database.run(f"update rows set k{n} = first_code from keys where k{n} = code and code <> first_code")


def _reject(rows: NamedRows, wrong: Wrong, rejected: RejectedRows) -> None:
    """Lists the malformed rows by their first reasons."""
    first = np.full(len(rows.lines), -1)
    for reason in reversed(list(wrong)):
        first[wrong[reason]] = REASONS.index(reason)
    bad = [(row.line, row.reason, row.text) for row in rows.bad]
    bad += [(int(rows.lines[n]), REASONS[first[n]], rows.text(n)) for n in np.flatnonzero(first >= 0).tolist()]
    for line, reason, text in sorted(bad):
        rejected.add(rows.source, line, reason, text)


def _listed(rows: NamedRows) -> tuple[list[pa.DictionaryArray], list[NDArray[np.generic]], Wrong]:
    """Returns users and items of well-formed lines of a user and items, and why lines are malformed."""
    lines = pc.fill_null(rows.columns["line"].cast(pa.string()), "")
    words = pc.ascii_split_whitespace(pc.utf8_trim_whitespace(lines))
    lengths = pc.list_value_length(words).to_numpy()
    is_empty = pc.equal(pc.list_element(words, 0), "").to_numpy(zero_copy_only=False) if len(words) else lengths > 0
    good = lengths > 1
    items = pc.list_flatten(pc.list_slice(words.filter(pa.array(good)), 1))
    users = pc.list_element(words.filter(pa.array(good)), 0).take(np.repeat(np.arange(good.sum()), lengths[good] - 1))
    return [_texts(users), _texts(items)], [], {"user": is_empty, "items": ~good}


def _named(
    rows: NamedRows, columns: InteractionColumns
) -> tuple[list[pa.DictionaryArray], list[NDArray[np.generic]], Wrong]:
    """Returns the columns of well-formed rows, and why rows are malformed."""
    texts = [_texts(rows.columns[name]) for name in columns.keys]
    roles = zip(("user", "item"), texts, strict=False)
    wrong = {role: text.indices.is_null().to_numpy(zero_copy_only=False) for role, text in roles}
    numbers: list[NDArray[np.generic]] = []
    if columns.rating is not None:
        ratings, wrong["rating"] = dense_values(rows.columns[columns.rating], "none")
        wrong["rating"] |= np.isnan(ratings)
        numbers.append(ratings)
    if columns.time is not None:
        times, whole, wrong["time"] = _times(rows.columns[columns.time])
        numbers += [times, whole]
    wrong["attribute"] = np.zeros(len(rows.lines), bool)
    for name in columns.dense:
        values, malformed = dense_values(rows.columns[name], "none")
        wrong["attribute"] |= malformed
        numbers.append(values)
    good = ~np.logical_or.reduce(list(wrong.values()))
    return [text.filter(pa.array(good)) for text in texts], [column[good] for column in numbers], wrong


def _texts(column: pa.Array) -> pa.DictionaryArray:
    """Returns the texts that a column of a table has, null for missing values and empty texts."""
    values = coded(column, _MISSING)
    codes = pa.array(values.codes - 1, mask=values.codes == 0)
    return pa.DictionaryArray.from_arrays(codes, value_texts(values.distinct))


def _times(column: pa.Array) -> tuple[NDArray[np.float64], NDArray[np.int64], Bools]:
    """Returns times as float64, as int64 that keeps digits beyond a float's 53 bits, and which values are no times."""
    if pa.types.is_temporal(column.type):
        try:
            column = column.cast(pa.timestamp("ns")).cast(pa.int64())
        except pa.ArrowInvalid:  # before 1677 or after 2262
            microseconds = column.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
            column = pc.multiply(microseconds.cast(pa.float64(), safe=False), 1e3)
    times, wrong = finite_numbers(column)
    is_64_bit = np.abs(times) < 2.0**63
    whole = np.where(is_64_bit, times, 0).astype(np.int64)
    if pa.types.is_integer(column.type):
        whole = column.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    elif pa.types.is_string(column.type) and not (np.abs(times) < 2.0**53).all():  # smaller ones are exact
        digits = pc.and_(pc.match_substring_regex(column, _WHOLE_NUMBER), pa.array(is_64_bit)).fill_null(False)
        exact = pc.if_else(digits, column, "0").cast(pa.int64()).to_numpy()
        whole = np.where(digits.to_numpy(zero_copy_only=False), exact, whole)
    return times, whole, wrong
