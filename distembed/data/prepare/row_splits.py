"""Which rows of each block are in which split.

Rows keep the order of the input in a split: row r of a split is the r-th of all rows that are in it, wherever they lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from distembed.base.errors import UserError
from distembed.data.prepare.blocks import BlockLayout, ParsedBlock
from distembed.data.prepare.count import Database
from distembed.data.prepare.split import TRAIN, SplitRule
from distembed.data.prepare.spool import SpooledBlock
from distembed.data.table.text_keys import text_keys
from distembed.data.table.value_texts import value_texts

Rows: TypeAlias = slice | NDArray[np.int64]
"""Rows of a block in rising order: a range where they follow each other, else their numbers."""


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
        """Number of rows of each split."""
        found: list[int] = self.counts.sum(axis=0).tolist()
        return found

    def rows(self, block: SpooledBlock, split: int) -> Rows:
        """Returns the rows of a block that are in a split, given by its number."""
        place = split_column(self.rule, block.layout)
        if self.rule.kind == "time":
            found = np.searchsorted(np.array(self.bounds, np.int64), block.numbers(place), side="right")
            return np.flatnonzero(found == split)
        if self.rule.kind == "column":
            is_split = block.keys(place) == np.uint64(self.bounds[split])
            is_split[0] = False
            return np.flatnonzero(is_split[block.codes(place)])
        start, stop = np.clip(self.bounds[split : split + 2], block.first_row, block.stop_row) - block.first_row
        return slice(int(start), int(stop))

    def train_rows(self, block: SpooledBlock) -> Rows:
        """Returns the rows of a block that train."""
        return self.rows(block, TRAIN) if self.rule.trains else slice(0, 0)

    def parts(self, split: int, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Returns where rows ``[start, stop)`` of a split lie: blocks, and which rows of the split in the block."""
        stops = np.cumsum(self.counts[:, split])
        starts = stops - self.counts[:, split]
        first, last = np.maximum(starts, start), np.minimum(stops, stop)
        here = np.flatnonzero(first < last)
        return list(zip(here.tolist(), (first - starts)[here].tolist(), (last - starts)[here].tolist(), strict=True))


def _num_rows(rows: Rows) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def split_column(rule: SplitRule, layout: BlockLayout) -> int:
    """Returns the number of the column that says which split a row is in; -1 where the order of the input does.

    By time, it is a number among the columns of numbers; by a column of texts, among those of keys.

    Raises:
        UserError: Rows have no such column.
    """
    if rule.kind == "time":
        places = [place for place, number in enumerate(layout.numbers) if number.role == "time"]
        lacking = (
            f"in the order of time ({', '.join(rule.names)}), and rows have no time column: name one in the schema, or "
            "choose another split"
        )
    elif rule.kind == "column":
        named = enumerate(layout.ids)
        places = [place for place, column in named if column.role == "split" and column.name == rule.column]
        lacking = f"by the column {rule.column!r}, which the rows do not have: name another"
    else:
        return -1
    if not places:
        raise UserError(f"the split (--split) is {lacking}")
    return places[0]


def row_splits(
    rule: SplitRule, blocks: Sequence[SpooledBlock], source_rows: Sequence[int], folder: Path, memory_bytes: int
) -> RowSplits:
    """Returns which rows are in which split, given the number of well-formed rows of each input.

    By shares in the order of time, a split begins at the time of the row with which its share begins, so that rows of
    equal times stay together. Times are counted in the memory, and in the folder where that does not suffice.
    """
    if rule.kind == "column":
        return RowSplits(rule, blocks, tuple(text_keys(_values(rule)).tolist()))
    if rule.kind != "time" or rule.times or not blocks:
        return RowSplits(rule, blocks, rule.times if rule.kind == "time" else rule.bounds(source_rows))
    place = split_column(rule, blocks[0].layout)
    with Database(folder, memory_bytes) as database:
        total = count_numbers(database, (block.numbers(place) for block in blocks), pa.int64())
        ranks = [int(total * sum(rule.shares[:count])) for count in range(1, len(rule.shares))]
        return RowSplits(rule, blocks, tuple(values_at_ranks(database, ranks, pa.int64()).tolist()))


def _values(rule: SplitRule) -> pa.Array:
    """Returns the value of each split in the column of a rule by column, as blocks have it."""
    return value_texts(pa.array(rule.values, pa.string()))


def require_known_splits(rule: SplitRule, layout: BlockLayout, block: ParsedBlock, place: str) -> None:
    """Makes sure that each row of a block, from the input ``place``, is in a split of a rule by column.

    Raises:
        UserError: A value is missing or is none of the rule's.
    """
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


def count_numbers(database: Database, parts: Iterable[NDArray[Any]], type_: pa.DataType) -> int:
    """Makes the table ``counted`` of distinct values and their counts, and returns the number of all values."""
    schema = pa.schema([("value", type_), ("count", pa.int64())])
    counts = (np.unique(part, return_counts=True) for part in parts)
    batches = (pa.record_batch([pa.array(values), pa.array(count)], schema=schema) for values, count in counts)
    database.add("counted", batches, schema, "select value, sum(count)::bigint as count from given group by value")
    return int(database.row("select coalesce(sum(count), 0)::bigint from counted")[0])


def values_at_ranks(database: Database, ranks: Sequence[int], type_: pa.DataType) -> NDArray[Any]:
    """Returns the values at some places, from 0 and in rising order, of the sorted values of the table ``counted``."""
    found, before = [np.zeros(0, type_.to_pandas_dtype())], 0
    for batch in database.batches("select value, count from counted order by value"):
        ends = before + np.cumsum(batch.column(1).to_numpy())
        here = np.array([rank for rank in ranks if before <= rank < ends[-1]], np.int64)
        found.append(batch.column(0).to_numpy()[np.searchsorted(ends, here, side="right")])
        before = int(ends[-1])
    return np.concatenate(found)
