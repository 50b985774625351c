"""Rows of named columns, read once and in order: the reader of interactions and of graphs.

Files, folders, patterns, URLs and pipes are read as the inputs of a table are (``source.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from distembed.data.dataset.manifest import SourceFile
from distembed.data.prepare.options import ProgressCallback, ProgressUpdate
from distembed.data.prepare.row_source import Part
from distembed.data.prepare.table.inputs import TableInput
from distembed.data.prepare.table.raw_rows import RawBlock, RawRows
from distembed.data.prepare.table.source import TableSource, TextPart
from distembed.data.table.blocks import RejectedRow
from distembed.data.table.parser import row_text
from distembed.data.table.schema import TableSchema


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
        return len(self.lines) + len(self.bad)

    def text(self, row: int) -> bytes:
        """Returns the line of a row; its values with tabs between them where rows are no lines."""
        if self.raw.line_text is not None:
            return self.raw.line_text(int(self.raw.lines[row]))
        return row_text(self.columns, row)


class RowReader:
    """Reads the columns of a schema from inputs, in order."""

    def __init__(self, inputs: Sequence[TableInput], schema: TableSchema) -> None:
        self.inputs = list(inputs)
        self.num_lines = [0] * len(inputs)  # number of rows and bad lines read so far
        self._checksums: list[tuple[int, str]] = []
        self._source = TableSource(inputs, schema, wanted_by="the command")

    def blocks(self, block_bytes: int, report: ProgressCallback) -> Iterator[NamedRows]:
        """Yields all rows in blocks of about so many bytes of text, and reports each after it has been dealt with."""
        sizes = [each.raw.num_bytes for each in self.inputs]
        total = None if None in sizes else sum(size or 0 for size in sizes)
        for number, each in enumerate(self.inputs):
            before = sum(size for size, _ in self._checksums)
            opened, lines_before = self._source.open(Part(number), block_bytes), 0
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
