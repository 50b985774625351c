"""Writes interactions as the Parquet files of a dataset: a row each, or a row for a stretch of a user's history.

Ids are given by frequency over all rows, equal ones by the text. As in every dataset with a vocabulary, id 0 is a
missing value and id 1 an unknown one, which no row has: all users and items are known when a dataset is prepared, also
those of the test, since what is recommended is a known catalogue.

Row groups of long histories have fewer rows (:func:`distembed.data.prepare.write_parquet.rows_per_group`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def write_text_vocabularies(database: Database, folder: Path, names: Sequence[str]) -> dict[str, Vocabulary]:
    """Gives ids to the values that occur, in tables ``ids0``, ``ids1`` ..., and writes them down.

    Args:
        database: Database with the tables of :mod:`~distembed.data.prepare.interactions.reading`.
        folder: Dataset folder.
        names: Names of the columns ``k0``, ``k1`` ... in the dataset.
    """
    (folder / "vocabulary").mkdir()
    vocabularies = {}
    for n, name in enumerate(names):
        database.run(
            f"create table ids{n} as select row_number() over (order by count(*) desc, key) + {FIRST_ID - 1} as id, "
            f"code, key, count(*) as count from rows join keys{n} on k{n} = code group by code, key"
        )
        batches = database.batches(f"select id, key, count from ids{n} order by id")
        table = pa.Table.from_batches(batches, _VOCABULARY)
        file = f"vocabulary/{name}.parquet"
        pq.write_table(table, folder / file, compression="zstd", row_group_size=VOCABULARY_GROUP_ROWS)
        (num_missing,) = database.row(f"select count(*) from rows where k{n} = 0")
        vocabularies[name] = Vocabulary(file, len(table), 0, 0, num_missing)
    return vocabularies


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


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a split.

    Attributes:
        num_rows: Number of rows.
        group_rows: Rows of a row group.
        table: Function that returns the rows ``[start, stop)``.
    """

    num_rows: int
    group_rows: int
    table: Callable[[int, int], pa.Table]


def rating_rows(chosen: EncodedInteractions, part: int) -> Rows:
    """Returns a row for each interaction of a split."""
    columns = {RATING: chosen.ratings, **chosen.dense, **chosen.ids}
    places = np.flatnonzero(chosen.parts == part)

    def table(start: int, stop: int) -> pa.Table:
        return pa.table({name: _array(values[places[start:stop]]) for name, values in columns.items()})

    return Rows(len(places), ROW_GROUP_ROWS, table)


def sequence_rows(chosen: EncodedInteractions, windows: Windows) -> Rows:
    """Returns a row for each window: the user, and lists of equal length of everything else."""
    columns = {name: values for name, values in {**chosen.ids, **chosen.dense}.items() if name != USER}

    def table(start: int, stop: int) -> pa.Table:
        places, offsets = entries(windows, start, stop)
        begins = pa.array(offsets.astype(np.int32))
        lists = {name: pa.ListArray.from_arrays(begins, _array(values[places])) for name, values in columns.items()}
        return pa.table({USER: pa.array(chosen.ids[USER][windows.starts[start:stop]]), **lists})

    return Rows(len(windows), rows_per_group(windows.num_entries / max(1, len(windows))), table)


def _array(values: NDArray[Any]) -> pa.Array:
    """Returns ids or numbers, null where a number is NaN."""
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
            written[name].append(write_file(folder, plan, rows.table(0, 0).schema, label, _groups(plan, rows)))
            done += plan.stop - plan.start
            report(ProgressUpdate("write", done, total, done))
    return written


def _groups(plan: FilePlan, rows: Rows) -> Iterator[pa.Table]:
    for start in range(plan.start, plan.stop, rows.group_rows):
        yield rows.table(start, min(start + rows.group_rows, plan.stop))
