"""Stretches of users' histories, as rows of a dataset of sequences.

Interactions are sorted by user, split and time, so that a row is a range of them::

    a user's items     1 2 3 4 5 6 7 8 9      the last two are to be predicted: 8 validates, 9 tests
    max_length 3       [1 2 3 4|       ]      training, ``all``: the first window ends where the next begins, so that
                             [4 5 6 7]        each item but the first is the last of three at most, and predicted once
                             [4 5 6 7]        training, ``latest``
                       [1 2 3 4 5 6 7 8]      validation: the whole history, with the item to predict
                       [1 2 3 4 5 6 7 8 9]    test
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from distembed.data.dataset.manifest import Vocabulary
from distembed.data.dataset.schema import USER, CategoricalFeature, Schema
from distembed.data.prepare.count import Database
from distembed.data.prepare.interactions.options import (
    ALL,
    RATING,
    TEST,
    TRAIN,
    VALIDATION,
    InteractionColumns,
    SequenceOptions,
)
from distembed.data.prepare.options import ProgressCallback, ProgressUpdate
from distembed.data.prepare.split import SPLIT_NAMES
from distembed.data.prepare.write_parquet import ROW_GROUP_ROWS, WrittenFile, plan_files, rows_per_group, write_file
from distembed.data.table.vocabulary import FIRST_ID, VOCABULARY_GROUP_ROWS


@dataclass(frozen=True, eq=False)
class Windows:
    """The rows of a split."""

    starts: NDArray[np.int64]  # where each row begins among the sorted interactions
    stops: NDArray[np.int64]  # where it ends

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def num_entries(self) -> int:
        return int((self.stops - self.starts).sum())

    @property
    def mean_entries(self) -> float:
        """Mean number of interactions of a row; 0 without rows."""
        return self.num_entries / max(1, len(self))


def training_windows(users: NDArray[np.int32], parts: NDArray[np.uint8], max_length: int, windows: str) -> Windows:
    """Returns the training rows, of 2 to ``max_length + 1`` items; users and their splits are ascending."""
    bounds = user_bounds(users)
    begins = bounds[:-1]
    ends = begins + np.add.reduceat(parts == TRAIN, begins, dtype=np.int64)
    lengths = ends - begins
    begins, ends, lengths = begins[lengths > 1], ends[lengths > 1], lengths[lengths > 1]
    if windows != ALL:
        return Windows(np.maximum(begins, ends - max_length - 1), ends)
    # from the end, so that only the first window of a user may be short
    counts = -(-(lengths - 1) // max_length)
    number_from_end = np.repeat(np.cumsum(counts), counts) - np.arange(counts.sum()) - 1
    stops = np.repeat(ends, counts) - number_from_end * max_length
    return Windows(np.maximum(np.repeat(begins, counts), stops - max_length - 1), stops)


def evaluation_windows(users: NDArray[np.int32], parts: NDArray[np.uint8], part: int) -> Windows:
    """Returns a row for each interaction of a split that is not its user's first: the whole history, with itself."""
    bounds = user_bounds(users)
    begins = np.repeat(bounds[:-1], np.diff(bounds))
    targets = np.flatnonzero((parts == part) & (np.arange(len(users)) > begins))
    return Windows(begins[targets], targets + 1)


def user_bounds(sorted_users: NDArray[np.int32]) -> NDArray[np.int64]:
    """Returns where each user's interactions begin, and where the last one's end."""
    return np.append(np.flatnonzero(np.diff(sorted_users, prepend=-1)), len(sorted_users))


def entries(windows: Windows, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the interactions of some rows end to end, and where each row begins among them and the last one ends."""
    starts, lengths = windows.starts[start:stop], windows.stops[start:stop] - windows.starts[start:stop]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1]), offsets


_COUNTED = pa.schema([("code", pa.int32()), ("key", pa.string()), ("count", pa.int64())])


def write_text_vocabularies(
    database: Database, folder: Path, names: Sequence[str]
) -> tuple[dict[str, Vocabulary], NDArray[np.int32]]:
    """Gives ids to the values of ``k0``, ``k1`` ..., and writes them down; returns the id of each code too."""
    (folder / "vocabulary").mkdir()
    vocabularies = {}
    num_rows, last_code = database.row("select (select count(*) from rows), (select max(code) from keys)")
    ids = np.zeros(last_code + 1, np.int32)
    for n, name in enumerate(names):
        counted = f"(select k{n} as code, count(*) as count from rows where k{n} is not null group by k{n})"
        query = f"select code, key, count from {counted} join keys using (code) order by count desc, key"
        table = pa.Table.from_batches(database.batches(query), _COUNTED)
        own = np.arange(FIRST_ID, FIRST_ID + len(table))
        ids[table["code"].to_numpy()] = own
        file = f"vocabulary/{name}.parquet"
        columns = {"id": own, "key": table["key"], "count": table["count"]}
        pq.write_table(pa.table(columns), folder / file, compression="zstd", row_group_size=VOCABULARY_GROUP_ROWS)
        num_missing = num_rows - (pc.sum(table["count"]).as_py() or 0)
        vocabularies[name] = Vocabulary(file, len(table), 0, 0, num_missing)
    return vocabularies, ids


@dataclass(frozen=True, eq=False)
class EncodedInteractions:
    """The columns of all interactions, in ids and numbers."""

    ids: Mapping[str, NDArray[np.int32]]  # by column: user, item, others
    dense: Mapping[str, NDArray[np.float32]]  # by column, NaN where missing
    ratings: NDArray[np.float32]  # 1 where there are none
    parts: NDArray[np.uint8]  # number of each row's split
    sizes: Mapping[str, int]  # number of ids of each table

    @property
    def has_missing(self) -> bool:
        return any(bool(np.isnan(values).any()) for values in self.dense.values())


def encoded_interactions(
    database: Database, columns: InteractionColumns, query: str, ids: NDArray[np.int32], sizes: Mapping[str, int]
) -> EncodedInteractions:
    """Returns rows with the ids of the vocabularies, given SQL of the rows and their order, and the id of each code."""
    names = [f"coalesce(k{n}, 0) as k{n}" for n in range(len(columns.keys))]
    names += [f"d{n}" for n in range(len(columns.dense))]
    rating = "1::float" if columns.rating is None else "rating"
    batches = database.batches(f"select {', '.join(names)}, {rating} as rating, part {query}")
    table = pa.Table.from_batches(batches)
    arrays = {name: table[name].to_numpy() for name in table.column_names}
    return EncodedInteractions(
        ids={name: ids[arrays[f"k{n}"]] for n, name in enumerate(columns.key_names)},
        dense={name: arrays[f"d{n}"] for n, name in enumerate(columns.dense)},
        ratings=arrays["rating"],
        parts=arrays["part"],
        sizes=sizes,
    )


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a split."""

    num_rows: int
    group_rows: int  # of a row group
    table: Callable[[int, int], pa.Table]  # function that returns the rows [start, stop)


def rating_rows(chosen: EncodedInteractions) -> tuple[dict[str, Rows], Schema]:
    """Returns a row for each interaction, by split, and the schema."""
    columns = {RATING: chosen.ratings, **chosen.dense, **chosen.ids}
    features = tuple(CategoricalFeature(name, size) for name, size in chosen.sizes.items())
    schema = Schema(RATING, tuple(chosen.dense), features, label_kind="number", missing_dense=chosen.has_missing)

    def rows(part: int) -> Rows:
        places = np.flatnonzero(chosen.parts == part)

        def table(start: int, stop: int) -> pa.Table:
            own = places[start:stop]
            return pa.table({name: pa.array(values[own], from_pandas=True) for name, values in columns.items()})

        return Rows(len(places), ROW_GROUP_ROWS, table)

    return {name: rows(part) for part, name in enumerate(SPLIT_NAMES)}, schema


def sequence_rows(
    chosen: EncodedInteractions, options: SequenceOptions
) -> tuple[dict[str, Rows], Schema, dict[str, Windows]]:
    """Returns a row for each window, by split: the user, and lists of equal length of all else; and the schema."""
    users, parts = chosen.ids[USER], chosen.parts
    windows = {"train": training_windows(users, parts, options.max_length, options.windows)}
    windows |= {SPLIT_NAMES[part]: evaluation_windows(users, parts, part) for part in (VALIDATION, TEST)}
    columns = {name: values for name, values in {**chosen.ids, **chosen.dense}.items() if name != USER}
    mean = windows["train"].mean_entries
    lists = {name: CategoricalFeature(name, size, True, mean) for name, size in chosen.sizes.items()}
    features = (CategoricalFeature(USER, chosen.sizes[USER]), *(lists[name] for name in lists if name != USER))
    dense = tuple(chosen.dense)
    schema = Schema(None, (), features, dense_sequences=dense, missing_dense=chosen.has_missing)

    def rows(own: Windows) -> Rows:
        def table(start: int, stop: int) -> pa.Table:
            places, offsets = entries(own, start, stop)
            arrays = {name: pa.array(values[places], from_pandas=True) for name, values in columns.items()}
            begins = pa.array(offsets.astype(np.int32))
            made = {name: pa.ListArray.from_arrays(begins, array) for name, array in arrays.items()}
            return pa.table({USER: users[own.starts[start:stop]], **made})

        return Rows(len(own), rows_per_group(own.mean_entries), table)

    return {name: rows(own) for name, own in windows.items()}, schema, windows


def write_splits(
    folder: Path, splits: Mapping[str, Rows], label: str | None, report: ProgressCallback
) -> dict[str, list[WrittenFile]]:
    """Writes the files of all splits."""
    total, done = sum(rows.num_rows for rows in splits.values()), 0
    written: dict[str, list[WrittenFile]] = {}
    for name, rows in splits.items():
        (folder / name).mkdir()
        written[name] = []
        for plan in plan_files(name, rows.num_rows, rows.group_rows):
            starts = range(plan.start, plan.stop, rows.group_rows)
            groups = (rows.table(start, min(start + rows.group_rows, plan.stop)) for start in starts)
            written[name].append(write_file(folder / plan.path, plan, rows.table(0, 0).schema, label, groups))
            done += plan.stop - plan.start
            report(ProgressUpdate("write", done, total, done))
    return written
