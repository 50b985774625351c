"""Raw keys to ids: by frequency in the training rows, or by hashing.

By frequency: 0 is a missing value, 1 every value seen fewer than ``min_count`` times in the training rows, or never;
2, 3, ... are the other values, the most frequent first, equal ones by key. By hashing: 0 is a missing value, and a key
has the id ``1 + mix(key, seed) % (hash_size - 1)``, whatever the data.

A feature at a time. Its keys are counted block by block; whenever more than ``limit_entries`` of them wait in memory
they are sorted and written out as a run, and the runs are merged by ranges of keys that fit (``merge.py``). What was
counted is a pair of mapped files, and ids are given in passes over these, so no step needs memory for all the keys.
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
from distembed.data.prepare.merge import Counts, KeyCounter, chunks, create_mapped, sort_keys
from distembed.data.prepare.spool import SpooledBlock
from distembed.partitions.splitmix import mix64_array

MISSING_ID, OUT_OF_VOCABULARY_ID, FIRST_ID = 0, 1, 2


def reserved_ids(manifest: Manifest) -> tuple[int, ...]:
    """Ids that stand for no single value, in every table: missing, and, with a vocabulary, out-of-vocabulary."""
    if manifest.vocabularies:
        return MISSING_ID, OUT_OF_VOCABULARY_ID
    return (MISSING_ID,) if manifest.preparation.get("hash_size") else ()


class IdMap(Protocol):
    """From keys to ids."""

    @property
    def num_embeddings(self) -> int:
        """Ids lie below this."""

    def ids(self, keys: NDArray[np.uint32]) -> NDArray[np.int64]:
        """The id of each key."""


@dataclass(frozen=True)
class HashMap:
    """Ids by hashing, without any data."""

    hash_size: int
    seed: int

    @property
    def num_embeddings(self) -> int:
        """Ids lie below this."""
        return self.hash_size

    def ids(self, keys: NDArray[np.uint32]) -> NDArray[np.int64]:
        """``1 + mix(key, seed) % (hash_size - 1)``."""
        mixed = mix64_array(keys.astype(np.uint64) + mix64_array(np.array([self.seed], np.uint64)))
        return (mixed % np.uint64(self.hash_size - 1)).astype(np.int64) + 1


@dataclass(frozen=True)
class VocabularyMap:
    """Ids by a vocabulary: keys in ascending order, and the id of each."""

    keys: NDArray[np.uint32]
    key_ids: NDArray[np.int64]

    @property
    def num_embeddings(self) -> int:
        """Ids lie below this."""
        return FIRST_ID + len(self.keys)

    def ids(self, keys: NDArray[np.uint32]) -> NDArray[np.int64]:
        """The id of each key, 1 for those that the vocabulary lacks."""
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
    """What the training rows hold of one feature."""

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
    limit_entries: int,
) -> tuple[VocabularyMap, FeatureCounts]:
    """Count one feature over the first ``train_rows`` rows, give ids and write ``vocabulary_file`` (id, key, count).

    Args:
        blocks: all spooled blocks.
        feature: its number.
        train_rows: the rows that are counted; they come first.
        min_count: the fewest times that a value with an id of its own was seen.
        vocabulary_file: Parquet, by id.
        scratch: an existing folder of this feature alone.
        limit_entries: how many distinct keys may be in memory at a time.
    """
    counter = KeyCounter(scratch, limit_entries)
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
    _write_vocabulary(vocabulary_file, _by_frequency(counted, key_ids, limit_entries))
    summary = FeatureCounts(len(counted.keys), counter.num_dropped, counter.rows_dropped, rows_missing)
    return VocabularyMap(counted.keys, key_ids), summary


_VOCABULARY_SCHEMA = pa.schema([("id", pa.int64()), ("key", pa.uint32()), ("count", pa.int64())])
_VOCABULARY_GROUP_ROWS = 131_072


def _write_vocabulary(path: Path, parts: Iterator[Counts]) -> None:
    """Row groups of a fixed size, so that the bytes do not depend on the memory that there was."""
    next_id = FIRST_ID
    with pq.ParquetWriter(path, _VOCABULARY_SCHEMA, compression="zstd") as writer:
        for part in _regrouped(parts):
            ids = np.arange(next_id, next_id + len(part.keys))
            columns = [pa.array(ids), pa.array(part.keys), pa.array(part.counts)]
            writer.write_table(pa.table(columns, schema=_VOCABULARY_SCHEMA))
            next_id += len(part.keys)


def _regrouped(parts: Iterator[Counts]) -> Iterator[Counts]:
    keys, counts = np.zeros(0, np.uint32), np.zeros(0, np.int64)
    for part in parts:
        keys, counts = np.concatenate([keys, part.keys]), np.concatenate([counts, part.counts])
        for rows in chunks(len(keys) // _VOCABULARY_GROUP_ROWS * _VOCABULARY_GROUP_ROWS, _VOCABULARY_GROUP_ROWS):
            yield Counts(keys[rows], counts[rows])
        rest = slice(len(keys) // _VOCABULARY_GROUP_ROWS * _VOCABULARY_GROUP_ROWS, None)
        keys, counts = keys[rest], counts[rest]
    yield Counts(keys, counts)


def _by_frequency(counted: Counts, key_ids: NDArray[np.int64], limit_entries: int) -> Iterator[Counts]:
    """Fill in ``key_ids``, and give the keys with their counts in the order of the ids.

    A pass takes the keys of a range of counts, as many as fit. Those of a single count need no sorting, however many.
    """
    next_id = FIRST_ID
    for low, high in _count_ranges(counted.counts, limit_entries):
        for positions in _positions(counted.counts, low, high, limit_entries):
            counts = counted.counts[positions]
            order = np.argsort(-counts, kind="stable") if low < high else np.arange(len(counts))
            positions = positions[order]
            key_ids[positions] = np.arange(next_id, next_id + len(positions))
            yield Counts(counted.keys[positions], counts[order])
            next_id += len(positions)


def _count_ranges(counts: NDArray[np.int64], limit_entries: int) -> list[tuple[int, int]]:
    """Ranges of counts, both ends included, highest first, with at most ``limit_entries`` keys, or of one count."""
    histogram: dict[int, int] = {}
    for chunk in chunks(len(counts), limit_entries):
        values, frequencies = np.unique(counts[chunk], return_counts=True)
        for value, frequency in zip(values.tolist(), frequencies.tolist(), strict=True):
            histogram[value] = histogram.get(value, 0) + frequency
    ranges: list[tuple[int, int]] = []
    entries = 0
    for value in sorted(histogram, reverse=True):
        entries += histogram[value]
        if ranges and entries <= limit_entries:
            ranges[-1] = (value, ranges[-1][1])
        else:
            ranges.append((value, value))
            entries = histogram[value]
    return ranges


def _positions(counts: NDArray[np.int64], low: int, high: int, limit_entries: int) -> Iterator[NDArray[np.int64]]:
    """Where the counts lie in ``[low, high]``: all at once when they have to be sorted, by chunks otherwise."""
    parts = (
        chunk.start + np.flatnonzero((counts[chunk] >= low) & (counts[chunk] <= high))
        for chunk in chunks(len(counts), limit_entries)
    )
    if low == high:
        yield from parts
    else:
        yield np.concatenate(list(parts))


@dataclass(frozen=True)
class LookupTables:
    """For one feature: the ids of every block's keys, one after the other in one mapped file."""

    path: Path
    dtype: np.dtype[Any]
    starts: tuple[int, ...]

    def table(self, block: int, num_keys: int) -> NDArray[Any]:
        """``table[code]`` is the id, for the codes of this block."""
        return np.fromfile(self.path, self.dtype, num_keys, offset=self.starts[block] * self.dtype.itemsize)


def write_lookup_tables(blocks: Sequence[SpooledBlock], feature: int, id_map: IdMap, path: Path) -> LookupTables:
    """Map every block's keys; only distinct keys are searched for."""
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
