"""Raw rows of a block of any file: Arrow columns, and the lines that are no rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from distembed.base.errors import UserError
from distembed.data.remote import is_url, open_remote
from distembed.data.table.blocks import ParsedBlock, RejectedRow
from distembed.data.table.parser import TableParser


@dataclass(frozen=True)
class RawRows:
    """Rows of one block."""

    table: pa.Table  # the columns that were asked for, texts or of Arrow's types
    lines: NDArray[np.int64]  # number of the line of each row in the block, from 0
    num_lines: int  # those that are no rows included
    bad: tuple[RejectedRow, ...] = ()  # the lines that are no rows, in order
    line_text: Callable[[int], bytes] | None = None  # returns the bytes of a line; None where rows are no lines


class RawBlock(Protocol):
    """A block of a file as it was read, which any thread can turn into rows."""

    def rows(self, columns: Sequence[str], numbers: Collection[str] = ()) -> RawRows:
        """Returns the rows of the block; a malformed line is never an error."""


def parsed_block(raw: RawRows, parser: TableParser) -> ParsedBlock:
    """Returns the block of raw rows; rows that the parser rejects are named by their lines."""
    block = parser.parse(raw.table)
    rejected = list(raw.bad)
    for row in block.rejected:
        line = int(raw.lines[row.line])
        rejected.append(RejectedRow(line, row.reason, raw.line_text(line) if raw.line_text else row.text))
    return dataclasses.replace(
        block, num_lines=raw.num_lines, rejected=tuple(sorted(rejected, key=lambda row: row.line))
    )


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
        """Returns the text without some lines, which are given in order."""
        kept, start = [], 0
        for number in numbers:
            kept.append(self.text[start : int(self.ends[number - 1]) if number else 0])
            start = int(self.ends[number])
        return b"".join([*kept, self.text[start:]])


_BYTES_A_VALUE = 8
"""Memory that a value takes at least, however often it is repeated in the file."""


@dataclass(frozen=True)
class ParquetBlock:
    """Some rows of a Parquet file."""

    table: pa.Table

    def rows(self, columns: Sequence[str], numbers: Collection[str] = ()) -> RawRows:
        return RawRows(self.table.select(list(columns)), np.arange(self.table.num_rows), self.table.num_rows)


@contextmanager
def opened_parquet(place: str) -> Iterator[pq.ParquetFile]:
    """Yields the Parquet file of a path or a URL; that it cannot be read, or is damaged, is a UserError."""
    try:
        source: Any = open_remote(place) if is_url(place) else Path(place)
        with pq.ParquetFile(source, pre_buffer=False) as file:  # which would hold whole row groups
            yield file
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{place} cannot be read as Parquet: {error}; write it again.") from error


def parquet_batches(
    place: str, groups: Sequence[int], columns: Sequence[str], block_bytes: int
) -> Iterator[tuple[ParquetBlock, float]]:
    """Yields rows of some row groups, ``block_bytes`` in memory, with the share of the rows read so far."""
    with opened_parquet(place) as file:
        described = [file.metadata.row_group(group) for group in groups]
        num_rows, done = sum(group.num_rows for group in described), 0
        encoded = sum(group.total_byte_size for group in described) / max(1, num_rows)
        batch_rows = max(1, int(block_bytes / max(1.0, encoded, _BYTES_A_VALUE * len(columns))))
        for batch in file.iter_batches(batch_rows, row_groups=list(groups), columns=list(columns), use_threads=False):
            done += batch.num_rows
            yield ParquetBlock(pa.table(batch)), done / num_rows


def row_group_bytes(place: str, num_bytes: int | None) -> tuple[pa.Schema, list[int]]:
    """Returns a file's columns, and about how many of its ``num_bytes`` each row group has."""
    with opened_parquet(place) as file:
        sizes = [file.metadata.row_group(number).total_byte_size for number in range(file.metadata.num_row_groups)]
        total = sum(sizes)
        if num_bytes is not None and total > 0:
            sizes = [size * num_bytes // total for size in sizes]
        return file.schema_arrow, sizes
