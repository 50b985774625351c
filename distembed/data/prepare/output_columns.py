"""The columns of a dataset's files, each made of the spooled blocks: numbers, and ids for codes.

A row group takes rows of one block after the other::

    take = column.read(block)
    parts.append(take(rows))        of each block that has rows of the group
    column.array(parts)             an Arrow array
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distembed.data.jagged import Jagged
from distembed.data.prepare.feature_ids import LookupTables, list_rows
from distembed.data.prepare.row_splits import Rows
from distembed.data.prepare.spool import SpooledBlock

Take: TypeAlias = Callable[[Rows], Any]
"""Returns the values of some rows of a block."""


class OutputColumn(Protocol):
    """A column of the files.

    Attributes:
        field: Name and type of the column.
    """

    @property
    def field(self) -> pa.Field: ...

    def read(self, block: SpooledBlock) -> Take:
        """Returns the function that takes rows of a block."""

    def array(self, parts: Sequence[Any]) -> pa.Array:
        """Returns the rows that were taken of one or more blocks."""


@dataclass(frozen=True)
class NumberOutput:
    """A column of numbers.

    Attributes:
        name: Name of the column.
        dtype: Type of the numbers in the files.
        place: Number of the column among the blocks' numbers.
        change: Function that is applied to a block's numbers.
        has_missing: Whether NaN is a missing value; if not, there is none.
    """

    name: str
    dtype: np.dtype[Any]
    place: int
    change: Callable[[NDArray[Any]], NDArray[Any]] | None = None
    has_missing: bool = False

    @property
    def field(self) -> pa.Field:
        return pa.field(self.name, pa.from_numpy_dtype(self.dtype))

    def read(self, block: SpooledBlock) -> Take:
        numbers = block.numbers(self.place)
        return (numbers if self.change is None else self.change(numbers)).__getitem__

    def array(self, parts: Sequence[NDArray[Any]]) -> pa.Array:
        return pa.array(np.concatenate(parts), from_pandas=self.has_missing)


@dataclass(frozen=True)
class IdOutput:
    """A column of ids, one a row, or of lists of ids.

    Attributes:
        name: Name of the column.
        place: Number of the column among the blocks' keys.
        lookup: Ids of the blocks' codes.
        is_list: Whether rows have lists.
    """

    name: str
    place: int
    lookup: LookupTables
    is_list: bool = False

    @property
    def field(self) -> pa.Field:
        type_ = pa.from_numpy_dtype(self.lookup.dtype)
        return pa.field(self.name, pa.list_(type_) if self.is_list else type_)

    def mean_values(self, blocks: Sequence[SpooledBlock]) -> float:
        """Returns the mean number of ids of a row."""
        return sum(block.shape.num_values(self.place) for block in blocks) / sum(block.num_rows for block in blocks)

    def read(self, block: SpooledBlock) -> Take:
        table = self.lookup.table(block.index)
        if self.is_list:
            lists = block.lists(self.place)
            return partial(list_rows, Jagged(table[lists.values], lists.offsets))
        codes = block.codes(self.place)
        return lambda rows: np.take(table, codes[rows], mode="clip")

    def array(self, parts: Sequence[Any]) -> pa.Array:
        if not self.is_list:
            return pa.array(np.concatenate(parts))
        lists = Jagged.concatenate(parts)
        return pa.ListArray.from_arrays(pa.array(lists.offsets.astype(np.int32)), pa.array(lists.values))
