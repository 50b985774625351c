"""Raw keys to ids: by a vocabulary, or by hashing.

By a vocabulary: 0 is a missing value, 1 every value that the vocabulary lacks; 2, 3, ... are its values. By hashing: 0
is a missing value, and a key has the id ``1 + mix(key, seed) % (hash_size - 1)``, whatever the data.

A vocabulary is a Parquet file with the columns id, key and count, in the order of ids. A key is the number that the
value is (uint32 of hexadecimal digits, int64 of integers) or its text; :func:`write_vocabulary` writes it, and
:func:`vocabulary_parts` reads it part by part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.pieces import REMEDY
from distembed.data.prepare.blocks import KeyKind
from distembed.data.prepare.key_counts import Counts, chunks, from_ordered_bits, ordered_bits, sort_keys
from distembed.data.splitmix import mix64_array
from distembed.data.table.text_keys import text_keys
from distembed.errors import UserError

MISSING_ID, OUT_OF_VOCABULARY_ID, FIRST_ID = 0, 1, 2

VOCABULARY_GROUP_ROWS = 131_072
_TEXT_GROUP_ROWS = 16_384
"""Rows of a row group of texts, which may be long."""

KEY_TYPES: dict[KeyKind, pa.DataType] = {"hexadecimal": pa.uint32(), "integer": pa.int64(), "string": pa.string()}
"""Type of the keys in a vocabulary's file, by the kind of the values."""


def reserved_ids(manifest: Manifest, table: str) -> tuple[int, ...]:
    """Returns the ids of a table that stand for no single value: missing and, with a vocabulary, rare or unknown."""
    if table in manifest.vocabularies:
        return MISSING_ID, OUT_OF_VOCABULARY_ID
    is_prepared = "hash_size" in manifest.preparation or "schema" in manifest.preparation
    return (MISSING_ID,) if is_prepared else ()  # of hashed values, and of bins


class IdMap(Protocol):
    """A function from a feature's raw keys to the ids of its table."""

    @property
    def num_embeddings(self) -> int:
        """Number of ids: they lie in ``[0, num_embeddings)``."""

    def ids(self, keys: NDArray[Any]) -> NDArray[np.int64]:
        """Returns the id of each key: uint32 of hexadecimal digits, int64 of integers, uint64 of texts."""


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

    def ids(self, keys: NDArray[Any]) -> NDArray[np.int64]:
        """Returns ``1 + mix(key, seed) % (hash_size - 1)`` of each key."""
        mixed = mix64_array(keys.astype(np.uint64) + mix64_array(np.array([self.seed], np.uint64)))
        return (mixed % np.uint64(self.hash_size - 1)).astype(np.int64) + 1


@dataclass(frozen=True)
class VocabularyMap:
    """Ids by a vocabulary.

    Attributes:
        keys: Keys as ordered bits (:func:`~distembed.data.prepare.key_counts.ordered_bits`), in ascending order; of
            uint32 and uint64 these are the keys themselves.
        key_ids: Id of each key.
    """

    keys: NDArray[Any]
    key_ids: NDArray[np.int64]

    @property
    def num_embeddings(self) -> int:
        return FIRST_ID + len(self.keys)

    def ids(self, keys: NDArray[Any]) -> NDArray[np.int64]:
        """Returns the id of each key, 1 for those that the vocabulary lacks."""
        result = np.full(len(keys), OUT_OF_VOCABULARY_ID, np.int64)
        if not len(self.keys):
            return result
        # In ascending order neighbours are found near each other, which is several times faster in a large vocabulary.
        ascending, order = sort_keys(ordered_bits(keys))
        found = np.minimum(np.searchsorted(self.keys, ascending), len(self.keys) - 1)
        known = self.keys[found] == ascending
        result[order[known]] = self.key_ids[found[known]]
        return result


def write_vocabulary(path: Path, parts: Iterable[Counts], kind: KeyKind) -> None:
    """Writes a vocabulary in row groups of a fixed size, so that the bytes do not depend on the memory that there was.

    Pages have no checksums, other than the splits': the bytes say what ids stand for, and older versions wrote them so.

    Args:
        path: File to write.
        parts: Keys and counts in the order of the ids, one or more parts of any size.
        kind: What the keys are.
    """
    schema = pa.schema([("id", pa.int64()), ("key", KEY_TYPES[kind]), ("count", pa.int64())])
    next_id = FIRST_ID
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for part in _regrouped(parts, _TEXT_GROUP_ROWS if kind == "string" else VOCABULARY_GROUP_ROWS):
            ids = np.arange(next_id, next_id + len(part.keys))
            writer.write_table(pa.table([pa.array(ids), _key_array(part, kind), pa.array(part.counts)], schema=schema))
            next_id += len(part.keys)


def _key_array(part: Counts, kind: KeyKind) -> pa.Array:
    if kind == "string":
        assert part.texts is not None, "keys of texts have them beside them"
        return part.texts.cast(pa.string())
    return pa.array(from_ordered_bits(part.keys, np.dtype(KEY_TYPES[kind].to_pandas_dtype())))


def _regrouped(parts: Iterable[Counts], group_rows: int) -> Iterator[Counts]:
    """Yields the same keys and counts in parts of a row group's size, and the rest."""
    waiting: Counts | None = None
    for part in parts:
        waiting = part if waiting is None else _joined(waiting, part)
        whole = len(waiting.keys) // group_rows * group_rows
        for rows in chunks(whole, group_rows):
            yield waiting.rows(rows)
        waiting = waiting.rows(np.arange(whole, len(waiting.keys)))  # a copy: the rest need not keep the whole alive
    if waiting is not None:
        yield waiting


def _joined(one: Counts, other: Counts) -> Counts:
    texts = None if one.texts is None else pa.concat_arrays([one.texts, other.texts])
    return Counts(np.concatenate([one.keys, other.keys]), np.concatenate([one.counts, other.counts]), texts)


def vocabulary_parts(path: Path, kind: KeyKind, max_keys: int = VOCABULARY_GROUP_ROWS) -> Iterator[Counts]:
    """Yields the keys of a vocabulary, as ordered bits and with their texts, and their counts, in the order of ids.

    Args:
        path: The vocabulary's file.
        kind: What its keys should be.
        max_keys: Most keys of a part.

    Raises:
        UserError: The file cannot be read, or its keys are of another kind.
    """
    try:
        with pq.ParquetFile(path) as file:
            found = file.schema_arrow.field("key").type
            if found != KEY_TYPES[kind]:
                raise UserError(
                    f"the vocabulary {path} has keys of the type {found}, and the column has {kind} values: name a "
                    "dataset whose column is of that kind"
                )
            most = _TEXT_GROUP_ROWS if kind == "string" else VOCABULARY_GROUP_ROWS
            for batch in file.iter_batches(min(max_keys, most), columns=["key", "count"]):
                yield _counts(batch.column("key"), batch.column("count").to_numpy())
    except (pa.ArrowException, OSError, KeyError) as error:
        raise UserError(f"the vocabulary {path} cannot be read: {error}; {REMEDY}") from error


def _counts(keys: pa.Array, counts: NDArray[np.int64]) -> Counts:
    if pa.types.is_string(keys.type):
        return Counts(text_keys(keys), counts, keys.cast(pa.large_string()))
    return Counts(ordered_bits(keys.to_numpy()), counts)
