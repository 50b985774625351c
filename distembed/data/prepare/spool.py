"""Parsed blocks in files, where they wait until the vocabulary is known, and which of their rows are in which split.

A file is the arrays of a block, end to end: the numbers, then the lengths of lists, codes and keys of each id column,
and the texts of keys that are hashes. The positions of the arrays stay in memory, so one is read without the rest (an
Arrow file for each block took 0.6 ms to open, a seventh of the whole preparation).

Rows keep the order of the input in a split: row r of a split is the r-th of all rows that are in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import DTypeLike, NDArray

from distembed.base.errors import UserError
from distembed.data.dataset.records import Jagged
from distembed.data.hashing import text_keys
from distembed.data.prepare.count import Database, count_distinct, values_at_ranks
from distembed.data.prepare.options import TRAIN, SplitRule
from distembed.data.table.blocks import BlockLayout, ParsedBlock, code_dtype
from distembed.data.table.values import value_texts


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
    def num_bytes(self) -> int:
        return int(self.starts[-1])

    def num_keys(self, column: int) -> int:
        """Returns the number of keys of an id column, ``keys[0]`` included."""
        start, stop = self._range("keys", column)
        return (stop - start) // self.layout.ids[column].key_dtype.itemsize

    def num_values(self, column: int) -> int:
        """Returns the number of values of an id column: one a row, or the total length of lists."""
        start, stop = self._range("codes", column)
        return (stop - start) // code_dtype(self.num_keys(column)).itemsize

    def numbers(self, column: int) -> NDArray[Any]:
        """Reads a column of numbers, in which missing values are NaN."""
        return self._read("numbers", column, self.layout.numbers[column].dtype)

    def codes(self, column: int) -> NDArray[Any]:
        """Reads the codes of an id column's values; of lists, of all rows end to end."""
        return self._read("codes", column, code_dtype(self.num_keys(column)))

    def lists(self, column: int) -> Jagged:
        return Jagged.from_lengths(self.codes(column), self.lengths(column))

    def lengths(self, column: int) -> NDArray[Any]:
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
        place = self.layout.arrays[kind, column]
        return int(self.starts[place]), int(self.starts[place + 1])

    def _read(self, kind: str, column: int, dtype: DTypeLike) -> NDArray[Any]:
        start, stop = self._range(kind, column)
        return np.fromfile(self.path, dtype, (stop - start) // np.dtype(dtype).itemsize, offset=start)


def write_block(path: Path, block: ParsedBlock, layout: BlockLayout) -> list[int]:
    """Writes a block's arrays in the order of ``BlockLayout.arrays``; returns the start of each and the file's size."""
    arrays = [np.asarray(values, number.dtype) for number, values in zip(layout.numbers, block.numbers, strict=True)]
    for column, ids in zip(layout.ids, block.ids, strict=True):
        if ids.lengths is not None:
            arrays.append(ids.lengths.astype(np.int32))
        arrays += [np.asarray(ids.codes, code_dtype(len(ids.keys))), np.asarray(ids.keys, column.key_dtype)]
        if ids.texts is not None:
            texts = ids.texts.cast(pa.large_string())
            _, offsets, data = texts.buffers()
            ends = np.frombuffer(offsets or bytes(8), np.int64)[texts.offset : texts.offset + len(texts) + 1]
            arrays += [ends - ends[0], np.frombuffer(data or b"", np.uint8)[ends[0] : ends[-1]]]
    with open(path, "wb") as file:
        for array in arrays:
            file.write(np.ascontiguousarray(array).data)  # unlike tofile, it says why it fails
    return np.cumsum([0, *(array.nbytes for array in arrays)]).tolist()


Rows: TypeAlias = slice | NDArray[np.int64]  # of a block in rising order: a range if they are adjacent, else numbers


@dataclass(frozen=True, eq=False)
class RowSplits:
    """The rows of all splits."""

    rule: SplitRule
    blocks: Sequence[SpooledBlock]
    # Of a rule by time, the time at which each split after training begins; by column, the key of each split in that
    # column; else the row at which each split begins, over all inputs, and at which the last one ends.
    bounds: tuple[int, ...]

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """Number of rows of each block in each split, ``[blocks, splits]``."""
        splits = range(len(self.rule.names))
        counts = [[_num_rows(self.rows(block, split)) for split in splits] for block in self.blocks]
        return np.array(counts, np.int64).reshape(-1, len(splits))

    @property
    def num_rows(self) -> list[int]:
        num_rows_: list[int] = self.counts.sum(axis=0).tolist()
        return num_rows_

    def rows(self, block: SpooledBlock, split: int) -> Rows:
        """Returns the rows of a block that are in split number ``split``, ascending, numbered within the block."""
        column_index = split_column(self.rule, block.layout)
        if self.rule.kind == "time":
            # number of bounds at or before a row's time = number of its split
            split_of_row = np.searchsorted(np.array(self.bounds, np.int64), block.numbers(column_index), side="right")
            return np.flatnonzero(split_of_row == split)
        if self.rule.kind == "column":
            is_split = block.keys(column_index) == np.uint64(self.bounds[split])
            is_split[0] = False
            return np.flatnonzero(is_split[block.codes(column_index)])
        start, stop = np.clip(np.array(self.bounds[split : split + 2]) - block.first_row, 0, block.num_rows)
        return slice(int(start), int(stop))

    def train_rows(self, block: SpooledBlock) -> Rows:
        return self.rows(block, TRAIN) if self.rule.trains else slice(0, 0)

    def parts(self, split: int, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Returns (block, first, last + 1) for the blocks that hold rows ``[start, stop)`` of a split.

        First and last count the rows of this split in the block: they index the result of :meth:`rows`.
        """
        stops = np.cumsum(self.counts[:, split])
        starts = stops - self.counts[:, split]
        first, end = np.maximum(starts, start), np.minimum(stops, stop)
        blocks = np.flatnonzero(first < end)
        return list(
            zip(blocks.tolist(), (first - starts)[blocks].tolist(), (end - starts)[blocks].tolist(), strict=True)
        )


def _num_rows(rows: Rows) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def split_column(rule: SplitRule, layout: BlockLayout) -> int:
    """Returns the index of the column that decides a row's split: in ``layout.numbers`` for a time, else in ``ids``.

    Returns -1 if the order of the input decides; a UserError if the rule's column is missing.
    """
    if rule.kind == "time":
        indices = [index for index, number in enumerate(layout.numbers) if number.role == "time"]
        lacking = (
            f"in the order of time ({', '.join(rule.names)}), and rows have no time column: name one in the schema, or "
            "choose another split"
        )
    elif rule.kind == "column":
        columns = enumerate(layout.ids)
        indices = [index for index, column in columns if column.role == "split" and column.name == rule.column]
        lacking = f"by the column {rule.column!r}, which the rows do not have: name another"
    else:
        return -1
    if not indices:
        raise UserError(f"the split (--split) is {lacking}")
    return indices[0]


def row_splits(
    rule: SplitRule, blocks: Sequence[SpooledBlock], source_rows: Sequence[int], folder: Path, memory_bytes: int
) -> RowSplits:
    """Computes the splits' bounds, shares of time by SQL in ``folder``; rows of equal times stay in one split."""
    if rule.kind == "column":
        return RowSplits(rule, blocks, tuple(text_keys(_values(rule)).tolist()))
    if rule.kind != "time" or rule.times or not blocks:
        return RowSplits(rule, blocks, rule.times if rule.kind == "time" else rule.bounds(source_rows))
    column_index = split_column(rule, blocks[0].layout)
    with Database(folder, memory_bytes) as database:
        total = count_distinct(database, (block.numbers(column_index) for block in blocks), pa.int64())
        ranks = [int(total * sum(rule.shares[:count])) for count in range(1, len(rule.shares))]
        return RowSplits(rule, blocks, tuple(values_at_ranks(database, ranks, pa.int64()).tolist()))


def _values(rule: SplitRule) -> pa.Array:
    return value_texts(pa.array(rule.values, pa.string()))


def require_known_splits(rule: SplitRule, layout: BlockLayout, block: ParsedBlock, place: str) -> None:
    """Raises a UserError if a row's value in the split column is missing or names no split; checks no other rules."""
    if rule.kind != "column":
        return
    ids = block.ids[split_column(rule, layout)]
    assert ids.texts is not None, "the values of a splits' column are texts"
    is_known = pc.is_in(ids.texts, value_set=_values(rule).cast(ids.texts.type)).to_numpy(zero_copy_only=False)
    is_known[0] = False
    unknown = np.flatnonzero(~is_known[ids.codes])
    if len(unknown):
        code = int(ids.codes[unknown].min())
        value = repr(ids.texts[code].as_py()) if code else "no value"
        raise UserError(
            f"{place}: the column {rule.column!r} has {value} in some row: it must be one of {', '.join(rule.values)}, "
            f"which say the row's split (--split column:{rule.column}=...)"
        )
