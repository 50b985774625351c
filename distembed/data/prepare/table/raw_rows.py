"""What every kind of file gives: some rows of a table, as Arrow's columns, and what is no row, by line."""

from __future__ import annotations

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
    """Rows of one block.

    Attributes:
        table: The columns that were asked for, texts or of Arrow's types.
        lines: Number of the line of each row in the block, from 0, int64.
        num_lines: Number of lines of the block, those of no row included.
        bad: What is no row of the table, in order.
        line_text: Returns the bytes of a line; None where rows are no lines.
    """

    table: pa.Table
    lines: NDArray[np.int64]
    num_lines: int
    bad: tuple[RejectedRow, ...] = ()
    line_text: Callable[[int], bytes] | None = None


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
    return ParsedBlock(
        num_lines=raw.num_lines,
        num_rows=block.num_rows,
        numbers=block.numbers,
        ids=block.ids,
        rejected=tuple(sorted(rejected, key=lambda row: row.line)),
    )


@dataclass(frozen=True)
class Lines:
    """Lines of a text, which may lack its last newline.

    Attributes:
        text: The text.
        quote: A quotation mark between two of which a newline ends no line; None where each newline does. After one
            that is never closed, each does.
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
