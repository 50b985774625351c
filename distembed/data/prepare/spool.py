"""Parsed blocks in files, where they wait until the vocabulary is known, so that memory stays bounded.

A file is its columns' numbers, one column after the other: label, dense, then codes and keys of each id column. Where a
column begins follows from the numbers of rows and keys, so one column is read without the rest, and without a header
(an Arrow file for each block took 0.6 ms to open, a seventh of the whole preparation).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distembed.data.dataset.schema import CRITEO_DENSE
from distembed.data.prepare.blocks import ParsedBlock, code_dtype


@dataclass(frozen=True)
class SpooledBlock:
    """Where a parsed block lies, and which rows it holds.

    Attributes:
        path: File that holds the columns.
        index: Number of the block among those with rows.
        first_row: Number of well-formed rows before the block, over all input files.
        num_rows: Number of rows in the block.
        num_keys: Number of keys of each id column.
    """

    path: Path
    index: int
    first_row: int
    num_rows: int
    num_keys: tuple[int, ...]

    @property
    def stop_row(self) -> int:
        """Number of well-formed rows up to the block's end."""
        return self.first_row + self.num_rows

    @property
    def num_bytes(self) -> int:
        """Size of the file in bytes."""
        return self._offset(len(self.num_keys))

    def labels(self) -> NDArray[np.int8]:
        """Reads the labels, 0 or 1."""
        return self._read(np.dtype(np.int8), self.num_rows, 0)

    def dense(self, column: int) -> NDArray[np.float32]:
        """Reads a dense column, in which missing values are NaN."""
        return self._read(np.dtype(np.float32), self.num_rows, self.num_rows * (1 + 4 * column))

    def codes(self, feature: int) -> NDArray[Any]:
        """Reads the codes of an id column."""
        return self._read(code_dtype(self.num_keys[feature]), self.num_rows, self._offset(feature))

    def keys(self, feature: int) -> NDArray[np.uint32]:
        """Reads the keys of an id column; code c stands for ``keys[c]``, and 0 for a missing value."""
        codes_bytes = self.num_rows * code_dtype(self.num_keys[feature]).itemsize
        return self._read(np.dtype(np.uint32), self.num_keys[feature], self._offset(feature) + codes_bytes)

    def _offset(self, feature: int) -> int:
        """Returns the byte where the codes of an id column begin."""
        before = sum(self.num_rows * code_dtype(keys).itemsize + 4 * keys for keys in self.num_keys[:feature])
        return self.num_rows * (1 + 4 * len(CRITEO_DENSE)) + before

    def _read(self, dtype: np.dtype[Any], count: int, offset: int) -> NDArray[Any]:
        return np.fromfile(self.path, dtype, count, offset=offset)


def write_block(path: Path, block: ParsedBlock) -> None:
    """Writes a block's columns to a file."""
    with open(path, "wb") as file:
        for column in _columns(block):
            file.write(np.ascontiguousarray(column).data)  # unlike tofile, it says why it fails


def spooled_bytes(block: ParsedBlock) -> int:
    """Returns the size of the file that :func:`write_block` writes."""
    return sum(column.nbytes for column in _columns(block))


def _columns(block: ParsedBlock) -> Iterator[NDArray[Any]]:
    yield from block.numbers
    for ids in block.ids:
        yield ids.codes
        yield ids.keys


def blocks_within(blocks: Sequence[SpooledBlock], start: int, stop: int) -> Sequence[SpooledBlock]:
    """Returns the blocks that hold any of the rows ``[start, stop)``; all are in the order of their rows."""
    stops = np.array([block.stop_row for block in blocks], np.int64)
    starts = np.array([block.first_row for block in blocks], np.int64)
    return blocks[int(np.searchsorted(stops, start, "right")) : int(np.searchsorted(starts, stop, "left"))]
