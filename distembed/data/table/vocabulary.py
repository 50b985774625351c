"""Raw keys to ids: by a vocabulary, or by hashing.

By a vocabulary: 0 is a missing value, 1 every value that the vocabulary lacks; 2, 3, ... are its values. By hashing: 0
is a missing value, and a key has the id ``1 + mix(key, seed) % (hash_size - 1)``, for any data.

A vocabulary is a Parquet file with the columns id, key and count, in the order of ids. A key is the number that the
value is (uint32 of hexadecimal digits, int64 of integers) or its text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import REMEDY, Manifest
from distembed.data.hashing import mix64_array, text_keys
from distembed.data.table.blocks import KeyColumn, KeyKind

MISSING_ID, OUT_OF_VOCABULARY_ID, FIRST_ID = 0, 1, 2
VOCABULARY_GROUP_ROWS = 131_072
_TEXT_GROUP_ROWS = 16_384  # rows of a row group of texts, which may be long
TEXTS_AT_A_TIME = 4096  # texts in memory at a time while vocabularies are read and written
KEY_TYPES: dict[KeyKind, pa.DataType] = {"hexadecimal": pa.uint32(), "integer": pa.int64(), "string": pa.string()}
"""Type of the keys in a vocabulary's file, by the kind of the values."""


def reserved_ids(manifest: Manifest, name: str) -> tuple[int, ...]:
    """Returns the ids of a feature, or of a table, that stand for no raw value.

    They are 0 (missing), and with a vocabulary 1 (out of it).

    Returns no ids for a dataset that was not made by ``distembed prepare``, whose ids are all values.
    """
    tables = {feature.name: feature.table_name for feature in manifest.schema.categorical}
    if tables.get(name, name) in manifest.vocabularies:
        return MISSING_ID, OUT_OF_VOCABULARY_ID
    is_prepared = "hash_size" in manifest.preparation or "schema" in manifest.preparation
    return (MISSING_ID,) if is_prepared else ()  # of hashed values, and of bins


@dataclass(frozen=True)
class HashMap:
    """Ids by hashing, which needs no data."""

    num_embeddings: int  # number of ids; id 0 is for missing values
    seed: int  # seed of the hash

    def ids(self, keys: NDArray[Any]) -> NDArray[np.int64]:
        """Returns ``1 + mix(key, seed) % (num_embeddings - 1)`` of each key."""
        mixed = mix64_array(keys.astype(np.uint64) + mix64_array(np.array([self.seed], np.uint64)))
        return (mixed % np.uint64(self.num_embeddings - 1)).astype(np.int64) + 1


@dataclass(frozen=True)
class VocabularyMap:
    """Ids by a vocabulary."""

    keys: NDArray[Any]  # keys in ascending order; of texts, their hashes
    key_ids: NDArray[np.int64]  # id of each key

    @property
    def num_embeddings(self) -> int:
        return FIRST_ID + len(self.keys)

    def ids(self, keys: NDArray[Any]) -> NDArray[np.int64]:
        """Returns the id of each key, 1 for keys that the vocabulary lacks."""
        result = np.full(len(keys), OUT_OF_VOCABULARY_ID, np.int64)
        if not len(self.keys):
            return result
        # In ascending order neighbours are found near each other, which is several times faster in a large vocabulary.
        ascending, order = sort_keys(keys)
        nearest = np.minimum(np.searchsorted(self.keys, ascending), len(self.keys) - 1)
        is_known = self.keys[nearest] == ascending
        result[order[is_known]] = self.key_ids[nearest[is_known]]
        return result


IdMap: TypeAlias = HashMap | VocabularyMap
"""A function from a feature's keys (uint32 of hexadecimal digits, int64 of integers, uint64 of texts) to ids."""


def sort_keys(keys: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Returns sorted keys, and the positions in ``keys`` that they come from (an argsort)."""
    if keys.dtype != np.uint32:
        order = np.argsort(keys)
        return keys[order], order
    # Sorts key * 2^32 + position as one integer, which is faster than argsort.
    packed = keys.astype(np.uint64) << np.uint64(32) | np.arange(len(keys), dtype=np.uint64)
    packed.sort()
    return (packed >> np.uint64(32)).astype(np.uint32), (packed & np.uint64(2**32 - 1)).astype(np.int64)


def key_numbers(keys: pa.Array) -> NDArray[Any]:
    """Converts a vocabulary's ``key`` column to the keys that :meth:`IdMap.ids` takes: texts to their hashes."""
    return text_keys(keys) if pa.types.is_string(keys.type) else keys.to_numpy()


def write_vocabulary(path: Path, batches: Iterable[pa.RecordBatch], kind: KeyKind) -> int:
    """Writes batches of (key, count) with ids from 2, in row groups of a fixed size; returns the number of keys."""
    columns = pa.schema([("key", KEY_TYPES[kind]), ("count", pa.int64())])
    schema = columns.insert(0, pa.field("id", pa.int64()))
    next_id = FIRST_ID
    tables = (pa.table(batch.columns, schema=columns) for batch in batches)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for table in regrouped(tables, columns, _TEXT_GROUP_ROWS if kind == "string" else VOCABULARY_GROUP_ROWS):
            ids = pa.array(np.arange(next_id, next_id + len(table)))
            writer.write_table(pa.table([ids, *table.columns], schema=schema))
            next_id += len(table)
    return next_id - FIRST_ID


def regrouped(tables: Iterable[pa.Table], schema: pa.Schema, rows: int) -> Iterator[pa.Table]:
    """Yields the rows of ``tables`` in tables of ``rows`` rows each, then a last table of fewer, maybe no, rows."""
    waiting = schema.empty_table()
    for table in tables:
        waiting = pa.concat_tables([waiting, table])
        while len(waiting) >= rows:
            group, waiting = waiting.slice(0, rows).combine_chunks(), waiting.slice(rows)
            yield group
    yield waiting.combine_chunks()


def vocabulary_batches(path: Path, kind: KeyKind) -> Iterator[pa.RecordBatch]:
    """Yields columns ``id``, ``key``, ``count`` of a vocabulary in the order of ids; refuses keys of another kind."""
    try:
        with pq.ParquetFile(path) as file:
            key_type = file.schema_arrow.field("key").type
            if key_type != KEY_TYPES[kind]:
                raise UserError(
                    f"the vocabulary {path} has keys of the type {key_type}, and the column has {kind} values: name a "
                    "dataset whose column is of that kind"
                )
            rows = TEXTS_AT_A_TIME if kind == "string" else VOCABULARY_GROUP_ROWS
            yield from file.iter_batches(rows, columns=["id", "key", "count"])
    except (pa.ArrowException, OSError, KeyError) as error:
        raise UserError(f"the vocabulary {path} cannot be read: {error}; {REMEDY}") from error


def vocabulary_map(path: Path, column: KeyColumn) -> VocabularyMap:
    """Reads a vocabulary into memory, sorted by key; a UserError if two of its texts have one hash."""
    key_arrays = [key_numbers(batch.column("key")) for batch in vocabulary_batches(path, column.kind)]
    keys = np.concatenate([np.zeros(0, column.key_dtype), *key_arrays])
    order = np.argsort(keys, kind="stable")
    id_map = VocabularyMap(keys[order], order + FIRST_ID)
    require_distinct_keys(id_map.keys, id_map.key_ids, path, column)
    return id_map


def require_distinct_keys(keys: NDArray[Any], ids: NDArray[np.int64], path: Path, column: KeyColumn) -> None:
    """Raises a UserError with both texts if two neighbours of the ascending ``keys`` are equal (a hash collision).

    ``ids`` has the id of each key; the vocabulary file is read again only to name the texts.
    """
    for position in np.flatnonzero(keys[1:] == keys[:-1])[:1]:
        texts = pa.concat_arrays([batch.column("key") for batch in vocabulary_batches(path, column.kind)])
        first, second = texts.take(pa.array(ids[position : position + 2] - FIRST_ID)).to_pylist()
        raise UserError(
            f"the values {first!r} and {second!r} of column {column.name!r} have the same 64-bit key, as two of "
            "billions may: change one of them in the input"
        )


def column_id_map(folder: Path, manifest: Manifest, column: KeyColumn) -> IdMap:
    """Returns the function from a column's keys to the ids that a dataset, or a run's copy of it, gave them."""
    if column.hash_size is not None:
        return HashMap(column.hash_size, column.hash_seed)
    return vocabulary_map(_vocabulary_file(folder, manifest, column.name), column)


def raw_values(folder: Path, manifest: Manifest, feature: str) -> pa.Array:
    """Returns the raw value of each id as Arrow's string, indexed by id; ids 0 and 1 are null.

    Raises a UserError for a feature without a vocabulary.
    """
    path = _vocabulary_file(folder, manifest, feature)
    try:
        keys = pq.read_table(path, columns=["key"])["key"].combine_chunks()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"the vocabulary {path} cannot be read: {error}; {REMEDY}") from error
    if pa.types.is_uint32(keys.type):  # the values were hexadecimal numbers of 8 digits
        texts = pa.array([f"{key:08x}" for key in keys.to_pylist()], pa.string())
    else:
        texts = keys.cast(pa.string())
    return pa.concat_arrays([pa.nulls(FIRST_ID, pa.string()), texts])  # the file's rows are in the order of ids


def take_values(values: pa.Array, ids: NDArray[np.int64]) -> pa.Array:
    """Looks ids up in the result of :func:`raw_values`; ids out of its range, as -1, give null."""
    # id 0 is null, so ids out of range are looked up there
    return values.take(pa.array(np.where((ids < 0) | (ids >= len(values)), 0, ids)))


def _vocabulary_file(folder: Path, manifest: Manifest, feature: str) -> Path:
    """Returns the path of a feature's vocabulary file, after comparing the file with its checksum."""
    if feature not in manifest.vocabularies:
        raise UserError(
            f"the dataset of {folder} has no vocabulary of {feature!r}, so that its raw values are not known: they are "
            "hashed, or it was made elsewhere"
        )
    path = manifest.require_unchanged(folder, manifest.vocabularies[feature].file)
    if not path.exists():
        raise UserError(f"the vocabulary {path} is missing; {REMEDY}")
    return path
