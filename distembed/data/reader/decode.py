"""Decodes row groups of Parquet files into blocks of rows that batches are gathered from.

Single-valued columns become one row-major array, so that gathering a random row touches two or three cache lines
instead of one for each of forty columns::

    records[row] = [ id of feature 0 | id of feature 1 | ... | dense 0 | ... | label | weight ]   int32 (or int64)

Dense values, the label and the weight, if there are such, are float32 bits in the same array. Columns of lists,
of ids or of numbers, keep their values, in the order of the file, and offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distembed.data.dataset.row_groups import RowGroup
from distembed.data.dataset.schema import CategoricalFeature, Schema
from distembed.data.jagged import Jagged
from distembed.data.reader.group_rows import GroupRows
from distembed.data.reader.order import Segment, require_at_least
from distembed.data.reader.unreadable import Unreadable
from distembed.errors import RunError, UserError

# Columns are copied into the row-major block this many rows at a time, so that the rows being filled stay in cache.
_TILE_ROWS = 1024


@dataclass(frozen=True)
class Decoding:
    """How a reader decodes row groups, and into which memory.

    Attributes:
        threads: Number of threads that decode rows ahead; 0 decodes them where batches are made.
        skip_unreadable: Number of row groups that may be unreadable, whose rows others take the place of.
        pins: Whether batches are made in page-locked memory, from which a GPU copies them while the host goes on.

    Raises:
        UserError: A number is negative.
    """

    threads: int = 0
    skip_unreadable: int = 0
    pins: bool = False

    def __post_init__(self) -> None:
        require_at_least("decode_threads", self.threads, 0)
        require_at_least("skip_unreadable", self.skip_unreadable, 0)


@dataclass(frozen=True)
class RecordLayout:
    """Where each single-valued column stands in a record.

    Attributes:
        single: Single-valued features, in the order of their ids in a record.
        numbers: Names of the columns of numbers, in the order of their values in a record: dense, label, weight.
        has_lists: Whether a row has lists, which are not in its record.
        dtype: int32, or int64 where the ids of a table need it.
    """

    single: tuple[CategoricalFeature, ...]
    numbers: tuple[str, ...]
    has_lists: bool
    dtype: np.dtype[Any]

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
    """Decoded rows.

    Attributes:
        records: Row-major array of the single-valued columns, ``[num_rows, width]``; see :class:`RecordLayout`.
        jagged: Columns of lists by their names.
    """

    records: NDArray[Any]
    jagged: dict[str, Jagged]

    def gather(self, rows: NDArray[np.int64]) -> Block:
        """Returns these rows, in this order."""
        return Block(
            np.take(self.records, rows, axis=0), {name: column.gather(rows) for name, column in self.jagged.items()}
        )

    @classmethod
    def concatenate(cls, blocks: Sequence[Block]) -> Block:
        """Returns the rows of all blocks, of which there is at least one, end to end."""
        records = np.concatenate([block.records for block in blocks])
        return cls(records, {name: Jagged.concatenate([b.jagged[name] for b in blocks]) for name in blocks[0].jagged})


@dataclass(frozen=True)
class Decoder:
    """Reads row groups of one split into blocks.

    Attributes:
        schema: Columns to read.
        groups: Row groups of the split.
        unreadable: Those that could not be read.
    """

    schema: Schema
    groups: tuple[RowGroup, ...]
    unreadable: Unreadable = field(default_factory=lambda: Unreadable(0))

    def decode(self, segments: Sequence[Segment]) -> Block:
        """Reads rows, of which there is at least one, into one block.

        Raises:
            UserError: More row groups are damaged than may be; or a value is missing, not finite, or an id outside its
                table, or a row has not as many numbers in a list as ids, and the error says in which column.
            RunError: More row groups are out of reach than may be.
        """
        layout = RecordLayout.from_schema(self.schema)
        records = np.empty((sum(stop - start for _, start, stop in segments), layout.width), layout.dtype)
        lists: list[dict[str, Jagged]] = []
        filled = 0
        for index, start, stop in segments:
            rows = self._rows(index, start, stop)
            _fill_records(records[filled : filled + stop - start], rows, layout)
            lists.append(rows.lists())
            filled += stop - start
        return Block(records, {name: Jagged.concatenate([each[name] for each in lists]) for name in lists[0]})

    def _rows(self, index: int, start: int, stop: int) -> GroupRows:
        """Reads rows of one row group, or as many of the next that can be read."""
        columns = self.schema.columns
        for number in (*range(index, len(self.groups)), *range(index)):
            group = self.groups[number]
            try:
                table = group.read(columns)
            except (UserError, RunError) as error:
                self.unreadable.allow(str(group), error)
                continue
            if number == index:
                return GroupRows(group, self.schema, start, table.slice(start, stop - start))
            return GroupRows(group, self.schema, 0, table.take(np.arange(start, stop) % group.num_rows))
        raise UserError(f"no row group can be read: {'; '.join(self.unreadable.found.values())}")


def _fill_records(out: NDArray[Any], rows: GroupRows, layout: RecordLayout) -> None:
    """Copies the single-valued columns of rows into their records."""
    ids = [rows.ids(feature) for feature in layout.single]
    numbers = [rows.numbers(name) for name in layout.numbers]
    floats = out.view(np.float32)
    first = layout.first_float
    for low in range(0, len(out), _TILE_ROWS):
        high = low + _TILE_ROWS
        for column, values in enumerate(ids):
            out[low:high, column] = values[low:high]
        for column, values in enumerate(numbers, start=first):
            floats[low:high, column] = values[low:high]
