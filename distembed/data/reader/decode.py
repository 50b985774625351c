"""Decodes row groups of Parquet files into blocks of rows that batches are gathered from.

Single-valued columns become one row-major array, so that gathering a random row touches two or three cache lines
instead of one for each of forty columns::

    records[row] = [ id of feature 0 | id of feature 1 | ... | dense 0 | ... | label | weight ]   int32 (or int64)

Dense values, the label and the weight, if there are such, are float32 bits in the same array. Columns of lists,
of ids or of numbers, keep their values, in the order of the file, and offsets.

A run may do without some row groups that cannot be read. The rows of the next row group that can be read take their
place, over and over if it has fewer. So every batch has as many rows as it would have, every rank takes as many steps,
and which rows these are depends on the damage alone, not on the number of ranks.

Trade-off: some rows are trained on twice. Leaving rows out would need all ranks to agree before an epoch, and so to
read all of it before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distembed.base.errors import RunError, UserError
from distembed.data.dataset.row_groups import RowGroup
from distembed.data.dataset.schema import CategoricalFeature, Schema
from distembed.data.jagged import Jagged
from distembed.data.reader.group_rows import GroupRows
from distembed.data.reader.order import Segment, require_at_least

# Columns are copied into the row-major block this many rows at a time, so that the rows being filled stay in cache.
_TILE_ROWS = 1024


@dataclass(frozen=True)
class Decoding:
    """How a reader decodes row groups, and into which memory.

    Raises:
        UserError: A number is negative.
    """

    threads: int = 0  # that decode rows ahead; 0 decodes them where batches are made
    skip_unreadable: int = 0  # row groups that may be unreadable, whose rows others take the place of
    pins: bool = False  # whether batches are made in page-locked memory, which a GPU copies while the host goes on

    def __post_init__(self) -> None:
        require_at_least("decode_threads", self.threads, 0)
        require_at_least("skip_unreadable", self.skip_unreadable, 0)


@dataclass(frozen=True)
class RecordLayout:
    """Where each single-valued column stands in a record."""

    single: tuple[CategoricalFeature, ...]  # single-valued features, in the order of their ids in a record
    numbers: tuple[str, ...]  # names of the columns of numbers, likewise: dense, label, weight
    has_lists: bool  # whether a row has lists, which are not in its record
    dtype: np.dtype[Any]  # int32, or int64 where the ids of a table need it

    @classmethod
    def from_schema(cls, schema: Schema) -> RecordLayout:
        """Returns the layout for the rows of this schema."""
        single = tuple(feature for feature in schema.categorical if not feature.multi_hot)
        wide = any(feature.num_embeddings > 2**31 for feature in single)
        last = tuple(name for name in (schema.label, schema.weight) if name is not None)
        dtype = np.dtype(np.int64 if wide else np.int32)
        has_lists = len(single) < len(schema.categorical) or bool(schema.dense_sequences)
        return cls(single, (*schema.dense, *last), has_lists, dtype)

    @property
    def first_float(self) -> int:
        """Index of the first number when a record is viewed as float32."""
        return len(self.single) * (self.dtype.itemsize // 4)

    @property
    def width(self) -> int:
        """Number of elements of ``dtype`` in a record."""
        floats_each = self.dtype.itemsize // 4
        return len(self.single) + -(-len(self.numbers) // floats_each)


@dataclass(frozen=True)
class Block:
    """Decoded rows."""

    records: NDArray[Any]  # row-major array of the single-valued columns [num_rows, width]; see RecordLayout
    jagged: dict[str, Jagged]  # columns of lists by their names

    def gather(self, rows: NDArray[np.int64]) -> Block:
        """Returns these rows, in this order."""
        lists = {name: column.gather(rows) for name, column in self.jagged.items()}
        return Block(np.take(self.records, rows, axis=0), lists)

    @classmethod
    def concatenate(cls, blocks: Sequence[Block]) -> Block:
        """Returns the rows of all blocks, of which there is at least one, end to end."""
        records = np.concatenate([block.records for block in blocks])
        return cls(records, {name: Jagged.concatenate([b.jagged[name] for b in blocks]) for name in blocks[0].jagged})


class Decoder:
    """Reads row groups of one split into blocks; threads share it.

    Args:
        schema: Columns to read.
        groups: Row groups of the split.
        most_unreadable: Number of row groups that may be unreadable.
    """

    def __init__(self, schema: Schema, groups: Sequence[RowGroup], most_unreadable: int = 0) -> None:
        self.schema, self._groups, self._most_unreadable = schema, groups, most_unreadable
        self._layout = RecordLayout.from_schema(schema)
        self.unreadable: dict[str, str] = {}  # the problem of each row group that could not be read, by its name

    def decode(self, segments: Sequence[Segment]) -> Block:
        """Reads rows, of which there is at least one, into one block.

        Raises:
            UserError: More row groups are damaged than may be; or a value is missing, not finite, or an id outside its
                table, or a row has not as many numbers in a list as ids, and the error says in which column.
            RunError: More row groups are out of reach than may be.
        """
        records = np.empty((sum(stop - start for _, start, stop in segments), self._layout.width), self._layout.dtype)
        lists: list[dict[str, Jagged]] = []
        filled = 0
        for index, start, stop in segments:
            rows = self._rows(index, start, stop)
            self._fill_records(records[filled : filled + stop - start], rows)
            lists.append(rows.lists())
            filled += stop - start
        return Block(records, {name: Jagged.concatenate([each[name] for each in lists]) for name in lists[0]})

    def _rows(self, index: int, start: int, stop: int) -> GroupRows:
        """Reads rows of one row group, or as many of the next that can be read."""
        for number in (*range(index, len(self._groups)), *range(index)):
            group = self._groups[number]
            try:
                table = group.read(self.schema.columns)
            except (UserError, RunError) as error:
                self.unreadable.setdefault(str(group), str(error))
                if not self._most_unreadable:
                    raise
                if len(self.unreadable) > self._most_unreadable:
                    raise too_many_unreadable(self.unreadable, self._most_unreadable) from error
                continue
            if number == index:
                return GroupRows(group, self.schema, start, table.slice(start, stop - start))
            return GroupRows(group, self.schema, 0, table.take(np.arange(start, stop) % group.num_rows))
        raise UserError(f"no row group can be read: {'; '.join(self.unreadable.values())}")

    def _fill_records(self, out: NDArray[Any], rows: GroupRows) -> None:
        """Copies the single-valued columns of rows into their records."""
        ids = [rows.ids(feature) for feature in self._layout.single]
        numbers = [rows.numbers(name) for name in self._layout.numbers]
        floats = out.view(np.float32)
        for low in range(0, len(out), _TILE_ROWS):
            high = low + _TILE_ROWS
            for column, values in enumerate(ids):
                out[low:high, column] = values[low:high]
            for column, values in enumerate(numbers, start=self._layout.first_float):
                floats[low:high, column] = values[low:high]


def too_many_unreadable(found: dict[str, str], most: int) -> UserError:
    """Returns the error that more row groups cannot be read than are allowed, given their problems by their names."""
    *_, last = found.values()
    text = f"{len(found)} row groups cannot be read, and data.skip_unreadable allows {most}; the last: {last}"
    return UserError(text)
