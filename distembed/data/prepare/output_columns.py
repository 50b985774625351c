"""The columns of a dataset's files, each filled from the spooled blocks: numbers, and ids for codes.

A row group is begun with the number of its rows, filled from one block after the other, and finished::

    group = column.begin(num_rows)
    group.add(column.read(block), rows, count)      of each block that has rows of the group
    group.finish()                                  an Arrow array
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distembed.data.jagged import Jagged
from distembed.data.prepare.feature_ids import LookupTables, list_rows
from distembed.data.prepare.row_splits import Rows
from distembed.data.prepare.spool import SpooledBlock


class ColumnGroup(Protocol):
    """The values of a column in one row group."""

    def add(self, values: Any, rows: Rows, count: int) -> None:
        """Adds rows of a block.

        Args:
            values: What the column read of the block.
            rows: The rows.
            count: Number of the rows.
        """

    def finish(self) -> pa.Array:
        """Returns the values, once all rows were added."""


class OutputColumn(Protocol):
    """A column of the files.

    Attributes:
        field: Name and type of the column.
    """

    @property
    def field(self) -> pa.Field: ...

    def mean_values(self, blocks: Sequence[SpooledBlock]) -> float:
        """Returns the mean number of values of a row."""

    def begin(self, num_rows: int) -> ColumnGroup:
        """Begins a row group of so many rows."""

    def read(self, block: SpooledBlock) -> Any:
        """Returns what a group takes of a block."""


@dataclass(frozen=True)
class _Coded:
    """A value for each row: row i has ``table[codes[i]]``."""

    codes: NDArray[Any]
    table: NDArray[Any]

    def copy(self, rows: Rows, out: NDArray[Any]) -> None:
        np.take(self.table, self.codes[rows], out=out, mode="clip")


@dataclass(frozen=True)
class _Plain:
    """A value for each row."""

    values: NDArray[Any]

    def copy(self, rows: Rows, out: NDArray[Any]) -> None:
        out[:] = self.values[rows]


class _FlatGroup:
    """A row group of a column with one value a row.

    Args:
        values: Array that gets them.
        has_missing: Whether NaN is a missing value.
    """

    def __init__(self, values: NDArray[Any], has_missing: bool) -> None:
        self._values, self._has_missing = values, has_missing
        self._filled = 0

    def add(self, values: Any, rows: Rows, count: int) -> None:
        values.copy(rows, self._values[self._filled : self._filled + count])
        self._filled += count

    def finish(self) -> pa.Array:
        return pa.array(self._values, from_pandas=self._has_missing)


class _ListGroup:
    """A row group of a column of lists."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._parts = [Jagged(np.zeros(0, dtype), np.zeros(1, np.int64))]

    def add(self, values: Any, rows: Rows, count: int) -> None:
        codes, table = values
        taken = list_rows(codes, rows)
        self._parts.append(Jagged(table[taken.values], taken.offsets))

    def finish(self) -> pa.Array:
        lists = Jagged.concatenate(self._parts)
        return pa.ListArray.from_arrays(pa.array(lists.offsets.astype(np.int32)), pa.array(lists.values))


@dataclass(frozen=True)
class NumberOutput:
    """A column of numbers.

    Attributes:
        name: Name of the column.
        dtype: Type of the numbers in the files.
        place: Number of the column among the blocks' numbers.
        change: What becomes of a block's numbers.
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

    def mean_values(self, blocks: Sequence[SpooledBlock]) -> float:
        return 1.0

    def begin(self, num_rows: int) -> ColumnGroup:
        return _FlatGroup(np.empty(num_rows, self.dtype), self.has_missing)

    def read(self, block: SpooledBlock) -> _Plain:
        numbers = block.numbers(self.place)
        return _Plain(numbers if self.change is None else self.change(numbers))


@dataclass(frozen=True)
class IdOutput:
    """A column of ids, one a row.

    Attributes:
        name: Name of the column.
        place: Number of the column among the blocks' keys.
        lookup: Ids of the blocks' codes.
    """

    name: str
    place: int
    lookup: LookupTables

    @property
    def field(self) -> pa.Field:
        return pa.field(self.name, pa.from_numpy_dtype(self.lookup.dtype))

    def mean_values(self, blocks: Sequence[SpooledBlock]) -> float:
        return 1.0

    def begin(self, num_rows: int) -> ColumnGroup:
        return _FlatGroup(np.empty(num_rows, self.lookup.dtype), has_missing=False)

    def read(self, block: SpooledBlock) -> _Coded:
        return _Coded(block.codes(self.place), self.lookup.table(block.index))


@dataclass(frozen=True)
class ListOutput:
    """A column of lists of ids.

    Attributes:
        name: Name of the column.
        place: Number of the column among the blocks' keys.
        lookup: Ids of the blocks' codes.
    """

    name: str
    place: int
    lookup: LookupTables

    @property
    def field(self) -> pa.Field:
        return pa.field(self.name, pa.list_(pa.from_numpy_dtype(self.lookup.dtype)))

    def mean_values(self, blocks: Sequence[SpooledBlock]) -> float:
        num_rows = sum(block.num_rows for block in blocks)
        return sum(block.shape.num_values(self.place) for block in blocks) / max(1, num_rows)

    def begin(self, num_rows: int) -> ColumnGroup:
        return _ListGroup(self.lookup.dtype)

    def read(self, block: SpooledBlock) -> tuple[Jagged, NDArray[Any]]:
        return block.lists(self.place), self.lookup.table(block.index)
