"""The first rows of a table, and facts about each of its columns: the basis of a guessed schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from distembed.base.errors import UserError
from distembed.data.prepare.blocks import RejectedRow
from distembed.data.prepare.input_bytes import InputBytes
from distembed.data.prepare.table.inputs import PARQUET, TableInput
from distembed.data.prepare.table.parquet_rows import opened_parquet
from distembed.data.prepare.table.text_inputs import text_layout
from distembed.data.table.numbers import number_values
from distembed.data.table.raw_columns import LIST, TEXT, TIME, TableColumns, one_array, plain_array, type_kind
from distembed.data.table.schema import TableSchema, TextFormat

MISSING_TEXTS = ("NA", "N/A", "#N/A", "<NA>", "NaN", "nan", "NULL", "null", "None", "\\N", "?", "-")
"""Texts that commonly stand for a missing value."""

_FIRST_BYTES = 1 << 20  # of a text, which are read to learn its dialect
_MOST_BYTES = 64 << 20
_BATCH_ROWS = 8192
_SEPARATORS = "\t,;|: "
_LEAST_SHARE = 0.9  # of the first lines, which a dialect has to read as rows


@dataclass(frozen=True)
class Sample:
    """The first rows of an input."""

    name: str
    table: pa.Table  # with all columns; those of objects in JSON are null
    text: TextFormat = field(default_factory=TextFormat)
    separator: str | None = None  # of fields; None for Parquet and JSON lines
    bad: Sequence[RejectedRow] = ()  # lines among the rows that are no rows

    def fits(self, schema: TableSchema) -> bool:
        """Returns whether a schema has the same columns, by name, or by number without a header."""
        if schema.text.header != self.text.header:
            return False
        if not self.text.header:
            return (self.separator, self.table.num_columns) == (schema.text.separator, len(schema.text.columns or []))
        return set(TableColumns(schema).names) <= set(self.table.column_names)


@dataclass(frozen=True)
class ColumnProfile:
    """Facts about one column."""

    name: str
    kind: str  # of its type (raw_columns.py)
    rows: pa.Array  # a value for each row, texts or typed, null where it is missing
    distinct: pa.Array  # the most frequent first; empty for lists
    numbers: NDArray[np.float64] | None  # the values that are not missing, where all are finite numbers

    @classmethod
    def of(cls, name: str, column: pa.ChunkedArray, missing: Sequence[str]) -> ColumnProfile:
        """Returns the facts about a column, given the texts that stand for a missing value."""
        kind = type_kind(column.type) or TEXT
        rows = plain_array(one_array(column))
        is_missing = rows.is_null(nan_is_null=pa.types.is_floating(rows.type))
        if kind == TEXT:
            is_missing = pc.or_(is_missing, pc.is_in(rows, value_set=pa.array(missing, rows.type)))
        if kind == "other":
            return cls(name, kind, rows, rows[:0], None)
        rows = pc.if_else(is_missing, pa.scalar(None, rows.type), rows)
        if kind == LIST:
            return cls(name, kind, rows, rows[:0], None)
        values = rows.drop_null()
        counts = values.value_counts()
        distinct = counts.field("values").take(pc.sort_indices(counts.field("counts"), sort_keys=[("", "descending")]))
        numbers, wrong = number_values(values) if kind != TIME and len(values) else (None, np.ones(1, bool))
        return cls(name, kind, rows, distinct, None if wrong.any() else numbers)

    @property
    def missing_share(self) -> float:
        """Share of the rows without a value."""
        return float(self.rows.null_count / max(1, len(self.rows)))

    @property
    def texts(self) -> list[str]:
        """The distinct values as texts, the most frequent first."""
        return [str(value) for value in self.distinct.cast(pa.string()).to_pylist()] if len(self.distinct) else []

    @property
    def is_whole(self) -> bool:
        """Whether all values are whole numbers."""
        return self.numbers is not None and bool((self.numbers == np.floor(self.numbers)).all())


def read_sample(inputs: Sequence[TableInput], num_rows: int) -> Sample:
    """Reads about ``num_rows`` rows of the first input that has rows.

    Raises:
        UserError: An input cannot be read, its lines are no rows, or no input has rows.
    """
    for source in inputs:
        sample = (_read_parquet if source.format == PARQUET else _read_text)(source, num_rows)
        names = sample.table.column_names
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise UserError(f"{source.place} has several columns named {repeated[0]!r}; rename them.")
        if sample.table.num_rows:
            return sample
    raise UserError(
        f"{inputs[0].place} has no rows to guess a schema from; name a file that has some, on lines that end in \\n."
    )


def _read_parquet(source: TableInput, num_rows: int) -> Sample:
    with opened_parquet(source.place) as file:
        batches, num_read = [], 0
        for batch in file.iter_batches(_BATCH_ROWS, use_threads=False):
            batches.append(batch)
            num_read += batch.num_rows
            if num_read >= num_rows:
                break
        return Sample(source.raw.name, pa.Table.from_batches(batches, file.schema_arrow))


def _read_text(source: TableInput, num_rows: int) -> Sample:
    lines = b""
    for piece in InputBytes(source.place).pieces():
        lines += piece
        if lines.count(b"\n") > num_rows or len(lines) > _MOST_BYTES:
            lines = lines[: lines.rfind(b"\n") + 1] or lines
            break
    if not lines.strip():
        return Sample(source.raw.name, pa.table({}))
    first = lines[:_FIRST_BYTES]
    text = _text_format(source, first)
    layout = text_layout(source, first, text)
    block, names, objects = layout.block(lines[layout.first_row_byte :]), layout.columns, []
    if layout.dialect is None and first.count(b"{") > first.count(b"\n") + 1:
        num_bad = {name: len(layout.block(first).rows([name]).bad) for name in names}
        objects = [name for name in names if num_bad[name] > min(num_bad.values())]
    rows = block.rows([name for name in names if name not in objects])
    table = rows.table
    for name in objects:
        table = table.append_column(name, pa.nulls(table.num_rows, pa.struct([])))
    bad = [each for each in rows.bad if len(rows.lines) and each.line < rows.lines[-1]]  # the last line may be cut
    return Sample(source.raw.name, table, text, layout.dialect.separator if layout.dialect is not None else None, bad)


def _text_format(source: TableInput, first: bytes) -> TextFormat:
    """Returns the separator, quotation mark and header with which most of the first lines are rows."""
    usual = text_layout(source, first, TextFormat(header=False))
    if usual.dialect is None:
        return TextFormat()
    lines = first[usual.first_row_byte : first.rfind(b"\n") + 1] or first[usual.first_row_byte :]
    decoded = lines.decode(errors="replace").splitlines()
    encoding = "UTF-16LE" if lines[1:2] == b"\0" else "UTF-16BE" if lines[:1] == b"\0" else "WINDOWS-1252"
    if encoding != "WINDOWS-1252" or sum("\ufffd" in line for line in decoded) > 0.01 * len(decoded):
        raise UserError(
            f"{source.place} is not text in UTF-8, but perhaps in {encoding}{' (Latin-1)' * (encoding[0] == 'W')}: "
            f"convert it, such as with `iconv -f {encoding} -t UTF-8`"
        )
    most, chosen, found = _LEAST_SHARE, TextFormat(header=False), None
    for separator in dict.fromkeys((usual.dialect.separator, *_SEPARATORS)):
        text = TextFormat(header=False, separator=None if separator == usual.dialect.separator else separator)
        dialects = [text, replace(text, newlines_in_values=True), replace(text, quote=None)]
        # marks around fields are more than lines
        for text in dialects[: 1 if b'"' not in lines else 3 if lines.count(b'"') < len(decoded) else 2]:
            layout = text_layout(source, first, text)
            rows = layout.block(lines).rows(layout.columns)
            if len(layout.columns) > 1 and rows.table.num_rows > most * rows.num_lines:
                most, chosen, found = rows.table.num_rows / rows.num_lines, text, rows
    if found is None and sum(any(mark in line for mark in _SEPARATORS) for line in decoded) > len(decoded) / 2:
        raise UserError(
            f"no separator, of tab , ; | : and blank, gives most lines of {source.place} as many fields as the first "
            f"one has, {decoded[0][:80]!r}: remove lines above the names, and convert other separators, such as with "
            "`tr -s ' '` for several blanks or `sed 's/::/\\t/g'`"
        )
    found = found or usual.block(lines).rows(usual.columns)
    return replace(chosen, header=not len(found.lines) or found.lines[0] > 0 or _is_header(found.table))


def _is_header(table: pa.Table) -> bool:
    """Returns whether a first row has names: they stand above numbers, or are texts that the rows do not have."""
    names, rows = [str(column[0].as_py() or "") for column in table.columns], table.slice(1)
    if names == [str(number) for number in range(len(names))]:  # as pandas names columns without names
        return True
    is_number = [not number_values(pa.array([name]))[1][0] for name in names]
    for name, named_number, column in zip(names, is_number, rows.columns, strict=True):
        values = column.filter(pc.invert(pc.is_in(column, value_set=pa.array([None, *MISSING_TEXTS], pa.string()))))
        # nearly all: files that were put together have several headers
        wrong = number_values(one_array(values))[1]
        if name not in ("", *MISSING_TEXTS) and not named_number and len(wrong) > 0 and wrong.mean() <= 0.1:
            return True
    recurs = any(name and name in column.unique().to_pylist() for name, column in zip(names, rows.columns, strict=True))
    return not (recurs or any(is_number) or names.count("") > 1)
