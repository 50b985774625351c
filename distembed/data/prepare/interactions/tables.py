"""Writes interactions as the Parquet files of a dataset: a row each, or a row for a stretch of a user's history.

Ids are given by frequency over all rows, equal ones by the text. As in every dataset with a vocabulary, id 0 is a
missing value and id 1 an unknown one, which no row has: all users and items are known when a dataset is prepared, also
those of the test, since what is recommended is a known catalogue.

Row groups of long histories have fewer rows (:func:`distembed.data.prepare.write_parquet.rows_per_group`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from distembed.data.dataset.manifest import Vocabulary
from distembed.data.dataset.schema import USER
from distembed.data.prepare.count import Database
from distembed.data.prepare.interactions.options import RATING, InteractionColumns
from distembed.data.prepare.interactions.windows import Windows, entries
from distembed.data.prepare.progress import ProgressCallback, ProgressUpdate
from distembed.data.prepare.vocabulary import FIRST_ID, MISSING_ID, VOCABULARY_GROUP_ROWS
from distembed.data.prepare.write_parquet import (
    ROW_GROUP_ROWS,
    FilePlan,
    WrittenFile,
    plan_files,
    rows_per_group,
    write_file,
)

_VOCABULARY = pa.schema([("id", pa.int64()), ("key", pa.string()), ("count", pa.int64())])


def write_text_vocabulary(database: Database, folder: Path, name: str, number: int) -> Vocabulary:
    """Gives ids to the values of a column that occur, in a table ``ids0``, ``ids1`` ..., and writes them down.

    Args:
        database: Database with the tables of :mod:`~distembed.data.prepare.interactions.reading`.
        folder: Dataset folder, which has a folder ``vocabulary``.
        name: Name of the column in the dataset.
        number: Number of the column in the database.
    """
    database.run(
        f"create table ids{number} as select row_number() over (order by count(*) desc, key) + {FIRST_ID - 1} as id, "
        f"code, key, count(*) as count from rows join keys{number} on k{number} = code group by code, key"
    )
    batches = database.batches(f"select id, key, count from ids{number} order by id")
    table = pa.Table.from_batches(batches, _VOCABULARY)
    file = f"vocabulary/{name}.parquet"
    pq.write_table(table, folder / file, compression="zstd", row_group_size=VOCABULARY_GROUP_ROWS)
    (num_missing,) = database.row(f"select count(*) from rows where k{number} = 0")
    return Vocabulary(file, len(table), 0, 0, num_missing)


@dataclass(frozen=True, eq=False)
class EncodedInteractions:
    """What is known of every interaction, in ids and numbers.

    Attributes:
        ids: Ids by column: ``user``, ``item``, then others.
        dense: Numbers by column, NaN where missing.
        ratings: Ratings; 1 where there are none.
        parts: Number of each row's split.
    """

    ids: Mapping[str, NDArray[np.int32]]
    dense: Mapping[str, NDArray[np.float32]]
    ratings: NDArray[np.float32]
    parts: NDArray[np.uint8]

    @property
    def has_missing(self) -> bool:
        """Whether a number is missing."""
        return any(bool(np.isnan(values).any()) for values in self.dense.values())


def encoded_interactions(database: Database, columns: InteractionColumns, order: str) -> EncodedInteractions:
    """Returns the table ``rows`` with the ids of the vocabularies, in an order."""
    keys = range(len(columns.keys))
    wanted = [f"coalesce(ids{n}.id, {MISSING_ID})::int as k{n}" for n in keys]
    wanted += [f"d{n}" for n in range(len(columns.dense))]
    joins = " ".join(f"left join ids{n} on k{n} = ids{n}.code" for n in keys)
    rating = "1::float" if columns.rating is None else "rating"
    query = f"select {', '.join(wanted)}, {rating} as rating, part from rows {joins} order by {order}"
    table = pa.Table.from_batches(database.batches(query))
    arrays = {name: table[name].to_numpy() for name in table.column_names}
    return EncodedInteractions(
        ids={name: arrays[f"k{n}"] for n, name in enumerate(columns.key_names)},
        dense={name: arrays[f"d{n}"] for n, name in enumerate(columns.dense)},
        ratings=arrays["rating"],
        parts=arrays["part"],
    )


class Rows(Protocol):
    """The rows of a split, which can be had as tables.

    Attributes:
        num_rows: Number of rows.
        group_rows: Rows of a row group.
        schema: The columns.
    """

    @property
    def num_rows(self) -> int: ...

    @property
    def group_rows(self) -> int: ...

    @property
    def schema(self) -> pa.Schema: ...

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
        return rows_per_group(self.windows.num_entries / max(1, len(self.windows)))

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


def write_splits(
    folder: Path, splits: Mapping[str, Rows], label: str | None, report: ProgressCallback
) -> dict[str, list[WrittenFile]]:
    """Writes the files of all splits.

    Args:
        folder: Dataset folder.
        splits: The rows of each split, by name.
        label: Name of the label's column, if there is one.
        report: Function that is called with the progress.
    """
    total, done = sum(rows.num_rows for rows in splits.values()), 0
    written: dict[str, list[WrittenFile]] = {}
    for name, rows in splits.items():
        (folder / name).mkdir()
        written[name] = []
        for plan in plan_files(name, 0, rows.num_rows, rows.group_rows):
            written[name].append(write_file(folder, plan, rows.schema, label, _groups(plan, rows)))
            done += plan.stop - plan.start
            report(ProgressUpdate("write", done, total, done))
    return written


def _groups(plan: FilePlan, rows: Rows) -> Iterator[Any]:
    for start in range(plan.start, plan.stop, rows.group_rows):
        yield rows.table(start, min(start + rows.group_rows, plan.stop))
