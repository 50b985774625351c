"""The first rows of a table, and what each of its columns holds: what a schema is guessed from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from distembed.data.prepare.blocks import Part
from distembed.data.prepare.table.inputs import PARQUET, TableInput
from distembed.data.prepare.table.parquet_rows import parquet_batches, row_group_bytes
from distembed.data.prepare.table.text_inputs import TextPart, first_bytes, text_layout
from distembed.data.table.numbers import number_values
from distembed.data.table.raw_columns import LIST, TEXT, TIME, TableColumns, one_array, plain_array, type_kind
from distembed.data.table.schema import TableSchema, TextFormat
from distembed.errors import UserError

MISSING_TEXTS = ("NA", "N/A", "NaN", "nan", "NULL", "null", "None", "\\N")
"""Texts that commonly stand for a missing value."""

_BLOCK_BYTES = 4 << 20
_MOST_EXAMPLES = 3
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


@dataclass(frozen=True)
class Sample:
    """The first rows of an input.

    Attributes:
        table: The rows, with all columns.
        text: How the input's text is read; the default one for Parquet and JSON lines.
        separator: What separates fields; None for Parquet and JSON lines.
        num_bad: Number of lines among them that are no rows.
    """

    table: pa.Table
    text: TextFormat
    separator: str | None
    num_bad: int


@dataclass(frozen=True)
class ColumnProfile:
    """What one column holds.

    Attributes:
        name: Name of the column.
        kind: Kind of its type (:mod:`distembed.data.table.raw_columns`).
        num_rows: Number of rows.
        values: The values that are there, as Arrow's array: texts, or typed.
        distinct: The distinct ones, the most frequent first.
        numbers: The values as float64, where all are finite numbers; None otherwise.
    """

    name: str
    kind: str
    num_rows: int
    values: pa.Array
    distinct: pa.Array
    numbers: np.ndarray[tuple[int], np.dtype[np.float64]] | None

    @property
    def missing_share(self) -> float:
        """Share of the rows without a value."""
        return 1 - len(self.values) / max(1, self.num_rows)

    @property
    def texts(self) -> list[str]:
        """The distinct values as texts, the most frequent first."""
        return [str(value) for value in self.distinct.cast(pa.string()).to_pylist()]

    @property
    def is_whole(self) -> bool:
        """Whether all values are whole numbers."""
        return self.numbers is not None and bool((self.numbers == np.floor(self.numbers)).all())

    @property
    def examples(self) -> list[str]:
        """The most frequent values."""
        if self.kind in (LIST, "other"):
            return [str(each) for each in self.values[:_MOST_EXAMPLES].to_pylist()]
        return self.texts[:_MOST_EXAMPLES]


def read_sample(source: TableInput, num_rows: int) -> Sample:
    """Reads about so many first rows of an input.

    Raises:
        UserError: It cannot be read, or has no rows.
    """
    if source.format == PARQUET:
        types, groups = row_group_bytes(source.place, source.raw.num_bytes)
        batches = parquet_batches(source.place, range(len(groups)), types.names, _BLOCK_BYTES)
        tables = _first(num_rows, (block.table for block, _ in batches))
        sample = Sample(_joined(source, tables), TextFormat(), None, 0)
    else:
        sample = _read_text(source, num_rows)
    if not sample.table.num_rows:
        raise UserError(f"{source.place} has no rows to guess a schema from; name a file that has some.")
    return sample


def _read_text(source: TableInput, num_rows: int) -> Sample:
    """Reads rows of text, in the dialect that the first line makes likely."""
    text = TextFormat()
    layout = None if source.is_pipe else text_layout(source, first_bytes(source), text)
    if layout is not None and layout.dialect is not None and not _is_header(layout.columns):
        text = replace(text, header=False)
        layout = text_layout(source, first_bytes(source), text)
    part = TextPart(source, Part(0), _BLOCK_BYTES, layout, partial(text_layout, text=text))
    num_bad, tables, count = 0, [], 0
    for block in part.raw_blocks():
        rows = block.rows(part.layout.columns)
        tables.append(rows.table)
        num_bad += len(rows.bad)
        count += rows.table.num_rows
        if count >= num_rows:
            break
    separator = part.layout.dialect.separator if tables and part.layout.dialect is not None else None
    return Sample(_joined(source, tables), text, separator, num_bad)


def _first(num_rows: int, tables: Iterator[pa.Table]) -> list[pa.Table]:
    """Returns tables until they have so many rows."""
    taken: list[pa.Table] = []
    for table in tables:
        taken.append(table)
        if sum(each.num_rows for each in taken) >= num_rows:
            break
    return taken


def _joined(source: TableInput, tables: Sequence[pa.Table]) -> pa.Table:
    """Returns the rows of several tables; those of JSON lines may differ in their types, and are texts then."""
    if not tables:
        raise UserError(f"{source.place} has no rows to guess a schema from; name a file that has some.")
    repeated = sorted({name for name in tables[0].column_names if tables[0].column_names.count(name) > 1})
    if repeated:
        raise UserError(f"{source.place} has several columns named {repeated[0]!r}; rename them.")
    return pa.concat_tables(tables, promote_options="permissive")


def _is_header(fields: Sequence[str]) -> bool:
    """Returns whether the fields of a first line are names: all different, none empty and none a number."""
    return len(set(fields)) == len(fields) and all(field.strip() and not _NUMBER.fullmatch(field) for field in fields)


def profiles(table: pa.Table, missing: Sequence[str]) -> list[ColumnProfile]:
    """Returns what each column of a table holds.

    Args:
        table: The rows.
        missing: Texts that stand for a missing value.
    """
    return [_profile(name, table.column(name), missing) for name in table.column_names]


def _profile(name: str, column: pa.ChunkedArray, missing: Sequence[str]) -> ColumnProfile:
    kind = type_kind(column.type) or TEXT
    values = plain_array(one_array(column))
    values = values.filter(pc.invert(values.is_null(nan_is_null=pa.types.is_floating(values.type))))
    if kind == TEXT:
        values = values.filter(pc.invert(pc.is_in(values, value_set=pa.array(missing, pa.string()))))
    if kind in (LIST, "other"):
        return ColumnProfile(name, kind, len(column), values, values[:0], None)
    counts = values.value_counts()
    order = pc.sort_indices(counts.field("counts"), sort_keys=[("", "descending")])
    distinct = counts.field("values").take(order)
    numbers = None
    if kind != TIME and len(distinct):
        found, wrong = number_values(distinct)
        numbers = None if wrong.any() else number_values(values)[0]
    return ColumnProfile(name, kind, len(column), values, distinct, numbers)


def fits(schema: TableSchema, sample: Sample) -> bool:
    """Returns whether the columns are those of a schema, by their names, or by their number without a header."""
    if not schema.text.header:
        return (
            not sample.text.header
            and sample.separator == schema.text.separator
            and sample.table.num_columns == len(schema.text.columns or [])
        )
    try:
        TableColumns(schema).require(sample.table.schema)
    except UserError:
        return False
    return sample.text.header
