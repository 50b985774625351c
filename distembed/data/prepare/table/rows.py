"""Rows of named columns, read once and in order: the reader of interactions and of graphs.

Files, folders, patterns, URLs and pipes are read as the inputs of a table are (``source.py``). A JSON file may also be
one object of lists: ``{"a": [1, 2]}`` has the rows ``a 1`` and ``a 2`` of two columns.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import SourceFile
from distembed.data.prepare.input_bytes import InputBytes
from distembed.data.prepare.options import ProgressCallback, ProgressUpdate
from distembed.data.prepare.table.inputs import JSON_LINES, TableInput
from distembed.data.prepare.table.raw_rows import ParquetBlock, RawBlock, RawRows
from distembed.data.prepare.table.source import TableSource, TextPart, first_bytes
from distembed.data.prepare.table.text_rows import keys_of_lines
from distembed.data.table.blocks import RejectedRow
from distembed.data.table.parser import row_text
from distembed.data.table.schema import TableSchema

_WHOLE_INPUT = 1 << 62
_MOST_JSON_BYTES = 1 << 28
"""Size of the largest object of lists, which is in memory as a whole."""
_LIST_FIRST = re.compile(rb'\s*\{\s*"(?:[^"\\]|\\.)*"\s*:\s*\[')


@dataclass(frozen=True)
class NamedRows:
    """Rows of an input."""

    source: int  # number of the input
    columns: Mapping[str, pa.Array]  # by name: plain arrays, or a dictionary's where the schema has single keys
    lines: NDArray[np.int64]  # number of the line of each row in the input, from 1; in Parquet, of the row
    bad: tuple[RejectedRow, ...]  # lines that are no rows, with their numbers in the input
    raw: RawRows  # the rows as they were read

    @property
    def num_lines(self) -> int:
        """Number of rows and bad lines."""
        return len(self.lines) + len(self.bad)

    def text(self, row: int) -> bytes:
        """Returns the line of a row; its values with tabs between them where rows are no lines."""
        if self.raw.line_text is not None:
            return self.raw.line_text(int(self.raw.lines[row]))
        return row_text(self.columns, row)


class RowReader:
    """Reads the columns of a schema from inputs; an input that lacks one, or cannot be read, is a UserError.

    Files whose lines have one value each are a text column with a separator that no line has.
    """

    def __init__(self, inputs: Sequence[TableInput], schema: TableSchema) -> None:
        self.inputs = list(inputs)
        self.num_lines = [0] * len(inputs)  # number of rows and bad lines read so far
        self._checksums: list[tuple[int, str]] = []
        is_pair = len(schema.categorical) == 2 and not schema.dense and schema.time is None
        self._objects = {n for n, each in enumerate(inputs) if is_pair and _is_object_of_lists(each, schema)}
        rows = [each for n, each in enumerate(inputs) if n not in self._objects]
        self._source = TableSource(rows, schema, wanted_by="the command")

    def blocks(self, block_bytes: int, report: ProgressCallback) -> Iterator[NamedRows]:
        """Yields all rows in blocks of about so many bytes of text, and reports each after it has been dealt with."""
        sizes = [each.raw.num_bytes for each in self.inputs]
        total = None if None in sizes else sum(size or 0 for size in sizes)
        parts = iter(self._source.parts(_WHOLE_INPUT))
        for number, each in enumerate(self.inputs):
            before = sum(size for size, _ in self._checksums)
            if number in self._objects:
                table, size, checksum = _object_of_lists(each, self._source.columns)
                yield self._named(number, ParquetBlock(table), 0)
                self._checksums.append((size, checksum))
                continue
            opened, lines_before = self._source.open(next(parts), block_bytes), 0
            for raw in opened.raw_blocks():
                lists = opened.lists if isinstance(opened, TextPart) else ()
                rows = self._named(number, raw, lines_before + opened.header_lines, lists)
                yield rows
                lines_before += rows.raw.num_lines
                report(ProgressUpdate("read", before + opened.bytes_read, total, sum(self.num_lines)))
            size = opened.bytes_read if each.raw.num_bytes is None else each.raw.num_bytes
            self._checksums.append((size, opened.sha256 or ""))

    def sources(self, num_rejected: Sequence[int] | None = None) -> tuple[SourceFile, ...]:
        """Returns a manifest's entries of the inputs, once all rows were read; none is malformed unless given."""
        counts = zip(self.inputs, self._checksums, self.num_lines, num_rejected or [0] * len(self.inputs), strict=True)
        return tuple(SourceFile(each.raw.name, *checksum, *numbers) for each, checksum, *numbers in counts)

    def _named(self, number: int, block: RawBlock, lines_before: int, lists: Sequence[str] = ()) -> NamedRows:
        """Returns the rows of a block; an empty line is none. Columns of ``lists`` have texts of several words."""
        wanted = self._source.parser.columns
        raw = block.rows(self._source.columns, wanted.numbers)
        bad = tuple(replace(row, line=lines_before + row.line + 1) for row in raw.bad if row.text.strip())
        found = wanted.taken_from(raw.table)
        found |= {name: pc.ascii_split_whitespace(found[name]) for name in lists if name in wanted.separators}
        rows = NamedRows(number, found, raw.lines + lines_before + 1, bad, raw)
        self.num_lines[number] += rows.num_lines
        return rows


def _is_object_of_lists(given: TableInput, schema: TableSchema) -> bool:
    """Returns whether the first lines of a JSON file are no objects with a value for a column."""
    if given.format != JSON_LINES or given.is_pipe:
        return False
    first = first_bytes(given).removeprefix(codecs.BOM_UTF8)
    keys = keys_of_lines(first[: first.rfind(b"\n") + 1 or len(first)])
    if any(column in keys for (column,) in schema.categorical_columns.values()):
        return False
    try:
        value = json.loads(first.partition(b"\n")[0])
    except (ValueError, RecursionError):
        return not keys or _LIST_FIRST.match(first) is not None
    return not keys or isinstance(value, dict) and all(isinstance(entries, list) for entries in value.values())


def _object_of_lists(given: TableInput, columns: Sequence[str]) -> tuple[pa.Table, int, str]:
    """Returns the rows of a JSON object of lists, and the size and the checksum of the input."""
    place, whole = given.place, InputBytes(given.place)
    text = bytearray()
    for piece in whole.pieces():
        text += piece
        if len(text) > _MOST_JSON_BYTES:
            raise UserError(f"{place} has more than {_MOST_JSON_BYTES:,} bytes of JSON; give its rows as JSON lines")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{place} is neither JSON lines nor one JSON value ({error}); write one object a line"
        ) from error
    lists = value.items() if isinstance(value, dict) else ()
    if not lists or not all(isinstance(entries, list) for _, entries in lists):
        raise UserError(
            f'{place} is no JSON object of lists, such as {{"item": [1, 2]}}, and no JSON lines, which have an object '
            "on each line; write a list of objects so, such as with `jq -c '.[]'`"
        )
    rows = [(key, entry) for key, entries in lists for entry in entries]
    odd = next((f"{key!r}: {entry!r}" for key, entry in rows if type(entry) not in (int, str)), None)
    if odd is not None:
        raise UserError(f"{place} has {odd} in a list; entries must be integers or texts")
    texts = [pa.array([str(row[column]) for row in rows], pa.string()) for column in (0, 1)]
    return pa.table(texts, names=list(columns)), whole.bytes_read, whole.sha256
