"""Which rows of each block are in which split.

Rows keep the order of the input in a split: row r of a split is the r-th of all rows that are in it, wherever they lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distembed.data.prepare.blocks import BlockLayout, IdColumn
from distembed.data.prepare.count import Database
from distembed.data.prepare.split import SPLIT_NAMES, TRAIN, SplitRule
from distembed.data.prepare.spool import SpooledBlock
from distembed.data.table.text_keys import text_keys
from distembed.data.table.value_texts import value_texts
from distembed.errors import UserError

Rows: TypeAlias = slice | NDArray[np.int64]
"""Rows of a block in rising order: a range where they follow each other, else their numbers."""


class RowRule(Protocol):
    """Says which split a row is in, given its block."""

    def rows(self, block: SpooledBlock, split: int) -> Rows:
        """Returns the rows of a block that are in a split, given by its number."""


@dataclass(frozen=True)
class ByPlace:
    """Splits that follow each other in the order of the input.

    Attributes:
        bounds: Row where each split begins, over all inputs, and where the last one ends.
    """

    bounds: tuple[int, ...]

    def rows(self, block: SpooledBlock, split: int) -> Rows:
        start, stop = np.clip(self.bounds[split : split + 2], block.first_row, block.stop_row) - block.first_row
        return slice(int(start), int(stop))


@dataclass(frozen=True)
class ByTime:
    """Splits that begin at times.

    Attributes:
        column: Number of the time's column among the numbers.
        times: Time at which each split after training begins, in the order of the splits.
    """

    column: int
    times: tuple[int, ...]

    def rows(self, block: SpooledBlock, split: int) -> Rows:
        found = np.searchsorted(np.array(self.times, np.int64), block.numbers(self.column), side="right")
        return np.flatnonzero(found == split)


@dataclass(frozen=True)
class ByColumn:
    """Splits that a column names.

    Attributes:
        column: Number of the column among those of keys.
        keys: Key of each split.
    """

    column: int
    keys: tuple[int, ...]

    def rows(self, block: SpooledBlock, split: int) -> Rows:
        keys = block.keys(self.column)
        is_split = keys == keys.dtype.type(self.keys[split])
        is_split[0] = False
        return np.flatnonzero(is_split[block.codes(self.column)])


@dataclass(frozen=True, eq=False)
class RowSplits:
    """The rows of all splits.

    Attributes:
        names: Names of the splits in order; training is the first, where there is one.
        rule: Says which split a row is in.
        counts: Number of rows of each block in each split, ``[blocks, splits]``.
    """

    names: tuple[str, ...]
    rule: RowRule
    counts: NDArray[np.int64]

    @property
    def num_rows(self) -> list[int]:
        """Number of rows of each split."""
        return [int(count) for count in self.counts.sum(axis=0)]

    def train_rows(self, block: SpooledBlock) -> Rows:
        """Returns the rows of a block that train."""
        return self.rule.rows(block, TRAIN) if self.names[TRAIN] == SPLIT_NAMES[TRAIN] else slice(0, 0)

    def parts(self, split: int, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Returns where rows ``[start, stop)`` of a split lie: blocks, and which rows of the split in the block."""
        stops = np.cumsum(self.counts[:, split])
        starts = stops - self.counts[:, split]
        first, last = np.searchsorted(stops, start, "right"), np.searchsorted(starts, stop, "left")
        return [
            (index, max(0, start - int(starts[index])), min(int(self.counts[index, split]), stop - int(starts[index])))
            for index in range(int(first), int(last))
            if self.counts[index, split]
        ]


def count_rows(rule: RowRule, num_splits: int, blocks: Sequence[SpooledBlock]) -> NDArray[np.int64]:
    """Returns the number of rows of each block in each split, ``[blocks, splits]``."""
    counts = [[_num_rows(rule.rows(block, split)) for split in range(num_splits)] for block in blocks]
    return np.array(counts, np.int64).reshape(-1, num_splits)


def _num_rows(rows: Rows) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def some_rows(rows: Rows, start: int, stop: int) -> Rows:
    """Returns the rows from the ``start``-th to the one before the ``stop``-th."""
    return slice(rows.start + start, rows.start + stop) if isinstance(rows, slice) else rows[start:stop]


def time_column(layout: BlockLayout, rule: SplitRule) -> int:
    """Returns the number of the time's column among the numbers.

    Raises:
        UserError: Rows have no time.
    """
    found = [place for place, column in enumerate(layout.numbers) if column.role == "time"]
    if not found:
        raise UserError(
            f"the split (--split) is in the order of time ({', '.join(rule.names)}), and rows have no time column: "
            "name one in the schema, or choose another split"
        )
    return found[0]


def split_times(blocks: Sequence[SpooledBlock], column: int, rule: SplitRule, database: Database) -> tuple[int, ...]:
    """Returns the time at which each split after training begins: those of the rule, or by its shares of all rows.

    A split begins at the time of the row with which its share begins, so that rows of equal times stay together.

    Args:
        blocks: All blocks.
        column: Number of the time's column among the numbers.
        rule: A rule by time.
        database: A database without tables.
    """
    if rule.times:
        return rule.times
    total = count_numbers(database, (block.numbers(column) for block in blocks), pa.int64())
    ranks = [int(total * sum(rule.shares[:count])) for count in range(1, len(rule.shares))]
    return tuple(values_at_ranks(database, ranks, pa.int64()).tolist())


def count_numbers(database: Database, parts: Iterable[NDArray[Any]], type_: pa.DataType) -> int:
    """Makes the table ``counted`` of distinct values and their counts, and returns the number of all values."""
    schema = pa.schema([("value", type_), ("count", pa.int64())])
    counts = (np.unique(part, return_counts=True) for part in parts)
    batches = (pa.record_batch([pa.array(values), pa.array(count)], schema=schema) for values, count in counts)
    database.add("counted", batches, schema, "select value, sum(count)::bigint as count from given group by value")
    return int(database.row("select coalesce(sum(count), 0)::bigint from counted")[0])


def values_at_ranks(database: Database, ranks: Sequence[int], type_: pa.DataType) -> NDArray[Any]:
    """Returns the values at some places, from 0, of all values of the table ``counted`` in rising order.

    Args:
        database: The table's database.
        ranks: Places in rising order, below the number of all values.
        type_: Type of the values.
    """
    found, before = [np.zeros(0, type_.to_pandas_dtype())], 0
    for batch in database.batches("select value, count from counted order by value"):
        ends = before + np.cumsum(batch.column(1).to_numpy())
        here = np.array([rank for rank in ranks if before <= rank < ends[-1]], np.int64)
        found.append(batch.column(0).to_numpy()[np.searchsorted(ends, here, side="right")])
        before = int(ends[-1])
    return np.concatenate(found)


@dataclass(frozen=True)
class SplitColumn:
    """The column of texts whose values say which split a row is in.

    Attributes:
        place: Number of the column among those of keys.
        name: Name of the column.
        values: Value of each split.
    """

    place: int
    name: str
    values: tuple[str, ...]

    @classmethod
    def of(cls, layout: BlockLayout, rule: SplitRule) -> SplitColumn | None:
        """Returns the column of a rule; None where no column says it.

        Raises:
            UserError: Rows have no such column.
        """
        if rule.kind != "column":
            return None
        for place, column in enumerate(layout.ids):
            if column.role == "split" and column.name == rule.column:
                return cls(place, column.name, rule.values)
        raise UserError(
            f"the split (--split) is by the column {rule.column!r}, which the rows do not have: name another"
        )

    def keys(self) -> tuple[int, ...]:
        """Returns the key of each split."""
        return tuple(text_keys(value_texts(pa.array(self.values, pa.string()))).tolist())

    def require_known(self, ids: IdColumn, place: str) -> None:
        """Makes sure that all values of a block are those of splits.

        Args:
            ids: The column in the block.
            place: Where the block's input is, for the error.

        Raises:
            UserError: A value is missing or is none of them.
        """
        assert ids.texts is not None, "the values of a splits' column are texts"
        found = [None, *ids.texts.to_pylist()[1:]]
        allowed = value_texts(pa.array(self.values, pa.string())).to_pylist()
        unknown = {code for code, value in enumerate(found) if value not in allowed}
        first = next((code for code in np.unique(ids.codes).tolist() if code in unknown), None)
        if first is not None:
            value = repr(found[first]) if first else "no value"
            raise UserError(
                f"{place}: the column {self.name!r} has {value} in some row: it must be one of "
                f"{', '.join(self.values)}, which say the row's split (--split column:{self.name}=...)"
            )


def row_rule(rule: SplitRule, layout: BlockLayout, source_rows: Sequence[int], times: Sequence[int]) -> RowRule:
    """Returns which rows are in which split.

    Args:
        rule: How rows are divided.
        layout: The columns of the blocks.
        source_rows: Number of well-formed rows of each input, in order.
        times: The result of :func:`split_times`, of a rule by time.
    """
    if rule.needs_time:
        return ByTime(time_column(layout, rule), tuple(times))
    by_column = SplitColumn.of(layout, rule)
    if by_column is not None:
        return ByColumn(by_column.place, by_column.keys())
    return ByPlace(rule.bounds(source_rows))
