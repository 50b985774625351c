"""Parsed blocks in files, where they wait until the vocabulary is known, so that memory stays bounded.

A file is its columns, one after the other: those of numbers, then of each id column the lengths of its lists where it
has lists, codes, keys, and where keys are hashes the texts: where each begins, and their bytes. Where a column begins
follows from the block's shape, so one column is read without the rest, and without a header (an Arrow file for each
block took 0.6 ms to open, a seventh of the whole preparation).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distembed.data.jagged import Jagged
from distembed.data.prepare.blocks import BlockLayout, KeyColumn, ParsedBlock, code_dtype

_LENGTH, _TEXT_OFFSET = np.dtype(np.int32), np.dtype(np.int64)


@dataclass(frozen=True, slots=True)
class BlockShape:
    """How much a block has of everything; a terabyte has 65,000 of them, which are all in memory.

    Attributes:
        num_rows: Number of rows.
        num_keys: Number of keys of each id column.
        values: Number of values of each id column; empty where it is that of the rows, in blocks without lists.
        texts: Bytes of the texts of each id column; empty where no keys are hashes.
    """

    num_rows: int
    num_keys: array[int]
    values: array[int]
    texts: array[int]

    def num_values(self, column: int) -> int:
        """Returns the number of values of an id column: that of the rows, but for lists."""
        return self.values[column] if self.values else self.num_rows

    def text_bytes(self, column: int) -> int:
        """Returns the bytes of the texts of an id column, 0 where keys are no hashes."""
        return self.texts[column] if self.texts else 0

    def to_json(self) -> list[Any]:
        """Returns the shape in plain values, which :meth:`from_json` reads back."""
        return [self.num_rows, *(column.tolist() for column in (self.num_keys, self.values, self.texts))]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> BlockShape:
        """Returns the shape of plain values that :meth:`to_json` returned."""
        num_rows, *columns = value
        return cls(num_rows, *(array("q", numbers) for numbers in columns))

    @classmethod
    def of(cls, block: ParsedBlock) -> BlockShape:
        """Returns the shape of a block."""
        values = [len(ids.codes) for ids in block.ids] if any(ids.lengths is not None for ids in block.ids) else []
        texts = [0 if ids.texts is None else len(_text_buffers(ids.texts)[1]) for ids in block.ids]
        num_keys = array("q", (len(ids.keys) for ids in block.ids))
        return cls(block.num_rows, num_keys, array("q", values), array("q", texts if any(texts) else ()))


@dataclass(frozen=True, slots=True)
class SpooledBlock:
    """Where a parsed block lies, and which rows it holds.

    Attributes:
        path: File that holds the columns.
        index: Number of the block among those with rows.
        first_row: Number of well-formed rows before the block, over all inputs.
        shape: How much it has of everything.
        layout: Its columns.
    """

    path: Path
    index: int
    first_row: int
    shape: BlockShape
    layout: BlockLayout

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.shape.num_rows

    @property
    def stop_row(self) -> int:
        """Number of well-formed rows up to the block's end."""
        return self.first_row + self.shape.num_rows

    @property
    def num_bytes(self) -> int:
        """Size of the file in bytes."""
        return self._numbers_offset(len(self.layout.numbers)) + sum(map(sum, self._sizes(len(self.layout.ids))))

    def numbers(self, column: int) -> NDArray[Any]:
        """Reads a column of numbers, in which missing values are NaN."""
        return self._read(self.layout.numbers[column].dtype, self.num_rows, self._numbers_offset(column))

    def codes(self, column: int) -> NDArray[Any]:
        """Reads the codes of an id column's values; of lists, of all rows end to end."""
        return self._read(code_dtype(self.shape.num_keys[column]), self.shape.num_values(column), self._at(column, 1))

    def lists(self, column: int) -> Jagged:
        """Reads the codes of a column of lists."""
        lengths = self._read(_LENGTH, self.num_rows, self._at(column, 0))
        return Jagged.from_lengths(self.codes(column), lengths)

    def keys(self, column: int) -> NDArray[Any]:
        """Reads the keys of an id column; code c stands for ``keys[c]``, and 0 for a missing value."""
        return self._read(self.layout.ids[column].key_dtype, self.shape.num_keys[column], self._at(column, 2))

    def texts(self, column: int) -> pa.Array | None:
        """Reads the text of each key, as Arrow's large string; None where keys are no hashes."""
        if self.layout.ids[column].kind != "string":
            return None
        offsets = self._read(_TEXT_OFFSET, self.shape.num_keys[column] + 1, self._at(column, 3))
        texts = self._read(np.dtype(np.uint8), self.shape.text_bytes(column), self._at(column, 4))
        return pa.LargeStringArray.from_buffers(len(offsets) - 1, pa.py_buffer(offsets), pa.py_buffer(texts))

    def _numbers_offset(self, column: int) -> int:
        """Returns the byte where a column of numbers begins."""
        return self.num_rows * sum(each.dtype.itemsize for each in self.layout.numbers[:column])

    def _at(self, column: int, part: int) -> int:
        """Returns the byte where a part of an id column begins: lengths, codes, keys, where texts begin, texts."""
        before = sum(map(sum, self._sizes(column)))
        *_, own = self._sizes(column + 1)
        return self._numbers_offset(len(self.layout.numbers)) + before + sum(own[:part])

    def _sizes(self, count: int) -> Iterator[tuple[int, int, int, int, int]]:
        """Yields the bytes of each part of the first id columns."""
        shape = self.shape
        for place, (column, num_keys) in enumerate(zip(self.layout.ids[:count], shape.num_keys, strict=False)):
            yield (
                shape.num_rows * 4 if column.is_list else 0,
                shape.num_values(place) * (1 if num_keys <= 1 << 8 else 2 if num_keys <= 1 << 16 else 4),
                num_keys * (4 if column.kind == "hexadecimal" else 8),
                (num_keys + 1) * 8 if column.kind == "string" else 0,
                shape.text_bytes(place),
            )

    def _read(self, dtype: np.dtype[Any], count: int, offset: int) -> NDArray[Any]:
        return np.fromfile(self.path, dtype, count, offset=offset)


def write_block(path: Path, block: ParsedBlock, layout: BlockLayout) -> None:
    """Writes a block's columns to a file."""
    with open(path, "wb") as file:
        for column in _columns(block, layout):
            file.write(np.ascontiguousarray(column).data)  # unlike tofile, it says why it fails


def spooled_bytes(block: ParsedBlock, layout: BlockLayout) -> int:
    """Returns the size of the file that :func:`write_block` writes."""
    return sum(column.nbytes for column in _columns(block, layout))


def _columns(block: ParsedBlock, layout: BlockLayout) -> Iterator[NDArray[Any]]:
    for number, values in zip(layout.numbers, block.numbers, strict=True):
        yield values.astype(number.dtype, copy=False)
    for column, ids in zip(layout.ids, block.ids, strict=True):
        if column.is_list:
            assert ids.lengths is not None, "the parser gives the lengths of lists"
            yield ids.lengths.astype(_LENGTH, copy=False)
        yield ids.codes.astype(code_dtype(len(ids.keys)), copy=False)
        yield ids.keys.astype(column.key_dtype, copy=False)
        if column.kind == "string":
            yield from _text_buffers(ids.texts)


def _text_buffers(texts: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Returns the place in bytes at which each text begins and the last one ends, and the bytes of all texts."""
    texts = texts.cast(pa.large_string())
    _, offsets, data = texts.buffers()
    places = np.frombuffer(offsets or bytes(8), np.int64)[texts.offset : texts.offset + len(texts) + 1]
    return places - places[0], np.frombuffer(data or b"", np.uint8)[places[0] : places[-1]]


def key_columns(layout: BlockLayout) -> dict[str, tuple[int, KeyColumn]]:
    """Returns the place and the column of each feature that gets ids from keys, by name."""
    return {column.name: (place, column) for place, column in enumerate(layout.ids) if column.role == "feature"}
