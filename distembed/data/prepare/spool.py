"""Parsed blocks in files, where they wait until the vocabulary is known, so that memory stays bounded.

A file is its columns, one after the other: the numbers, then of each id column the lengths of its lists where it has
lists, codes, keys, and where keys are hashes the texts: where each begins, and their bytes. Where a column begins
follows from the block's sizes, so one column is read without the rest, and without a header (an Arrow file for each
block took 0.6 ms to open, a seventh of the whole preparation).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distembed.data.jagged import Jagged
from distembed.data.prepare.blocks import BlockLayout, ParsedBlock, code_dtype

_LENGTH, _TEXT_OFFSET, _BYTE = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class SpooledBlock:
    """The columns of a block in a file; a terabyte has 65,000 blocks, which are all in memory."""

    path: Path
    index: int  # among the blocks with rows
    first_row: int  # number of well-formed rows before the block, over all inputs
    sizes: NDArray[np.int64]  # rows; then keys, values, and bytes of the texts of each id column, ``[1 + 3 * ids]``
    layout: BlockLayout

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return int(self.sizes[0])

    @property
    def stop_row(self) -> int:
        """Number of well-formed rows up to the block's end."""
        return self.first_row + self.num_rows

    @property
    def num_bytes(self) -> int:
        """Size of the file in bytes."""
        return self._numbers_offset(len(self.layout.numbers)) + sum(map(sum, self._part_bytes(len(self.layout.ids))))

    def num_keys(self, column: int) -> int:
        """Returns the number of keys of an id column, ``keys[0]`` included."""
        return int(self.sizes[1 + 3 * column])

    def num_values(self, column: int) -> int:
        """Returns the number of values of an id column: that of the rows, but for lists."""
        return int(self.sizes[2 + 3 * column])

    def numbers(self, column: int) -> NDArray[Any]:
        """Reads a column of numbers, in which missing values are NaN."""
        return self._read(self.layout.numbers[column].dtype, self.num_rows, self._numbers_offset(column))

    def codes(self, column: int) -> NDArray[Any]:
        """Reads the codes of an id column's values; of lists, of all rows end to end."""
        return self._read(code_dtype(self.num_keys(column)), self.num_values(column), self._offset(column, 1))

    def lists(self, column: int) -> Jagged:
        """Reads the codes of a column of lists."""
        return Jagged.from_lengths(self.codes(column), self._read(_LENGTH, self.num_rows, self._offset(column, 0)))

    def keys(self, column: int) -> NDArray[Any]:
        """Reads the keys of an id column; code c stands for ``keys[c]``, and 0 for a missing value."""
        return self._read(self.layout.ids[column].key_dtype, self.num_keys(column), self._offset(column, 2))

    def texts(self, column: int) -> pa.Array | None:
        """Reads the text of each key, as Arrow's large string; None where keys are no hashes."""
        if self.layout.ids[column].kind != "string":
            return None
        offsets = self._read(_TEXT_OFFSET, self.num_keys(column) + 1, self._offset(column, 3))
        texts = self._read(_BYTE, int(self.sizes[3 + 3 * column]), self._offset(column, 4))
        return pa.LargeStringArray.from_buffers(len(offsets) - 1, pa.py_buffer(offsets), pa.py_buffer(texts))

    def _numbers_offset(self, column: int) -> int:
        """Returns the byte where a column of numbers begins."""
        return self.num_rows * sum(each.dtype.itemsize for each in self.layout.numbers[:column])

    def _offset(self, column: int, part: int) -> int:
        """Returns the byte where a part of an id column begins: lengths, codes, keys, where texts begin, texts."""
        *before, own = self._part_bytes(column + 1)
        return self._numbers_offset(len(self.layout.numbers)) + sum(map(sum, before)) + sum(own[:part])

    def _part_bytes(self, count: int) -> Iterator[tuple[int, int, int, int, int]]:
        """Yields the bytes of each part of the first id columns."""
        num_rows, *sizes = self.sizes[: 1 + 3 * count].tolist()
        for place, column in enumerate(self.layout.ids[:count]):
            keys, values, text_bytes = sizes[3 * place : 3 * place + 3]
            yield (
                num_rows * 4 if column.is_list else 0,
                values * (1 if keys <= 1 << 8 else 2 if keys <= 1 << 16 else 4),
                keys * (4 if column.kind == "hexadecimal" else 8),
                (keys + 1) * 8 if column.kind == "string" else 0,
                text_bytes,
            )

    def _read(self, dtype: np.dtype[Any], count: int, offset: int) -> NDArray[Any]:
        return np.fromfile(self.path, dtype, count, offset=offset)


def write_block(path: Path, block: ParsedBlock, layout: BlockLayout) -> list[int]:
    """Writes a block's columns to a file, and returns its sizes."""
    sizes = [block.num_rows]
    with open(path, "wb") as file:
        for number, values in zip(layout.numbers, block.numbers, strict=True):
            _write(file, values, number.dtype)
        for column, ids in zip(layout.ids, block.ids, strict=True):
            text_bytes = 0
            if ids.lengths is not None:
                _write(file, ids.lengths, _LENGTH)
            _write(file, ids.codes, code_dtype(len(ids.keys)))
            _write(file, ids.keys, column.key_dtype)
            if column.kind == "string":
                offsets, texts = _text_buffers(ids.texts)
                _write(file, offsets, _TEXT_OFFSET)
                _write(file, texts, _BYTE)
                text_bytes = len(texts)
            sizes += [len(ids.keys), len(ids.codes), text_bytes]
    return sizes


def _write(file: BinaryIO, values: NDArray[Any], dtype: np.dtype[Any]) -> None:
    file.write(np.ascontiguousarray(values, dtype).data)  # unlike tofile, it says why it fails


def _text_buffers(texts: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Returns the place in bytes at which each text begins and the last one ends, and the bytes of all texts."""
    texts = texts.cast(pa.large_string())
    _, offsets, data = texts.buffers()
    places = np.frombuffer(offsets or bytes(8), np.int64)[texts.offset : texts.offset + len(texts) + 1]
    return places - places[0], np.frombuffer(data or b"", np.uint8)[places[0] : places[-1]]
