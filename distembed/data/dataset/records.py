"""Decoded rows in memory: a row-major array of the single-valued columns, and columns of lists.

A record has the ids of a row, then its numbers as float32 bits, so that gathering a random row touches two or three
cache lines in place of one for each of forty columns::

    records[row] = [ id of feature 0 | id of feature 1 | ... | dense 0 | ... | labels | weight ]   int32 (or int64)

A column of lists has the values of all rows end to end::

    row         0    1    2
    lists      3 9   -    5
    values     3 9        5
    offsets    0     2    2    3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distembed.data.dataset.schema import CategoricalFeature, Schema


@dataclass(frozen=True)
class Jagged:
    """One column of lists."""

    values: NDArray[Any]  # ids, int64, or numbers, float32, of all rows, end to end
    offsets: NDArray[np.int64]  # where the values of each row begin, and where the last ones end [num_rows + 1]

    @classmethod
    def from_lengths(cls, values: NDArray[Any], lengths: NDArray[np.int64]) -> Jagged:
        return cls(values, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    def gather(self, rows: NDArray[np.int64]) -> Jagged:
        """Returns the lists of some rows, in the order of ``rows``."""
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        # shift = position in self.values - position in the result, constant within a list
        shift = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
        return Jagged.from_lengths(self.values[shift + np.arange(len(shift))], lengths)

    def last(self, max_length: int) -> Jagged:
        """Returns the last ``max_length`` values of each list."""
        lengths = self.lengths
        if not len(lengths) or lengths.max() <= max_length:
            return self
        place_from_end = np.repeat(self.offsets[1:], lengths) - np.arange(self.offsets[0], self.offsets[-1])
        values = self.values[self.offsets[0] : self.offsets[-1]][place_from_end <= max_length]
        return Jagged.from_lengths(values, np.minimum(lengths, max_length))

    @classmethod
    def concatenate(cls, columns: Sequence[Jagged]) -> Jagged:
        values = np.concatenate([column.values for column in columns])
        return cls.from_lengths(values, np.concatenate([column.lengths for column in columns]))


@dataclass(frozen=True)
class RecordLayout:
    """Where each single-valued column stands in a record."""

    single: tuple[CategoricalFeature, ...]  # single-valued features, in the order of their ids in a record
    numbers: tuple[str, ...]  # names of the columns of numbers, likewise: dense, labels, weight
    has_lists: bool  # whether a row has lists, which are not in its record
    dtype: np.dtype[Any]  # int32, or int64 where the ids of a table need it

    @classmethod
    def from_schema(cls, schema: Schema) -> RecordLayout:
        single = tuple(feature for feature in schema.categorical if not feature.multi_hot)
        wide = any(feature.num_embeddings > 2**31 for feature in single)
        dtype = np.dtype(np.int64 if wide else np.int32)
        has_lists = len(single) < len(schema.categorical) or bool(schema.dense_sequences)
        return cls(single, (*schema.dense, *schema.targets), has_lists, dtype)

    @property
    def first_float(self) -> int:
        """Index of the first number where a record is viewed as float32; an int64 id takes two places there."""
        return len(self.single) * (self.dtype.itemsize // 4)

    @property
    def width(self) -> int:
        floats_each = self.dtype.itemsize // 4  # float32 numbers that fit in an element; an odd last one is padded
        return len(self.single) + -(-len(self.numbers) // floats_each)


@dataclass(frozen=True)
class RecordBlock:
    """Holds decoded rows: single values side by side in one array, and each column of lists apart."""

    records: NDArray[Any]  # row-major array of the single-valued columns [num_rows, width]; see RecordLayout
    jagged: dict[str, Jagged]  # columns of lists by their names
    periods: NDArray[np.int64] | None = None  # of a stream's rows: their days or hours, where these are reported

    def gather(self, rows: NDArray[np.int64]) -> RecordBlock:
        lists = {name: column.gather(rows) for name, column in self.jagged.items()}
        return RecordBlock(np.take(self.records, rows, axis=0), lists)

    def between(self, start: int, stop: int) -> RecordBlock:
        """Returns the rows from ``start`` to ``stop`` - 1, as far as the block has them; records are not copied."""
        rows = np.arange(len(self.records))[start:stop]
        return RecordBlock(
            self.records[start:stop],
            {name: column.gather(rows) for name, column in self.jagged.items()},
            None if self.periods is None else self.periods[start:stop],
        )

    @classmethod
    def concatenate(cls, blocks: Sequence[RecordBlock]) -> RecordBlock:
        records = np.concatenate([block.records for block in blocks])
        lists = {name: Jagged.concatenate([block.jagged[name] for block in blocks]) for name in blocks[0].jagged}
        periods = [block.periods for block in blocks if block.periods is not None]
        return cls(records, lists, np.concatenate(periods) if periods else None)
