"""The columns of a dataset's files, each made of the spooled blocks: numbers, and ids for codes.

A row group takes rows of one block after the other::

    take = column.read(block)
    parts.append(take(rows))        of each block that has rows of the group
    pa.concat_arrays(parts)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distembed.data.jagged import Jagged
from distembed.data.prepare.feature_ids import LookupTables, list_rows
from distembed.data.prepare.row_splits import Rows
from distembed.data.prepare.spool import SpooledBlock

Take: TypeAlias = Callable[[Rows], pa.Array]
"""Returns the values of some rows of a block."""


@dataclass(frozen=True)
class NumberOutput:
    """A column of numbers."""

    name: str
    dtype: np.dtype[Any]  # in the files
    place: int  # among the blocks' numbers
    change: Callable[[NDArray[Any]], NDArray[Any]] | None = None  # applied to a block's numbers
    has_missing: bool = False  # whether NaN is a missing value; if not, there is none

    @property
    def field(self) -> pa.Field:
        """Name and type of the column."""
        return pa.field(self.name, pa.from_numpy_dtype(self.dtype))

    def read(self, block: SpooledBlock) -> Take:
        """Returns the function that takes rows of a block."""
        numbers = block.numbers(self.place)
        changed = numbers if self.change is None else self.change(numbers)
        return lambda rows: pa.array(changed[rows], from_pandas=self.has_missing)


@dataclass(frozen=True)
class IdOutput:
    """A column of ids, one a row, or of lists of ids."""

    name: str
    place: int  # among the blocks' keys
    lookup: LookupTables  # ids of the blocks' codes
    is_list: bool = False

    @property
    def field(self) -> pa.Field:
        """Name and type of the column."""
        type_ = pa.from_numpy_dtype(self.lookup.dtype)
        return pa.field(self.name, pa.list_(type_) if self.is_list else type_)

    def mean_values(self, blocks: Sequence[SpooledBlock]) -> float:
        """Returns the mean number of ids of a row."""
        return sum(block.num_values(self.place) for block in blocks) / sum(block.num_rows for block in blocks)

    def read(self, block: SpooledBlock) -> Take:
        """Returns the function that takes rows of a block."""
        table = self.lookup.table(block.index)
        if not self.is_list:
            codes = block.codes(self.place)
            return lambda rows: pa.array(np.take(table, codes[rows], mode="clip"))
        lists = block.lists(self.place)
        ids = Jagged(table[lists.values], lists.offsets)

        def take(rows: Rows) -> pa.Array:
            found = list_rows(ids, rows)
            return pa.ListArray.from_arrays(pa.array(found.offsets.astype(np.int32)), pa.array(found.values))

        return take


OutputColumn: TypeAlias = NumberOutput | IdOutput
