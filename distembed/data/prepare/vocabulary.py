"""Raw keys to ids: by frequency in the training rows, or by hashing.

By frequency: 0 is a missing value, 1 every value seen fewer than ``min_count`` times in the training rows, or never;
2, 3, ... are the other values, the most frequent first, equal ones by key. By hashing: 0 is a missing value, and a key
has the id ``1 + mix(key, seed) % (hash_size - 1)``, whatever the data.

One feature is done at a time. Its keys are counted block by block; whenever more than ``max_keys`` of them wait in
memory they are sorted and written out as a run, and the runs are merged by ranges of keys that fit
(``key_counts.py``). The counts are a pair of mapped files, and ids are given in passes over these, so no step needs
memory for all the keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from distembed.data.dataset.manifest import Manifest
from distembed.data.prepare.key_counts import Counts, KeyCounter, chunks, create_mapped, sort_keys
from distembed.data.prepare.spool import SpooledBlock
from distembed.data.splitmix import mix64_array

MISSING_ID, OUT_OF_VOCABULARY_ID, FIRST_ID = 0, 1, 2


def reserved_ids(manifest: Manifest) -> tuple[int, ...]:
    """Returns the ids that stand for no single value in any table: missing and, with a vocabulary, rare or unknown."""
    if manifest.vocabularies:
        return MISSING_ID, OUT_OF_VOCABULARY_ID
    return (MISSING_ID,) if manifest.preparation.get("hash_size") else ()


class IdMap(Protocol):
    """A function from a feature's raw keys to the ids of its table."""

    @property
    def num_embeddings(self) -> int:
        """Number of ids: they lie in ``[0, num_embeddings)``."""

    def ids(self, keys: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Returns the id of each key."""


@dataclass(frozen=True)
class HashMap:
    """Ids by hashing, which needs no data.

    Attributes:
        hash_size: Number of ids, of which 0 is for missing values.
        seed: Seed of the hash.
    """

    hash_size: int
    seed: int

    @property
    def num_embeddings(self) -> int:
        return self.hash_size

    def ids(self, keys: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Returns ``1 + mix(key, seed) % (hash_size - 1)`` of each key."""
        mixed = mix64_array(keys.astype(np.uint64) + mix64_array(np.array([self.seed], np.uint64)))
        return (mixed % np.uint64(self.hash_size - 1)).astype(np.int64) + 1


@dataclass(frozen=True)
class VocabularyMap:
    """Ids by a vocabulary.

    Attributes:
        keys: Keys in ascending order.
        key_ids: Id of each key.
    """

    keys: NDArray[np.uint32]
    key_ids: NDArray[np.int64]

    @property
    def num_embeddings(self) -> int:
        return FIRST_ID + len(self.keys)

    def ids(self, keys: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Returns the id of each key, 1 for those that the vocabulary lacks."""
        result = np.full(len(keys), OUT_OF_VOCABULARY_ID, np.int64)
        if not len(self.keys):
            return result
        # In ascending order neighbours are found near each other, which is several times faster in a large vocabulary.
        ascending, order = sort_keys(keys)
        found = np.minimum(np.searchsorted(self.keys, ascending), len(self.keys) - 1)
        known = self.keys[found] == ascending
        result[order[known]] = self.key_ids[found[known]]
        return result


@dataclass(frozen=True)
class FeatureCounts:
    """What was counted of one feature over the training rows.

    Attributes:
        num_ids: Number of distinct values that have an id of their own.
        num_dropped: Number of distinct values that were seen too rarely for one.
        rows_dropped: Number of rows that hold one of these.
        rows_missing: Number of rows without a value.
    """

    num_ids: int
    num_dropped: int
    rows_dropped: int
    rows_missing: int


def build_vocabulary(
    blocks: Sequence[SpooledBlock],
    feature: int,
    train_rows: int,
    min_count: int,
    vocabulary_file: Path,
    scratch: Path,
    max_keys: int,
) -> tuple[VocabularyMap, FeatureCounts]:
    """Counts one feature over the training rows, gives ids and writes them down.

    Args:
        blocks: All spooled blocks.
        feature: Number of the feature.
        train_rows: Number of rows that are counted; they come first.
        min_count: Least number of times that a value with an id of its own was seen.
        vocabulary_file: Parquet file to write, with columns id, key and count, by id.
        scratch: Existing folder that no other feature uses.
        max_keys: Most distinct keys that may be in memory at a time.
    """
    counter = KeyCounter(scratch, max_keys)
    rows_missing = 0
    for block in blocks:
        if block.first_row < train_rows:
            codes = block.codes(feature)[: train_rows - block.first_row]
            counts = np.bincount(codes, minlength=block.num_keys[feature])
            rows_missing += int(counts[0])
            seen = np.flatnonzero(counts[1:]) + 1
            counter.add(block.keys(feature)[seen], counts[seen])
    counted = counter.finish(min_count)
    key_ids = create_mapped(scratch / "ids", np.int64, len(counted.keys))
    _write_vocabulary(vocabulary_file, _by_frequency(counted, key_ids, max_keys))
    summary = FeatureCounts(len(counted.keys), counter.num_dropped, counter.rows_dropped, rows_missing)
    return VocabularyMap(counted.keys, key_ids), summary


_VOCABULARY_SCHEMA = pa.schema([("id", pa.int64()), ("key", pa.uint32()), ("count", pa.int64())])
VOCABULARY_GROUP_ROWS = 131_072


def _write_vocabulary(path: Path, parts: Iterator[Counts]) -> None:
    """Writes row groups of a fixed size, so that the bytes do not depend on the memory that there was.

    Pages have no checksums, other than the splits': the bytes say what ids stand for, and older versions wrote them so.
    """
    next_id = FIRST_ID
    with pq.ParquetWriter(path, _VOCABULARY_SCHEMA, compression="zstd") as writer:
        for part in _regrouped(parts):
            ids = np.arange(next_id, next_id + len(part.keys))
            columns = [pa.array(ids), pa.array(part.keys), pa.array(part.counts)]
            writer.write_table(pa.table(columns, schema=_VOCABULARY_SCHEMA))
            next_id += len(part.keys)


def _regrouped(parts: Iterator[Counts]) -> Iterator[Counts]:
    """Yields the same keys and counts in parts of a row group's size, and the rest."""
    keys, counts = np.zeros(0, np.uint32), np.zeros(0, np.int64)
    for part in parts:
        keys, counts = np.concatenate([keys, part.keys]), np.concatenate([counts, part.counts])
        for rows in chunks(len(keys) // VOCABULARY_GROUP_ROWS * VOCABULARY_GROUP_ROWS, VOCABULARY_GROUP_ROWS):
            yield Counts(keys[rows], counts[rows])
        rest = slice(len(keys) // VOCABULARY_GROUP_ROWS * VOCABULARY_GROUP_ROWS, None)
        keys, counts = keys[rest], counts[rest]
    yield Counts(keys, counts)


def _by_frequency(counted: Counts, key_ids: NDArray[np.int64], max_keys: int) -> Iterator[Counts]:
    """Fills in ``key_ids``, and yields the keys with their counts in the order of the ids.

    A pass takes the keys of a range of counts, as many as fit. Those of a single count need no sorting, however many.
    """
    next_id = FIRST_ID
    for low, high in _count_ranges(counted.counts, max_keys):
        for positions in _positions(counted.counts, low, high, max_keys):
            counts = counted.counts[positions]
            order = np.argsort(-counts, kind="stable") if low < high else np.arange(len(counts))
            positions = positions[order]
            key_ids[positions] = np.arange(next_id, next_id + len(positions))
            yield Counts(counted.keys[positions], counts[order])
            next_id += len(positions)


def _count_ranges(counts: NDArray[np.int64], max_keys: int) -> list[tuple[int, int]]:
    """Returns ranges of counts, both ends included, highest first; each has at most ``max_keys`` keys, or one count."""
    histogram: dict[int, int] = {}
    for chunk in chunks(len(counts), max_keys):
        values, frequencies = np.unique(counts[chunk], return_counts=True)
        for value, frequency in zip(values.tolist(), frequencies.tolist(), strict=True):
            histogram[value] = histogram.get(value, 0) + frequency
    ranges: list[tuple[int, int]] = []
    entries = 0
    for value in sorted(histogram, reverse=True):
        entries += histogram[value]
        if ranges and entries <= max_keys:
            ranges[-1] = (value, ranges[-1][1])
        else:
            ranges.append((value, value))
            entries = histogram[value]
    return ranges


def _positions(counts: NDArray[np.int64], low: int, high: int, max_keys: int) -> Iterator[NDArray[np.int64]]:
    """Yields where the counts lie in ``[low, high]``: all at once when they have to be sorted, by chunks otherwise."""
    parts = (
        chunk.start + np.flatnonzero((counts[chunk] >= low) & (counts[chunk] <= high))
        for chunk in chunks(len(counts), max_keys)
    )
    if low == high:
        yield from parts
    else:
        yield np.concatenate(list(parts))


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
    starts: tuple[int, ...]

    def table(self, block: int, num_keys: int) -> NDArray[Any]:
        """Returns a block's ids by its codes: ``table[code]`` is the id of what the code stands for."""
        return np.fromfile(self.path, self.dtype, num_keys, offset=self.starts[block] * self.dtype.itemsize)


def write_lookup_tables(blocks: Sequence[SpooledBlock], feature: int, id_map: IdMap, path: Path) -> LookupTables:
    """Writes the ids of every block's keys to a file; what repeats within a block is searched for once."""
    dtype = np.dtype(np.int32 if id_map.num_embeddings <= 2**31 else np.int64)
    starts, position = [], 0
    with open(path, "wb") as file:
        for block in blocks:
            keys = block.keys(feature)
            table = np.concatenate([np.array([MISSING_ID]), id_map.ids(keys[1:])]).astype(dtype)
            file.write(table.tobytes())
            starts.append(position)
            position += len(table)
    return LookupTables(path, dtype, tuple(starts))
