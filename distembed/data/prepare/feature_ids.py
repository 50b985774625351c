"""The ids of features: their values are counted over the training rows, and get ids that are written down.

The most frequent value has the first id, and equally frequent values are in the order of their keys. DuckDB counts and
sorts (``count.py``), so no step needs memory for all keys.

Where the vocabulary of another dataset is given, its ids stay as they are. If it grows, values that it lacks and that
are frequent enough get ids after the last one, by frequency among themselves::

    vocabulary     id 2 a 90    3 b 40                               (id, key, count)
    new rows       b 7  c 5  d 9  e 1                                seen so often, at least 2 for an id
    grown          id 2 a 90    3 b 47    4 d 9    5 c 5
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distembed.data.dataset.manifest import Vocabulary
from distembed.data.jagged import Jagged
from distembed.data.prepare.blocks import KeyColumn
from distembed.data.prepare.count import Database
from distembed.data.prepare.row_splits import Rows, RowSplits
from distembed.data.prepare.spool import SpooledBlock
from distembed.data.prepare.vocabulary import (
    FIRST_ID,
    KEY_TYPES,
    MISSING_ID,
    OUT_OF_VOCABULARY_ID,
    TEXTS_AT_A_TIME,
    VOCABULARY_GROUP_ROWS,
    IdMap,
    VocabularyMap,
    key_numbers,
    require_distinct_keys,
    vocabulary_batches,
    vocabulary_map,
    write_vocabulary,
)
from distembed.data.table.value_texts import value_texts
from distembed.files import replaced_file


@dataclass(frozen=True)
class FeatureValues:
    """The values of one feature in all rows."""

    blocks: Sequence[SpooledBlock]  # all blocks
    splits: RowSplits  # which rows train
    place: int  # index of the column among the key columns
    column: KeyColumn

    def counted(self, schema: pa.Schema, rows_missing: Counter[str]) -> Iterator[pa.RecordBatch]:
        """Yields the distinct keys of the training rows of each block, with their counts.

        Args:
            schema: The columns ``key`` and ``count``.
            rows_missing: Gets the number of training rows without a value, by the column's name.
        """
        for block in self.blocks:
            rows = self.splits.train_rows(block)
            lists = list_rows(block.lists(self.place), rows) if self.column.is_list else None
            codes = block.codes(self.place)[rows] if lists is None else lists.values
            counts = np.bincount(codes, minlength=block.num_keys(self.place))
            missing = counts[MISSING_ID] if lists is None else np.count_nonzero(lists.lengths == 0)
            rows_missing[self.column.name] += int(missing)
            seen = np.flatnonzero(counts[1:]) + 1
            if len(seen):
                texts = block.texts(self.place)
                keys = block.keys(self.place)[seen] if texts is None else texts.take(seen).cast(pa.string())
                yield pa.record_batch([pa.array(keys), pa.array(counts[seen])], schema=schema)

    def out_of_vocabulary(self, lookup: LookupTables) -> dict[str, int]:
        """Returns how often values of each split are out of vocabulary, given the ids of all blocks' codes."""
        found = dict.fromkeys(self.splits.rule.names, 0)
        for block in self.blocks:
            is_out = lookup.table(block.index) == OUT_OF_VOCABULARY_ID
            if is_out.any():
                for split, name in enumerate(found):
                    rows, is_list = self.splits.rows(block, split), self.column.is_list
                    codes = (
                        list_rows(block.lists(self.place), rows).values if is_list else block.codes(self.place)[rows]
                    )
                    found[name] += int(np.count_nonzero(is_out[codes]))
        return found

    def mean_values_per_row(self) -> float:
        """Returns the mean number of values of the training rows, of a column of lists."""
        num_values = sum(
            int(list_rows(block.lists(self.place), self.splits.train_rows(block)).lengths.sum())
            for block in self.blocks
        )
        return num_values / max(1, self.splits.num_rows[0])


def list_rows(lists: Jagged, rows: Rows) -> Jagged:
    """Returns some rows of a column of lists."""
    if not isinstance(rows, slice):
        return lists.gather(rows)
    offsets = lists.offsets[rows.start : rows.stop + 1]
    return Jagged(lists.values[offsets[0] : offsets[-1]], offsets - offsets[0])


@dataclass(frozen=True)
class BaseVocabulary:
    """The vocabulary of another dataset."""

    file: Path  # its file
    grows: bool  # whether values that it lacks get ids


@dataclass(frozen=True)
class VocabularyRoom:
    """The places of a vocabulary, and the memory for making it."""

    folder: Path  # dataset folder
    file: str  # path of the vocabulary's file in it
    scratch: Path  # existing folder that no other vocabulary uses
    database: Database  # a database whose tables nobody else uses


_NEVER = 2**63 - 1
"""A count that no value reaches."""
_SORTED_KEY_BYTES = 32
"""Memory that sorting takes for each key."""


def build_vocabulary(
    features: Sequence[FeatureValues], room: VocabularyRoom, base: BaseVocabulary | None
) -> tuple[VocabularyMap, dict[str, Vocabulary]]:
    """Counts the values of features that share a vocabulary over the training rows, gives ids and writes them down.

    Args:
        features: The features' values; all are of one kind.
        room: The places of the vocabulary.
        base: Vocabulary whose ids are applied; None gives new ones.

    Returns:
        The ids, and the manifest's entry of each feature.

    Raises:
        UserError: Two texts have the same key, or the other vocabulary is of another kind or cannot be read.
    """
    column, path = features[0].column, room.folder / room.file
    counted = pa.schema([("key", KEY_TYPES[column.kind]), ("count", pa.int64())])
    rows_missing = Counter({values.column.name: 0 for values in features})
    least = column.min_count if base is None or base.grows else _NEVER
    database = room.database
    database.add(
        "counted",
        chain.from_iterable(values.counted(counted, rows_missing) for values in features),
        counted,
        "select key, sum(count)::bigint as count from given group by key",
    )
    unknown, queries = "counted", list[str]()
    if base is not None:
        # of a text, the value's own text too, which an earlier version may have written otherwise
        fields = [*counted, ("id", pa.int64()), ("own", KEY_TYPES[column.kind])]
        database.add("known", _numbered(base.file, column), pa.schema(fields))
        lacking = "select counted.* from counted anti join known on counted.key = known.own"
        database.run(f"create or replace table unknown as {lacking}")
        unknown = "unknown"
        queries.append(
            "select known.key, known.count + coalesce(counted.count, 0) from known left join counted "
            "on known.own = counted.key order by id"
        )
    queries.append(f"select key, count from {unknown} where count >= {least} order by count desc, key")
    with replaced_file(path) as written:
        if base is not None and not base.grows:
            shutil.copyfile(base.file, written)
            (num_ids,) = database.row("select count(*) from known")
        else:
            rows = TEXTS_AT_A_TIME if column.kind == "string" else VOCABULARY_GROUP_ROWS
            batches = chain.from_iterable(database.batches(query, rows=rows) for query in queries)
            num_ids = write_vocabulary(written, batches, column.kind)
    num_dropped, rows_dropped = database.row(
        f"select count(*), coalesce(sum(count), 0)::bigint from {unknown} where count < {least}"
    )
    id_map = _sorted_map(path, column, room, num_ids)
    return id_map, {
        name: Vocabulary(room.file, num_ids, num_dropped, rows_dropped, missing)
        for name, missing in rows_missing.items()
    }


def _numbered(path: Path, column: KeyColumn) -> Iterator[pa.RecordBatch]:
    """Yields keys, counts and ids of a vocabulary, and the text that each value has now."""
    next_id = FIRST_ID
    for batch in vocabulary_batches(path, column.kind):
        ids, keys = pa.array(np.arange(next_id, next_id + len(batch))), batch.column("key")
        own = value_texts(keys) if column.kind == "string" else keys
        yield pa.record_batch([*batch.columns, ids, own], names=["key", "count", "id", "own"])
        next_id += len(batch)


def _sorted_map(path: Path, column: KeyColumn, room: VocabularyRoom, num_ids: int) -> VocabularyMap:
    """Returns the ids of a vocabulary by key, of a large one in files that the system may put out of memory.

    Raises:
        UserError: Two texts have the same key.
    """
    if num_ids * _SORTED_KEY_BYTES <= room.database.memory_bytes:
        return vocabulary_map(path, column)
    schema = pa.schema([("key", pa.from_numpy_dtype(column.key_dtype)), ("id", pa.int64())])
    keys_and_ids = (
        pa.record_batch([pa.array(key_numbers(batch.column(0))), batch.column(2)], schema=schema)
        for batch in _numbered(path, column)
    )
    room.database.add("ids", keys_and_ids, schema)
    keys = np.memmap(room.scratch / "keys", column.key_dtype, "w+", shape=(num_ids,))
    ids = np.memmap(room.scratch / "ids", np.int64, "w+", shape=(num_ids,))
    place = 0
    for batch in room.database.batches("select key, id from ids order by key, id"):
        keys[place : place + len(batch)] = batch.column(0).to_numpy()
        ids[place : place + len(batch)] = batch.column(1).to_numpy()
        place += len(batch)
    require_distinct_keys(keys, ids, path, column)
    return VocabularyMap(keys, ids)


@dataclass(frozen=True)
class LookupTables:
    """The ids of one feature's keys, block after block, in one file."""

    path: Path  # file with the ids
    dtype: np.dtype[Any]  # type of the ids there
    starts: NDArray[np.int64]  # index of each block's first id there

    @classmethod
    def at(cls, path: Path, num_embeddings: int, blocks: Sequence[SpooledBlock], place: int) -> LookupTables:
        """Returns the tables of a column, given its number among those of keys; they may not be written yet."""
        sizes = np.array([0, *(block.num_keys(place) for block in blocks)], np.int64)
        return cls(path, np.dtype(np.int32 if num_embeddings <= 2**31 else np.int64), np.cumsum(sizes))

    def table(self, block: int) -> NDArray[Any]:
        """Returns the id of each code of a block."""
        start, stop = self.starts[block : block + 2].tolist()
        return np.fromfile(self.path, self.dtype, stop - start, offset=start * self.dtype.itemsize)

    def write(self, blocks: Sequence[SpooledBlock], place: int, id_map: IdMap) -> None:
        """Writes the ids of every block's keys; a value that repeats within a block is searched for once."""
        with replaced_file(self.path) as path, open(path, "wb") as file:
            for block in blocks:
                ids = id_map.ids(block.keys(place)[1:])
                file.write(np.concatenate([np.array([MISSING_ID]), ids]).astype(self.dtype).data)
