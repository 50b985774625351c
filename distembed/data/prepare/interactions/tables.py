"""Interactions from files to tables of a database, and from these to the rows of each split.

A row is malformed, for the first of these reasons that holds:

- ``columns``, ``text``, ``json``: a line is no row (``table/text_rows.py``);
- ``user``, ``item``: it is missing;
- ``rating``, ``time``: it is missing, or no finite number;
- ``attribute``: a number among the attributes is there and not finite;
- ``items``: a line of a user and items has no item.

The table ``rows`` has a row for each interaction, and ``keys`` the text of each code::

    rows  place   part   k0 k1 k2 ...                rating   time, whole                   d0 d1 ...
          0, 1,   split  codes of user, item and     float32  float64, and an int64 that    numbers, NaN
          2 ...          categorical values, null             tells equal ones apart        where missing
                         where missing
    keys  code, key

A sequence has the time since the user's first chosen interaction, subtracted in 64 bits: float32 resolves the seconds
since 1970 to 128 seconds.

Texts are numbered block by block: a text has another code in each block, and its first code in the end.

Of sequences, interactions are sorted by user, split and time, so that a dataset's row is a range of them::

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

from distembed.data.dataset.manifest import Rejected, SourceFile, Vocabulary
from distembed.data.dataset.schema import USER, CategoricalFeature, Schema
from distembed.data.prepare.count import Database
from distembed.data.prepare.ingest import RejectedRows
from distembed.data.prepare.interactions.options import (
    ALL,
    RATING,
    TEST,
    TRAIN,
    VALIDATION,
    InteractionColumns,
    SequenceOptions,
)
from distembed.data.prepare.options import SPLIT_NAMES, ProgressCallback, ProgressUpdate
from distembed.data.prepare.table.inputs import TableInput
from distembed.data.prepare.table.source import NamedRows, RowReader
from distembed.data.prepare.write_parquet import ROW_GROUP_ROWS, WrittenFile, plan_files, rows_per_group, write_file
from distembed.data.table.keys import coded
from distembed.data.table.numbers import Bools, dense_values, ordered_times, transformed
from distembed.data.table.schema import TableSchema
from distembed.data.table.values import value_texts
from distembed.data.table.vocabulary import FIRST_ID, VOCABULARY_GROUP_ROWS

REASONS = ("columns", "text", "json", "user", "item", "rating", "time", "attribute", "items")

_LINE = {
    "categorical": {"line": {}},
    "text": {"header": False, "columns": ["line"], "separator": "\x1f", "quote": None},
}
"""Schema of lines of a user and items: text whose separator no line has."""
_BLOCK_BYTES = 16 << 20
_MISSING = pa.array([""])
_TEXTS = pa.schema({"number": pa.int32(), "code": pa.int32(), "key": pa.string()})

Wrong = dict[str, Bools]  # reason -> which rows are malformed by it


@dataclass(frozen=True)
class InteractionInput:
    """The files to read."""

    inputs: Sequence[TableInput]
    parts: Sequence[int]  # number of the split that each input is for
    columns: InteractionColumns | None  # None for lines of a user and items
    max_rejected: float

    @property
    def schema(self) -> TableSchema:
        if self.columns is None:
            return TableSchema.from_json(_LINE, "a line")
        keys, numbers, time = self.columns.keys, self.columns.numbers, self.columns.time
        dense = [name for name in numbers if name != time]
        values = {"dense": dict.fromkeys(dense), "categorical": dict.fromkeys(keys)}
        values |= {"time": {"column": time, "name": time}} if time is not None else {}
        text = {"header": self.columns.has_header, "newlines_in_values": self.columns.newlines_in_values}
        return TableSchema.from_json({**values, "text": text}, "the columns")

    @property
    def wanted(self) -> str:
        if self.columns is None:
            return "A line is a user and one or more items, separated by blanks."
        roles = [("rating", self.columns.rating), ("time", self.columns.time)]
        numbers = "".join(f", a number for the {role} ({name})" for role, name in roles if name is not None)
        return (
            f"A row is a user ({self.columns.user_column}), an item ({self.columns.item_column}){numbers}; "
            "with --newlines-in-values a value in quotation marks may have several lines."
        )


def read_interactions(
    database: Database, interactions: InteractionInput, folder: Path, memory_bytes: int, report: ProgressCallback
) -> tuple[tuple[SourceFile, ...], Rejected]:
    """Fills the tables ``rows`` and ``keys``; returns the manifest's entries of inputs and malformed rows."""
    reader = RowReader(interactions.inputs, interactions.schema)
    inputs = [table_input.raw for table_input in interactions.inputs]
    rejected = RejectedRows(folder, inputs, REASONS, interactions.max_rejected, interactions.wanted)
    columns = interactions.columns or InteractionColumns()
    types = {"place": pa.int64(), "part": pa.uint8()} | {f"k{key}": pa.int32() for key in range(len(columns.keys))}
    types |= {"rating": pa.float32()} if columns.rating is not None else {}
    types |= {"time": pa.float64(), "whole": pa.int64()} if columns.time is not None else {}
    schema = pa.schema(types | {f"d{dense}": pa.float32() for dense in range(len(columns.dense))})
    database.add("rows", [], schema)
    database.add("texts", [], _TEXTS)
    num_kept, num_codes = 0, 1
    try:
        for rows in reader.blocks(min(_BLOCK_BYTES, memory_bytes // 32), report):
            keys, numbers, wrong = _listed(rows) if interactions.columns is None else _named(rows, interactions.columns)
            # written from the last reason to the first, which overwrites it
            first_reason = np.full(len(rows.lines), -1)
            for reason in reversed(list(wrong)):
                first_reason[wrong[reason]] = REASONS.index(reason)
            bad = [(row.line, row.reason, row.text) for row in rows.bad]
            bad_rows = np.flatnonzero(first_reason >= 0).tolist()
            bad += [(int(rows.lines[row]), REASONS[first_reason[row]], rows.text(row)) for row in bad_rows]
            for line, reason, raw in sorted(bad):
                rejected.add(rows.source, line, reason, raw)
            rejected.require_hope(sum(reader.num_lines))
            coded_keys: list[pa.Array] = []
            for number, column in enumerate(keys):
                codes = column.indices.dictionary_encode()  # in the order of the rows
                coded_keys.append(pc.add_checked(codes.indices, np.int32(num_codes)))
                texts = column.dictionary.take(codes.dictionary)
                new_codes = np.arange(num_codes, num_codes + len(texts), dtype=np.int32)
                new_texts = [np.full(len(texts), number), new_codes, texts]
                database.append("texts", pa.record_batch(new_texts, names=_TEXTS.names))
                num_codes += len(texts)
            row_numbers = np.arange(num_kept, num_kept + len(keys[0]))
            split_numbers = np.full(len(row_numbers), interactions.parts[rows.source], np.uint8)
            new_rows = [row_numbers, split_numbers, *coded_keys, *numbers]
            database.append("rows", pa.record_batch(new_rows, names=schema.names))
            num_kept += len(row_numbers)
    finally:
        rejected.close()
    rejected.require_few(sum(reader.num_lines))
    # A text has a code for each block that it is in; all are replaced by the first one.
    first_code = "min(code) over (partition by number, key) as first_code"
    database.run(f"create table keys as select code, key, {first_code} from texts")
    database.run("drop table texts")
    for n in range(len(columns.keys)):
        database.run(f"update rows set k{n} = first_code from keys where k{n} = code and code <> first_code")
    return reader.sources(rejected.by_source), rejected.counts()


def _listed(rows: NamedRows) -> tuple[list[pa.DictionaryArray], list[NDArray[np.generic]], Wrong]:
    """Parses lines ``user item item ...`` to a user and an item for each item, and a malformed mask for each reason."""
    lines = pc.fill_null(rows.columns["line"].cast(pa.string()), "")
    words = pc.ascii_split_whitespace(pc.utf8_trim_whitespace(lines))
    lengths = pc.list_value_length(words).to_numpy()
    is_empty = pc.equal(pc.list_element(words, 0), "").to_numpy(zero_copy_only=False) if len(words) else lengths > 0
    good = lengths > 1
    items = pc.list_flatten(pc.list_slice(words.filter(pa.array(good)), 1))
    users = pc.list_element(words.filter(pa.array(good)), 0).take(np.repeat(np.arange(good.sum()), lengths[good] - 1))
    return [_texts(users), _texts(items)], [], {"user": is_empty, "items": ~good}


def _named(
    rows: NamedRows, columns: InteractionColumns
) -> tuple[list[pa.DictionaryArray], list[NDArray[np.generic]], Wrong]:
    """Returns categorical and number columns of the well-formed rows, and a mask of all rows for each reason."""
    texts = [_texts(rows.columns[name]) for name in columns.keys]
    roles = zip(("user", "item"), texts, strict=False)
    wrong = {role: text.indices.is_null().to_numpy(zero_copy_only=False) for role, text in roles}
    numbers: list[NDArray[np.generic]] = []
    if columns.rating is not None:
        ratings, wrong["rating"] = dense_values(rows.columns[columns.rating], "none")
        wrong["rating"] |= np.isnan(ratings)
        numbers.append(ratings)
    if columns.time is not None:
        times, integers, wrong["time"] = ordered_times(rows.columns[columns.time])
        numbers += [times, integers]
    wrong["attribute"] = np.zeros(len(rows.lines), bool)
    for name in columns.dense:
        is_time = name == columns.time
        values, malformed = transformed(times, "none") if is_time else dense_values(rows.columns[name], "none")
        wrong["attribute"] |= malformed
        numbers.append(values)
    good = ~np.logical_or.reduce(list(wrong.values()))
    return [text.filter(pa.array(good)) for text in texts], [column[good] for column in numbers], wrong


def _texts(column: pa.Array) -> pa.DictionaryArray:
    """Dictionary-encodes the canonical texts of a column; missing values and empty texts are null."""
    values = coded(column, _MISSING)
    codes = pa.array(values.codes - 1, mask=values.codes == 0)
    return pa.DictionaryArray.from_arrays(codes, value_texts(values.distinct))


@dataclass(frozen=True, eq=False)
class Windows:
    """The rows of a split: row i has the interactions ``[starts[i], stops[i])`` of all, sorted by user and time."""

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def num_entries(self) -> int:
        return int((self.stops - self.starts).sum())

    @property
    def mean_entries(self) -> float:
        """Mean number of interactions of a row; 0 without rows."""
        return self.num_entries / max(1, len(self))


def training_windows(users: NDArray[np.int32], splits: NDArray[np.uint8], max_length: int, windows: str) -> Windows:
    """Returns training rows of 2 to ``max_length + 1`` items, as the module's drawing shows.

    ``users`` and ``splits`` describe the sorted interactions: users ascend, and so do the splits of each user. Users
    with fewer than two training items have no row.
    """
    bounds = user_bounds(users)
    begins = bounds[:-1]
    ends = begins + np.add.reduceat(splits == TRAIN, begins, dtype=np.int64)
    lengths = ends - begins
    begins, ends, lengths = begins[lengths > 1], ends[lengths > 1], lengths[lengths > 1]
    if windows != ALL:
        return Windows(np.maximum(begins, ends - max_length - 1), ends)
    # Windows are laid out from a user's end in steps of max_length, so that only the first window may be short. Users
    # of 3 and 6 items with max_length 2: num_windows 1 3, number_from_end 0 | 2 1 0, stops 3 | 5 7 9.
    num_windows = -(-(lengths - 1) // max_length)
    number_from_end = np.repeat(np.cumsum(num_windows), num_windows) - np.arange(num_windows.sum()) - 1
    stops = np.repeat(ends, num_windows) - number_from_end * max_length
    return Windows(np.maximum(np.repeat(begins, num_windows), stops - max_length - 1), stops)


def evaluation_windows(users: NDArray[np.int32], splits: NDArray[np.uint8], split: int) -> Windows:
    """Returns a row for each interaction of split ``split`` but a user's first: all items up to and with this one."""
    bounds = user_bounds(users)
    begins = np.repeat(bounds[:-1], np.diff(bounds))
    targets = np.flatnonzero((splits == split) & (np.arange(len(users)) > begins))
    return Windows(begins[targets], targets + 1)


def user_bounds(sorted_users: NDArray[np.int32]) -> NDArray[np.int64]:
    """Returns the first position of each user in ascending ``sorted_users``, then the length, ``[num_users + 1]``."""
    return np.append(np.flatnonzero(np.diff(sorted_users, prepend=-1)), len(sorted_users))


def entries(windows: Windows, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the positions of the interactions of rows ``[start, stop)``, end to end, and the offsets of the rows."""
    starts, lengths = windows.starts[start:stop], windows.stops[start:stop] - windows.starts[start:stop]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1]), offsets


_COUNTED = pa.schema([("code", pa.int32()), ("key", pa.string()), ("count", pa.int64())])


def write_text_vocabularies(
    database: Database, folder: Path, names: Sequence[str]
) -> tuple[dict[str, Vocabulary], NDArray[np.int32]]:
    """Writes a vocabulary for each key column, ids by falling count, then text; returns them and each code's id.

    ``names[i]`` is the feature of the database's column ``k<i>``, whose values are codes of texts (see the module). A
    code belongs to one column, so one array of ids serves all. Codes of no row, and code 0 (missing), have id 0.
    """
    (folder / "vocabulary").mkdir()
    vocabularies = {}
    num_rows, last_code = database.row("select (select count(*) from rows), (select max(code) from keys)")
    ids = np.zeros(last_code + 1, np.int32)
    for number, name in enumerate(names):
        column = f"k{number}"
        counted = f"(select {column} as code, count(*) as count from rows where {column} is not null group by {column})"
        query = f"select code, key, count from {counted} join keys using (code) order by count desc, key"
        table = pa.Table.from_batches(database.batches(query), _COUNTED)
        new_ids = np.arange(FIRST_ID, FIRST_ID + len(table))
        ids[table["code"].to_numpy()] = new_ids
        file = f"vocabulary/{name}.parquet"
        columns = {"id": new_ids, "key": table["key"], "count": table["count"]}
        pq.write_table(pa.table(columns), folder / file, compression="zstd", row_group_size=VOCABULARY_GROUP_ROWS)
        num_missing = num_rows - (pc.sum(table["count"]).as_py() or 0)
        vocabularies[name] = Vocabulary(file, len(table), num_dropped=0, rows_dropped=0, rows_missing=num_missing)
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
    database: Database,
    columns: InteractionColumns,
    query: str,
    ids: NDArray[np.int32],
    sizes: Mapping[str, int],
    since_first: bool,
) -> EncodedInteractions:
    """Reads all chosen interactions into memory, in the order of ``query``, and replaces codes by ``ids[code]``.

    With ``since_first``, a dense column of times has the time since the user's first interaction in ``query``.
    """
    gap = "try_cast(time - min(time) over (partition by k0) as float)"
    names = [f"coalesce(k{n}, 0) as k{n}" for n in range(len(columns.keys))]
    names += [
        f"{gap if since_first and name == columns.time else f'd{n}'} as d{n}" for n, name in enumerate(columns.dense)
    ]
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
class _SplitRows:
    """The rows of a split."""

    num_rows: int
    group_rows: int  # of a row group
    table: Callable[[int, int], pa.Table]  # function that returns the rows [start, stop)


def rating_rows(chosen: EncodedInteractions) -> tuple[dict[str, _SplitRows], Schema]:
    """Returns a row for each interaction, by split, and the schema."""
    columns = {RATING: chosen.ratings, **chosen.dense, **chosen.ids}
    features = tuple(CategoricalFeature(name, size) for name, size in chosen.sizes.items())
    schema = Schema(RATING, tuple(chosen.dense), features, label_kind="number", missing_dense=chosen.has_missing)

    def rows(split: int) -> _SplitRows:
        split_rows = np.flatnonzero(chosen.parts == split)

        def table(start: int, stop: int) -> pa.Table:
            chunk = split_rows[start:stop]
            return pa.table({name: pa.array(values[chunk], from_pandas=True) for name, values in columns.items()})

        return _SplitRows(len(split_rows), ROW_GROUP_ROWS, table)

    return {name: rows(split) for split, name in enumerate(SPLIT_NAMES)}, schema


def sequence_rows(
    chosen: EncodedInteractions, options: SequenceOptions
) -> tuple[dict[str, _SplitRows], Schema, dict[str, Windows]]:
    """Returns rows by split, schema and windows; a row has the user, and lists with an entry for each interaction."""
    users, splits = chosen.ids[USER], chosen.parts
    windows = {"train": training_windows(users, splits, options.max_length, options.windows)}
    windows |= {SPLIT_NAMES[split]: evaluation_windows(users, splits, split) for split in (VALIDATION, TEST)}
    columns = {name: values for name, values in {**chosen.ids, **chosen.dense}.items() if name != USER}
    mean = windows["train"].mean_entries
    lists = {name: CategoricalFeature(name, size, True, mean) for name, size in chosen.sizes.items()}
    features = (CategoricalFeature(USER, chosen.sizes[USER]), *(lists[name] for name in lists if name != USER))
    dense = tuple(chosen.dense)
    schema = Schema(None, (), features, dense_sequences=dense, missing_dense=chosen.has_missing)

    def rows(split_windows: Windows) -> _SplitRows:
        def table(start: int, stop: int) -> pa.Table:
            entry_rows, offsets = entries(split_windows, start, stop)
            arrays = {name: pa.array(values[entry_rows], from_pandas=True) for name, values in columns.items()}
            begins = pa.array(offsets.astype(np.int32))
            lists_ = {name: pa.ListArray.from_arrays(begins, array) for name, array in arrays.items()}
            return pa.table({USER: users[split_windows.starts[start:stop]], **lists_})

        return _SplitRows(len(split_windows), rows_per_group(split_windows.mean_entries), table)

    return {name: rows(split_windows) for name, split_windows in windows.items()}, schema, windows


def write_splits(
    folder: Path, splits: Mapping[str, _SplitRows], schema: Schema, report: ProgressCallback
) -> dict[str, list[WrittenFile]]:
    """Writes the Parquet files of all splits, reporting rows after each; returns the files by split, in row order."""
    total, rows_done = sum(rows.num_rows for rows in splits.values()), 0
    files: dict[str, list[WrittenFile]] = {}
    for name, rows in splits.items():
        (folder / name).mkdir()
        files[name] = []
        for plan in plan_files(name, rows.num_rows, rows.group_rows):
            starts = range(plan.start, plan.stop, rows.group_rows)
            groups = (rows.table(start, min(start + rows.group_rows, plan.stop)) for start in starts)
            files[name].append(write_file(folder / plan.path, plan, rows.table(0, 0).schema, groups, schema))
            rows_done += plan.stop - plan.start
            report(ProgressUpdate("write", rows_done, total, rows_done))
    return files
