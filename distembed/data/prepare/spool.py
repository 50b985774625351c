"""Parsed blocks in files, where they wait until the vocabulary is known, so that memory stays bounded.

A file is the arrays of a block, one after the other: the numbers, then of each id column the lengths of its lists where
it has lists, codes, keys, and where keys are hashes the texts: where each begins, and their bytes. Where each array
begins is kept in memory, so one is read without the rest, and without a header (an Arrow file for each block took 0.6
ms to open, a seventh of the whole preparation).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike, NDArray

from distembed.data.jagged import Jagged
from distembed.data.prepare.blocks import BlockLayout, ParsedBlock, code_dtype


@dataclass(frozen=True, slots=True, eq=False)
class SpooledBlock:
    """The columns of a block in a file; a terabyte has 65,000 blocks, which are all in memory."""

    path: Path
    index: int  # among the blocks with rows
    first_row: int  # number of well-formed rows before the block, over all inputs
    num_rows: int
    starts: NDArray[np.int64]  # byte at which each array begins, and the last one ends
    layout: BlockLayout

    @property
    def stop_row(self) -> int:
        """Number of well-formed rows up to the block's end."""
        return self.first_row + self.num_rows

    @property
    def num_bytes(self) -> int:
        """Size of the file in bytes."""
        return int(self.starts[-1])

    def num_keys(self, column: int) -> int:
        """Returns the number of keys of an id column, ``keys[0]`` included."""
        start, stop = self._range("keys", column)
        return (stop - start) // self.layout.ids[column].key_dtype.itemsize

    def num_values(self, column: int) -> int:
        """Returns the number of values of an id column: that of the rows, but for lists."""
        start, stop = self._range("codes", column)
        return (stop - start) // code_dtype(self.num_keys(column)).itemsize

    def numbers(self, column: int) -> NDArray[Any]:
        """Reads a column of numbers, in which missing values are NaN."""
        return self._read("numbers", column, self.layout.numbers[column].dtype)

    def codes(self, column: int) -> NDArray[Any]:
        """Reads the codes of an id column's values; of lists, of all rows end to end."""
        return self._read("codes", column, code_dtype(self.num_keys(column)))

    def lists(self, column: int) -> Jagged:
        """Reads the codes of a column of lists."""
        return Jagged.from_lengths(self.codes(column), self.lengths(column))

    def lengths(self, column: int) -> NDArray[Any]:
        """Reads the number of values of each row, of a column of lists."""
        return self._read("lengths", column, np.int32)

    def keys(self, column: int) -> NDArray[Any]:
        """Reads the keys of an id column; code c stands for ``keys[c]``, and 0 for a missing value."""
        return self._read("keys", column, self.layout.ids[column].key_dtype)

    def texts(self, column: int) -> pa.Array | None:
        """Reads the text of each key, as Arrow's large string; None where keys are no hashes."""
        if self.layout.ids[column].kind != "string":
            return None
        buffers = [pa.py_buffer(self._read(kind, column, np.uint8)) for kind in ("offsets", "texts")]
        return pa.LargeStringArray.from_buffers(self.num_keys(column), *buffers)

    def _range(self, kind: str, column: int) -> tuple[int, int]:
        """Returns the bytes ``[start, stop)`` of an array."""
        place = self.layout.arrays[kind, column]
        return int(self.starts[place]), int(self.starts[place + 1])

    def _read(self, kind: str, column: int, dtype: DTypeLike) -> NDArray[Any]:
        start, stop = self._range(kind, column)
        return np.fromfile(self.path, dtype, (stop - start) // np.dtype(dtype).itemsize, offset=start)


def write_block(path: Path, block: ParsedBlock, layout: BlockLayout) -> list[int]:
    """Writes a block's columns to a file, and returns where each array begins and the last one ends."""
    arrays = [np.asarray(values, number.dtype) for number, values in zip(layout.numbers, block.numbers, strict=True)]
    for column, ids in zip(layout.ids, block.ids, strict=True):
        if ids.lengths is not None:
            arrays.append(ids.lengths.astype(np.int32))
        arrays += [np.asarray(ids.codes, code_dtype(len(ids.keys))), np.asarray(ids.keys, column.key_dtype)]
        if column.kind == "string":
            arrays += _text_buffers(ids.texts)
    with open(path, "wb") as file:
        for array in arrays:
            file.write(np.ascontiguousarray(array).data)  # unlike tofile, it says why it fails
    return np.cumsum([0, *(array.nbytes for array in arrays)]).tolist()


def _text_buffers(texts: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Returns the place in bytes at which each text begins and the last one ends, and the bytes of all texts."""
    texts = texts.cast(pa.large_string())
    _, offsets, data = texts.buffers()
    places = np.frombuffer(offsets or bytes(8), np.int64)[texts.offset : texts.offset + len(texts) + 1]
    return places - places[0], np.frombuffer(data or b"", np.uint8)[places[0] : places[-1]]
