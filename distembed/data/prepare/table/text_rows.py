r"""Rows of text: CSV and TSV, and JSON lines, which are an object a line.

A line is no row, for the first of these reasons:

- ``text``: it is not UTF-8, or has a carriage return that ends no line;
- ``columns``: it is empty, has another number of fields than the header, or unpaired quotation marks: a quoted field
  begins and ends with one, and doubles each mark within. Where a value may have several lines, all lines after an
  unclosed mark are no rows;
- ``json``: it is no JSON object, or has an object or a list of lists for a value, or a list where one value is wanted.
  A key that a line lacks is a missing value, as null is.

Arrow reads almost every block in one parse. Where that fails, the lines at fault are found first, and the rest is
parsed. JSON values of mixed types are read by Python, value by value, 20 times slower; a value means the same in both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv
import pyarrow.json as pjson
import pyarrow.parquet as pq
from numpy.typing import NDArray

from distembed.base.errors import UserError
from distembed.data.remote import is_url, open_remote
from distembed.data.table.blocks import RejectedRow
from distembed.data.table.raw_columns import TableColumns
from distembed.data.table.values import ARROW_TYPES, given_column, json_values


@dataclass(frozen=True)
class RawRows:
    """Rows of one block."""

    table: pa.Table  # the columns that were asked for, texts or of Arrow's types
    lines: NDArray[np.int64]  # number of the line of each row in the block, from 0
    num_lines: int  # malformed lines included
    bad: tuple[RejectedRow, ...] = ()  # the lines that are no rows, in order
    line_text: Callable[[int], bytes] | None = None  # returns the bytes of a line; None where rows are no lines


class RawBlock(Protocol):
    """A block of a file as it was read, which any thread can turn into rows."""

    def rows(self, columns: Sequence[str], numbers: Collection[str] = ()) -> RawRows:
        """Returns the rows of the block; a malformed line is never an error."""


@dataclass(frozen=True)
class Lines:
    """Lines of a text; a newline between two marks ``quote`` ends no line, but after an unclosed mark each does."""

    text: bytes
    quote: bytes | None = None

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """Place after each line, its newline included."""
        values = np.frombuffer(self.text, np.uint8)
        ends = np.flatnonzero(values == ord("\n")) + 1
        if self.quote is not None and self.quote in self.text:
            quotes = np.flatnonzero(values == self.quote[0])
            # A newline after an odd number of marks is within a value, unless the last mark is never closed.
            is_enclosed = np.searchsorted(quotes, ends) % 2 == 1
            if len(quotes) % 2:
                is_enclosed &= ends <= quotes[-1]
            ends = ends[~is_enclosed]
        if len(values) and (not len(ends) or ends[-1] < len(values)):
            ends = np.append(ends, len(values))
        return ends

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def unclosed(self) -> range:
        """Numbers of the lines from an unclosed mark to the end; empty if marks are even in number."""
        if self.quote is None or self.text.count(self.quote) % 2 == 0:
            return range(0)
        return range(int(np.searchsorted(self.ends, self.text.rindex(self.quote), "right")), len(self))

    def line(self, number: int) -> bytes:
        """Returns a line without its end."""
        start = int(self.ends[number - 1]) if number else 0
        return self.text[start : int(self.ends[number])].removesuffix(b"\n").removesuffix(b"\r")

    def as_array(self) -> pa.Array:
        """Returns the lines, their ends included, as Arrow's large binary, without a copy."""
        offsets = np.concatenate([np.zeros(1, np.int64), self.ends.astype(np.int64)])
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(self.text)]
        return pa.Array.from_buffers(pa.large_binary(), len(self), buffers)

    def without(self, numbers: Sequence[int]) -> bytes:
        """Returns the text without the lines of some ascending numbers."""
        chunks, start = [], 0
        for number in numbers:
            chunks.append(self.text[start : int(self.ends[number - 1]) if number else 0])
            start = int(self.ends[number])
        return b"".join([*chunks, self.text[start:]])


@dataclass(frozen=True)
class ParquetBlock:
    """Some rows of a Parquet file."""

    table: pa.Table

    def rows(self, columns: Sequence[str], numbers: Collection[str] = ()) -> RawRows:
        return RawRows(self.table.select(list(columns)), np.arange(self.table.num_rows), self.table.num_rows)


@contextmanager
def opened_parquet(place: str) -> Iterator[pq.ParquetFile]:
    """Opens a Parquet file at a path or a URL; Arrow's and system errors within the block become a UserError."""
    try:
        source: Any = open_remote(place) if is_url(place) else Path(place)
        with pq.ParquetFile(source, pre_buffer=False) as file:  # which would hold whole row groups
            yield file
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{place} cannot be read as Parquet: {error}; write it again.") from error


# What Arrow parses at a time: the columns that it builds then stay in cache.
_CACHED_BYTES = 1 << 20


@dataclass(frozen=True)
class Dialect:
    """How a text file's lines become fields."""

    columns: tuple[str, ...]  # names of all columns, in order
    separator: str
    quote: str | None  # None where the mark is a letter like others
    newlines_in_values: bool  # whether a quoted value may have several lines
    missing_values: tuple[str, ...]  # texts that stand for a missing value

    @property
    def record_quote(self) -> bytes | None:
        """The quotation mark, where a quoted value may have newlines."""
        return self.quote.encode() if self.quote is not None and self.newlines_in_values else None

    @cached_property
    def well_quoted(self) -> str:
        """Regular expression of a line whose quotation marks go in pairs."""
        quote, separator = re.escape(self.quote or ""), re.escape(self.separator)
        quoted = f"{quote}(?:[^{quote}]|{quote}{quote})*{quote}[^{quote}{separator}\\n]*"
        plain = f"[^{quote}{separator}\\n][^{separator}\\n]*"
        field = f"(?:{quoted}|{plain})?"
        return f"^{field}(?:{separator}{field})*\\r?\\n?$"


@dataclass(frozen=True)
class DelimitedBlock:
    """Whole lines of a CSV or TSV file."""

    text: bytes
    dialect: Dialect

    def rows(self, columns: Sequence[str], numbers: Collection[str] = ()) -> RawRows:
        """Parses the block: ``columns`` as texts, but ``numbers`` as float64 if all of their values are finite numbers.

        Lines that are no rows are set aside in ``bad``. Blanks in the block keep all columns texts.
        """
        text = self.text
        if b"\r" in text and not self.dialect.newlines_in_values:
            text = text.replace(b"\r\n", b"\n")
            text = text[:-1] + b"\n" if text.endswith(b"\r") else text  # the end of a last line without its newline
        lines = Lines(text, self.dialect.record_quote)
        bad = _bad_lines(lines, self.dialect)
        good = lines.without(sorted(bad)) if bad else text
        good_lines = np.delete(np.arange(len(lines)), sorted(bad))
        # as numbers only where all are: Arrow passes over blanks around a number, and takes nan and inf for one
        has_blanks = any(blank in good for blank in {b" ", b"\t"} - {self.dialect.separator.encode()})
        for typed in ((),) if has_blanks or not good else (numbers, ()):
            try:
                table, wrong_columns = _read(good, self.dialect, columns, typed)
            except pa.ArrowInvalid:
                if not typed:
                    raise
                continue
            if all(pc.all(pc.is_finite(table.column(name)), min_count=0).as_py() for name in typed):
                break
        bad |= {int(line): "columns" for line in good_lines[wrong_columns]}
        return RawRows(
            table=table,
            lines=np.delete(good_lines, wrong_columns),
            num_lines=len(lines),
            bad=tuple(RejectedRow(line, bad[line], lines.line(line)) for line in sorted(bad)),
            line_text=lines.line,
        )


def _bad_lines(lines: Lines, dialect: Dialect) -> dict[int, str]:
    """Returns the reason of each bad line that Arrow does not report: empty, unpaired marks, returns, not UTF-8."""
    text = lines.text
    bad: dict[int, str] = {}
    has_returns = b"\r" in text
    if len(dialect.columns) > 1:
        short = np.flatnonzero(np.diff(lines.ends, prepend=0) <= (2 if has_returns else 1))
        bad |= {line: "columns" for line in short.tolist() if not lines.line(line)}
    if dialect.quote is not None and dialect.quote.encode() in text:
        array = lines.as_array()
        quoted = np.flatnonzero(pc.match_substring(array, dialect.quote))
        array = array.take(pa.array(quoted)) if len(quoted) < len(array) else array
        wrong = np.logical_not(pc.match_substring_regex(array, dialect.well_quoted))
        bad |= dict.fromkeys((*quoted[wrong].tolist(), *lines.unclosed), "columns")
    for number in range(len(lines)) if has_returns else ():  # a return where Arrow would end the line
        line = lines.line(number)
        if b"\r" in line and dialect.record_quote is not None:
            line = re.sub(rb"%b[^%b]*%b" % ((re.escape(dialect.record_quote),) * 3), b"", line)
        if b"\r" in line:
            bad[number] = "text"
    if not text.isascii() and "\ufffd" in text.decode(errors="replace"):
        texts = (lines.line(number) for number in range(len(lines)))
        bad |= {number: "text" for number, raw in enumerate(texts) if raw.decode(errors="ignore").encode() != raw}
    return bad


def _read(
    text: bytes, dialect: Dialect, columns: Sequence[str], numbers: Collection[str] = ()
) -> tuple[pa.Table, NDArray[np.int64]]:
    """Parses lines; returns the columns, and the numbers of lines with a wrong number of fields, which are left out.

    Raises ArrowInvalid if a column of ``numbers`` has a value that is no number.
    """
    wrong: list[int] = []
    if not text:
        return pa.schema([(name, pa.string()) for name in columns]).empty_table(), np.zeros(0, np.int64)

    def set_aside(row: pcsv.InvalidRow) -> str:
        wrong.append(row.number - 1)
        return "skip"

    # by their places, since columns that nobody asked for may have one name
    names = [str(index) for index in range(len(dialect.columns))]
    column_numbers = [str(dialect.columns.index(name)) for name in columns]
    types = [pa.float64() if name in numbers else pa.string() for name in columns]
    quote = dialect.quote if dialect.quote is not None and dialect.quote.encode() in text else False
    for block_bytes in (_CACHED_BYTES, len(text) + 1):
        wrong.clear()
        try:
            table = pcsv.read_csv(
                pa.BufferReader(text),
                pcsv.ReadOptions(use_threads=False, block_size=block_bytes, column_names=names),
                pcsv.ParseOptions(
                    delimiter=dialect.separator,
                    quote_char=quote,
                    double_quote=bool(quote),
                    escape_char=False,
                    newlines_in_values=bool(quote) and dialect.newlines_in_values,
                    ignore_empty_lines=False,
                    invalid_row_handler=set_aside,
                ),
                pcsv.ConvertOptions(
                    include_columns=column_numbers,
                    column_types=dict(zip(column_numbers, types, strict=True)),
                    null_values=list(dialect.missing_values),
                    strings_can_be_null=True,
                    check_utf8=False,
                ),
            )
            break
        except pa.ArrowInvalid:
            if block_bytes > len(text):
                raise  # the whole text was one block, so the cause is not a line longer than a block
    return table.rename_columns(list(columns)), np.array(wrong, np.int64)


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
        for index, name in enumerate(columns):
            arrays[name], wrong = given_column([row[index] for row in values], name, self.wanted)
            bad.update(wrong)
        table, good_rows = pa.table(arrays), np.delete(np.arange(len(lines)), sorted(bad))
        rejected = tuple(RejectedRow(number, "json", lines.line(number)) for number in sorted(bad))
        return RawRows(table.take(good_rows) if bad else table, good_rows, len(lines), rejected, lines.line)


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
    for name in columns:  # numbers may have been integers with digits that a float has not
        column = pc.list_flatten(table[name]) if pa.types.is_list(table[name].type) else table[name]
        is_kept = wanted is not None and name in wanted.numbers
        if not is_kept and pa.types.is_floating(column.type) and (np.abs(column.to_numpy()) >= _EXACT).any():
            return None
    # Arrow passes over empty lines
    return table.select(list(columns)) if table.num_rows == len(lines) else None


def _arrow_type(values: Sequence[Any]) -> pa.DataType:
    """Returns the Arrow type that all values have, null without values; a KeyError for mixed or unsupported types."""
    if not values:
        return pa.null()
    entries = [entry for value in values for entry in (value if isinstance(value, list) else [value])]
    kinds = {type(entry) for entry in entries}
    if len(kinds) != 1 or len({isinstance(value, list) for value in values}) != 1:
        raise KeyError
    kind = ARROW_TYPES[kinds.pop()]
    return pa.list_(kind) if isinstance(values[0], list) else kind


@dataclass(frozen=True)
class TextLayout:
    """How a text input is read."""

    columns: tuple[str, ...]  # of JSON lines, the keys of the first lines, and keys that the schema lists
    dialect: Dialect | None  # how lines become fields; None for JSON lines
    first_row_byte: int  # number of bytes before the first row: a mark of the byte order, and a header
    header_lines: int  # number of lines before the first row
    wanted: TableColumns | None = None  # the types of columns of JSON lines; None where they may be of any
    lists: tuple[str, ...] = ()  # columns whose values are words with blanks between them, in RecBole's files
    notes: tuple[str, ...] = ()  # notes on the lines before the first row

    def block(self, text: bytes) -> RawBlock:
        return JsonBlock(text, self.wanted) if self.dialect is None else DelimitedBlock(text, self.dialect)
