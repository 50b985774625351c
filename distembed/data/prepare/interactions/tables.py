"""Writes interactions as the Parquet files of a dataset: a row each, or a row for a stretch of a user's history.

Row groups of long histories have fewer rows (:func:`distembed.data.prepare.write_parquet.rows_per_group`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distembed.data.dataset.schema import ITEM, USER
from distembed.data.prepare.interactions.options import RATING
from distembed.data.prepare.interactions.windows import Windows, entries
from distembed.data.prepare.progress import ProgressCallback, ProgressUpdate
from distembed.data.prepare.write_parquet import (
    ROW_GROUP_ROWS,
    FilePlan,
    WrittenFile,
    plan_files,
    rows_per_group,
    write_file,
)


@dataclass(frozen=True, eq=False)
class EncodedInteractions:
    """What is known of every interaction, in ids and numbers.

    Attributes:
        ids: Ids by column: ``user``, ``item``, then others.
        dense: Numbers by column, NaN where missing.
        ratings: Ratings.
    """

    ids: Mapping[str, NDArray[np.int32]]
    dense: Mapping[str, NDArray[np.float32]]
    ratings: NDArray[np.float32]


class Rows(Protocol):
    """The rows of a split, which can be had as tables."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""

    @property
    def group_rows(self) -> int:
        """Rows of a row group."""

    @property
    def schema(self) -> pa.Schema:
        """The columns."""

    def table(self, start: int, stop: int) -> pa.Table:
        """Returns the rows ``[start, stop)``."""


@dataclass(frozen=True, eq=False)
class RatingRows:
    """A row for each of some interactions.

    Attributes:
        columns: What is known of every interaction.
        rows: Numbers of those that are taken, in order.
    """

    columns: EncodedInteractions
    rows: NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def group_rows(self) -> int:
        return ROW_GROUP_ROWS

    @property
    def schema(self) -> pa.Schema:
        dense = [(name, pa.float32()) for name in self.columns.dense]
        return pa.schema([(RATING, pa.float32()), *dense, *((name, pa.int32()) for name in self.columns.ids)])

    def table(self, start: int, stop: int) -> pa.Table:
        rows = self.rows[start:stop]
        dense = [_numbers(values[rows]) for values in self.columns.dense.values()]
        ids = [pa.array(values[rows]) for values in self.columns.ids.values()]
        return pa.table([pa.array(self.columns.ratings[rows]), *dense, *ids], schema=self.schema)


@dataclass(frozen=True, eq=False)
class SequenceRows:
    """A row for each of some windows: the user, and lists of equal length of everything else.

    Attributes:
        columns: What is known of every interaction, in sorted order.
        windows: The rows.
    """

    columns: EncodedInteractions
    windows: Windows

    @property
    def num_rows(self) -> int:
        return len(self.windows)

    @property
    def group_rows(self) -> int:
        mean_entries = self.windows.num_entries / max(1, len(self.windows))
        return rows_per_group(mean_entries)

    @property
    def schema(self) -> pa.Schema:
        lists = [(name, pa.list_(pa.int32())) for name in self.columns.ids if name != USER]
        lists += [(name, pa.list_(pa.float32())) for name in self.columns.dense]
        return pa.schema([(USER, pa.int32()), *lists])

    def table(self, start: int, stop: int) -> pa.Table:
        places, offsets = entries(self.windows, start, stop)
        begins = pa.array(offsets.astype(np.int32))
        users = pa.array(self.columns.ids[USER][self.windows.starts[start:stop]])
        values = [pa.array(ids[places]) for name, ids in self.columns.ids.items() if name != USER]
        values += [_numbers(numbers[places]) for numbers in self.columns.dense.values()]
        lists = [pa.ListArray.from_arrays(begins, one) for one in values]
        return pa.table([users, *lists], schema=self.schema)


def _numbers(values: NDArray[np.float32]) -> pa.Array:
    """Returns numbers, null where they are NaN."""
    return pa.array(values, from_pandas=True)


@dataclass(frozen=True)
class TableWriter:
    """Writes the splits of a dataset.

    Attributes:
        folder: Dataset folder.
        report: Function that is called with the progress.
    """

    folder: Path
    report: ProgressCallback

    def write(self, splits: Mapping[str, Rows], label: str | None) -> dict[str, list[WrittenFile]]:
        """Writes the files of all splits.

        Args:
            splits: The rows of each split, by name.
            label: Name of the label's column, if there is one.
        """
        total, done = sum(rows.num_rows for rows in splits.values()), 0
        written: dict[str, list[WrittenFile]] = {}
        for name, rows in splits.items():
            (self.folder / name).mkdir()
            written[name] = []
            for plan in plan_files(name, 0, rows.num_rows, rows.group_rows):
                written[name].append(write_file(self.folder, plan, rows.schema, label, _groups(plan, rows)))
                done += plan.stop - plan.start
                self.report(ProgressUpdate("write", done, total, done))
        return written


def _groups(plan: FilePlan, rows: Rows) -> Iterator[Any]:
    for start in range(plan.start, plan.stop, rows.group_rows):
        yield rows.table(start, min(start + rows.group_rows, plan.stop))


def list_columns(columns: EncodedInteractions) -> list[str]:
    """Returns the columns that are lists in a dataset of sequences, the items first."""
    return [ITEM, *(name for name in columns.ids if name not in (USER, ITEM))]
