"""The ids of one feature: its values are counted over the training rows, and get ids that are written down.

Its keys are counted block by block; whenever more of them wait in memory than there is room for, they are sorted and
written out as a run, and the runs are merged by ranges of keys that fit (``key_counts.py``). The counts are mapped
files, and ids are given in passes over these (``frequencies.py``), so no step needs memory for all the keys.

Where the vocabulary of another dataset is given, its ids stay as they are. If it grows, values that it lacks and that
are frequent enough get ids behind the last one, by frequency among themselves::

    vocabulary     id 2 a 90    3 b 40                               (id, key, count)
    new rows       b 7  c 5  d 9  e 1                                seen so often, at least 2 for an id
    grown          id 2 a 90    3 b 47    4 d 9    5 c 5
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distembed.data.dataset.manifest import Vocabulary
from distembed.data.jagged import Jagged
from distembed.data.prepare.blocks import KeyColumn
from distembed.data.prepare.frequencies import by_frequency
from distembed.data.prepare.key_counts import (
    AppendedCounts,
    Counts,
    KeyCounter,
    chunks,
    create_mapped,
    keys_at_a_time,
    ordered_bits,
)
from distembed.data.prepare.row_splits import Rows, RowSplits
from distembed.data.prepare.spool import SpooledBlock
from distembed.data.prepare.vocabulary import (
    FIRST_ID,
    MISSING_ID,
    OUT_OF_VOCABULARY_ID,
    HashMap,
    IdMap,
    VocabularyMap,
    vocabulary_parts,
    write_vocabulary,
)


@dataclass(frozen=True)
class FeatureValues:
    """The values of one feature in all rows.

    Attributes:
        blocks: All blocks.
        splits: Which rows train.
        place: Number of the column among those of keys.
        column: The column.
    """

    blocks: Sequence[SpooledBlock]
    splits: RowSplits
    place: int
    column: KeyColumn

    def count(self, counter: KeyCounter) -> int:
        """Counts the values of the training rows, and returns the number of these that have none."""
        rows_missing = 0
        for block in self.blocks:
            rows = self.splits.train_rows(block)
            if self.column.is_list:
                lists = list_rows(block.lists(self.place), rows)
                codes = lists.values
                rows_missing += int(np.count_nonzero(lists.lengths == 0))
            else:
                codes = block.codes(self.place)[rows]
            if not len(codes):
                continue
            counts = np.bincount(codes, minlength=block.shape.num_keys[self.place])
            rows_missing += 0 if self.column.is_list else int(counts[MISSING_ID])
            seen = np.flatnonzero(counts[1:]) + 1
            texts = block.texts(self.place)
            counter.add(
                ordered_bits(block.keys(self.place)[seen]), counts[seen], None if texts is None else texts.take(seen)
            )
        return rows_missing

    def out_of_vocabulary(self, lookup: LookupTables) -> dict[str, int]:
        """Returns how often values of each split are out of vocabulary.

        Args:
            lookup: The ids of all blocks' codes.
        """
        found = dict.fromkeys(self.splits.names, 0)
        for block in self.blocks:
            is_out = lookup.table(block.index) == OUT_OF_VOCABULARY_ID
            if not is_out.any():
                continue
            for split, name in enumerate(found):
                rows = self.splits.rule.rows(block, split)
                is_list = self.column.is_list
                codes = list_rows(block.lists(self.place), rows).values if is_list else block.codes(self.place)[rows]
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
    """The vocabulary of another dataset.

    Attributes:
        file: Its file.
        grows: Whether values that it lacks get ids.
    """

    file: Path
    grows: bool


@dataclass(frozen=True)
class VocabularyRoom:
    """Where a vocabulary goes, and what making it may take.

    Attributes:
        folder: Dataset folder.
        file: Path of the vocabulary's file in it.
        scratch: Existing folder that no other feature uses.
        max_keys: Most distinct keys that may be in memory at a time.
    """

    folder: Path
    file: str
    scratch: Path
    max_keys: int


def build_vocabulary(
    values: FeatureValues, room: VocabularyRoom, base: BaseVocabulary | None
) -> tuple[VocabularyMap, Vocabulary]:
    """Counts a feature over the training rows, gives ids and writes them down.

    Args:
        values: The feature's values.
        room: Where the vocabulary goes.
        base: Vocabulary whose ids are applied; None gives new ones.

    Raises:
        UserError: Two texts have the same key, or the other vocabulary is of another kind or cannot be read.
    """
    counter = _counter(values.column, room)
    if base is not None:
        return _apply(values, room, base, counter)
    rows_missing = values.count(counter)
    counted = counter.finish(values.column.min_count)
    key_ids = create_mapped(room.scratch / "ids", np.int64, len(counted.keys))
    ordered = by_frequency(counted, key_ids, FIRST_ID, keys_at_a_time([counted], room.max_keys))
    write_vocabulary(room.folder / room.file, chain([counted.rows(slice(0, 0))], ordered), values.column.kind)
    found = Vocabulary(room.file, len(counted.keys), counter.num_dropped, counter.rows_dropped, rows_missing)
    return VocabularyMap(counted.keys, key_ids), found


def _counter(column: KeyColumn, room: VocabularyRoom, name: str = "counts") -> KeyCounter:
    """Returns a counter of the column's keys, in a folder of its own."""
    folder = room.scratch / name
    folder.mkdir()
    bits = ordered_bits(np.zeros(0, column.key_dtype)).dtype
    return KeyCounter(folder, room.max_keys, bits, column.name if column.kind == "string" else None)


def _apply(
    values: FeatureValues, room: VocabularyRoom, base: BaseVocabulary, counter: KeyCounter
) -> tuple[VocabularyMap, Vocabulary]:
    """Gives the ids of another vocabulary, and new ones behind them if it grows."""
    kind, num_base = values.column.kind, 0
    base_map = _base_map(values.column, room, base)
    for part in vocabulary_parts(base.file, kind, room.max_keys):
        counter.add(part.keys, np.zeros(len(part.keys), np.int64), part.texts)  # so that their texts are compared
        num_base += len(part.keys)
    rows_missing = values.count(counter)
    counted = counter.finish(0)
    least = values.column.min_count if base.grows else None
    added = create_mapped(room.scratch / "added", np.int64, num_base)
    found = _sort_out(counted, base_map, added, room, least)
    if not base.grows:
        shutil.copyfile(base.file, room.folder / room.file)
        return base_map, Vocabulary(room.file, num_base, found.num_dropped, found.rows_dropped, rows_missing)
    key_ids = create_mapped(room.scratch / "ids", np.int64, len(found.new.keys))
    ordered = by_frequency(found.new, key_ids, FIRST_ID + num_base, keys_at_a_time([found.new], room.max_keys))
    known = _with_added(vocabulary_parts(base.file, kind, room.max_keys), added)
    write_vocabulary(room.folder / room.file, chain([counted.rows(slice(0, 0))], known, ordered), kind)
    num_ids = num_base + len(found.new.keys)
    vocabulary = Vocabulary(room.file, num_ids, found.num_dropped, found.rows_dropped, rows_missing)
    return _united(base_map, VocabularyMap(found.new.keys, key_ids), room), vocabulary


def _base_map(column: KeyColumn, room: VocabularyRoom, base: BaseVocabulary) -> VocabularyMap:
    """Returns the ids of another vocabulary, sorted by key as counts are, in files where they are many."""
    (room.scratch / "base").mkdir()
    sorter = KeyCounter(room.scratch / "base", room.max_keys, ordered_bits(np.zeros(0, column.key_dtype)).dtype)
    next_id = FIRST_ID
    for part in vocabulary_parts(base.file, column.kind, room.max_keys):
        sorter.add(part.keys, np.arange(next_id, next_id + len(part.keys)))
        next_id += len(part.keys)
    counted = sorter.finish(0)
    return VocabularyMap(counted.keys, counted.counts)


def _united(one: VocabularyMap, other: VocabularyMap, room: VocabularyRoom) -> VocabularyMap:
    """Returns the ids of two vocabularies without a common key."""
    (room.scratch / "united").mkdir()
    sorter = KeyCounter(room.scratch / "united", room.max_keys, one.keys.dtype)
    for id_map in (one, other):
        for rows in chunks(len(id_map.keys), room.max_keys):
            sorter.add(id_map.keys[rows], id_map.key_ids[rows])
    counted = sorter.finish(0)
    return VocabularyMap(counted.keys, counted.counts)


@dataclass(frozen=True)
class _Found:
    """The values of the training rows that a vocabulary lacks: those that get ids, and how many others there are."""

    new: Counts
    num_dropped: int
    rows_dropped: int


def _sort_out(
    counted: Counts, base_map: VocabularyMap, added: NDArray[np.int64], room: VocabularyRoom, least: int | None
) -> _Found:
    """Tells new values from known ones, whose counts go into ``added`` in the order of their ids.

    Args:
        counted: All values, known ones included.
        base_map: The known ones.
        added: Array that gets the count of each known one.
        room: What may be taken.
        least: How often a new value is seen to get an id; None if none does.
    """
    files = AppendedCounts(room.scratch / "new", counted.rows(slice(0, 0)))
    num_dropped = rows_dropped = 0
    for rows in chunks(len(counted.keys), keys_at_a_time([counted], room.max_keys)):
        part = counted.rows(rows)
        ids = base_map.ids(part.keys)
        known = ids != OUT_OF_VOCABULARY_ID
        added[ids[known] - FIRST_ID] = part.counts[known]
        is_new = ~known & (part.counts >= least) if least is not None else np.zeros(len(known), bool)
        files.append(part.rows(is_new))
        dropped = ~known & ~is_new
        num_dropped += int(dropped.sum())
        rows_dropped += int(part.counts[dropped].sum())
    return _Found(files.finish(), num_dropped, rows_dropped)


def _with_added(parts: Iterator[Counts], added: NDArray[np.int64]) -> Iterator[Counts]:
    """Yields the keys of a vocabulary in the order of ids, each with its count and what was added to that."""
    start = 0
    for part in parts:
        yield Counts(part.keys, part.counts + added[start : start + len(part.keys)], part.texts)
        start += len(part.keys)


@dataclass(frozen=True)
class LookupTables:
    """The ids of one feature's keys, block after block, in one file.

    Attributes:
        path: File with the ids.
        dtype: Type of the ids there.
        starts: Index of each block's first id there.
    """

    path: Path
    dtype: np.dtype[Any]
    starts: NDArray[np.int64]

    @classmethod
    def at(cls, path: Path, num_embeddings: int, blocks: Sequence[SpooledBlock], place: int) -> LookupTables:
        """Returns the tables that are at a path, or will be.

        Args:
            path: The file.
            num_embeddings: Number of ids of the feature.
            blocks: All blocks.
            place: Number of the column among those of keys.
        """
        sizes = np.array([0, *(block.shape.num_keys[place] for block in blocks)], np.int64)
        return cls(path, np.dtype(np.int32 if num_embeddings <= 2**31 else np.int64), np.cumsum(sizes))

    def table(self, block: int) -> NDArray[Any]:
        """Returns a block's ids by its codes: ``table[code]`` is the id of what the code stands for."""
        start, stop = self.starts[block : block + 2].tolist()
        return np.fromfile(self.path, self.dtype, stop - start, offset=start * self.dtype.itemsize)

    def write(self, blocks: Sequence[SpooledBlock], place: int, id_map: IdMap) -> None:
        """Writes the ids of every block's keys; what repeats within a block is searched for once."""
        with open(self.path, "wb") as file:
            for block in blocks:
                ids = id_map.ids(block.keys(place)[1:])
                file.write(np.concatenate([np.array([MISSING_ID]), ids]).astype(self.dtype).data)


def hash_map(column: KeyColumn) -> HashMap | None:
    """Returns the hash of a column; None where it has a vocabulary."""
    return None if column.hash_size is None else HashMap(column.hash_size, column.hash_seed)
