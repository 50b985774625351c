"""What every kind of file gives: some rows of a table, as Arrow's columns, and what is no row, by line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distembed.data.prepare.blocks import ParsedBlock, RejectedRow
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
        """Returns the rows of the block; what is wrong with a line is never an error.

        Args:
            columns: Columns that the rows have.
            numbers: Those of which the texts are not needed where all are numbers.
        """


def parsed_block(raw: RawRows, parser: TableParser) -> ParsedBlock:
    """Returns the block of raw rows; those that the parser rejects are named by their lines."""
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
    """Lines of a text, which may lack its last newline.

    A newline between two quotation marks ``quote`` ends no line; after one that is never closed, each does.
    """

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
        """The lines from a quotation mark on that is never closed."""
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
