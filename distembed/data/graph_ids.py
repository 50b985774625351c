"""Values of a column as ids of a table: by the dataset's vocabulary, by its hash, or as they are.

A value is an integer or a text. Where a dataset's keys are 32-bit numbers, as Criteo's are, a text is 1 to 8 hexadecimal
digits, as in the raw files, and an integer is the number that they stand for. Where values are ids already, a text is a
decimal number. Where a vocabulary's keys are texts, so are the values.
"""

from __future__ import annotations

import binascii
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from distembed.data.graph_input import INTEGER, TEXT
from distembed.data.manifest import Manifest
from distembed.data.vocabulary import OUT_OF_VOCABULARY_ID, HashMap, IdMap, VocabularyMap, sort_keys
from distembed.errors import UserError
from distembed.names import one_of

_MAX_KEY = 2**32 - 1
_HEX_DIGITS = 8


@dataclass(frozen=True)
class FoundIds:
    """The ids of some values.

    Attributes:
        ids: of each value; meaningless where it is malformed or unknown.
        malformed: which values are none.
        unknown: which values the table has no id for.
    """

    ids: NDArray[np.int64]
    malformed: NDArray[np.bool_]
    unknown: NDArray[np.bool_]


class ValueMap(Protocol):
    """From a column's values to a table's ids."""

    num_nodes: int
    kinds: Sequence[str]
    allowed: str
    unknown_means: str

    def find(self, values: pa.Array) -> FoundIds:
        """The id of each value."""


@dataclass(frozen=True)
class PlainIds:
    """Values are ids."""

    num_nodes: int
    kinds: Sequence[str] = (INTEGER,)

    @property
    def allowed(self) -> str:
        """What a value may be."""
        return "an integer of 0 or more"

    @property
    def unknown_means(self) -> str:
        """Why a value has no id."""
        return f"is beyond the table, whose ids lie in 0 to {self.num_nodes - 1}"

    def find(self, values: pa.Array) -> FoundIds:
        """The numbers themselves."""
        ids, malformed = decimal_numbers(values)
        return FoundIds(ids, malformed, ~malformed & (ids >= self.num_nodes))


@dataclass(frozen=True)
class KeyedIds:
    """Values are 32-bit keys, in a vocabulary or hashed."""

    num_nodes: int
    id_map: IdMap
    kinds: Sequence[str] = (INTEGER, TEXT)
    allowed: str = "1 to 8 hexadecimal digits, or an integer of 0 to 2^32-1"
    unknown_means: str = "is not in the table's vocabulary"

    def find(self, values: pa.Array) -> FoundIds:
        """Ids by key."""
        keys, malformed = hexadecimal_keys(values)
        ids = self.id_map.ids(keys)
        is_hash = isinstance(self.id_map, HashMap)
        unknown = np.zeros(len(ids), bool) if is_hash else ~malformed & (ids == OUT_OF_VOCABULARY_ID)
        return FoundIds(ids, malformed, unknown)


@dataclass(frozen=True)
class TextIds:
    """Values are texts in a vocabulary."""

    num_nodes: int
    keys: pa.Array
    key_ids: NDArray[np.int64]
    kinds: Sequence[str] = (TEXT,)
    allowed: str = "a text"
    unknown_means: str = "is not in the table's vocabulary"

    def find(self, values: pa.Array) -> FoundIds:
        """Ids by key."""
        found = pc.fill_null(pc.index_in(values, value_set=self.keys), -1).to_numpy(zero_copy_only=False)
        malformed = values.is_null().to_numpy(zero_copy_only=False)
        return FoundIds(self.key_ids[found], malformed, ~malformed & (found < 0))


def table_ids(dataset: str | os.PathLike[str], table: str) -> tuple[ValueMap, dict[str, Any]]:
    """How a prepared dataset gives ids to the values of a table, and how to tell it from another that does not alike.

    Raises:
        UserError: there is no such dataset or table, or its vocabulary cannot be read.
    """
    manifest = Manifest.load(dataset)
    table = one_of("table", table, manifest.schema.categorical_names)
    feature = next(feature for feature in manifest.schema.categorical if feature.name == table)
    described: dict[str, Any] = {"table": table, "num_embeddings": feature.num_embeddings}
    if manifest.preparation.get("hash_size") is not None:
        id_map = HashMap(manifest.preparation["hash_size"], manifest.preparation["hash_seed"])
        described |= {"hash_seed": id_map.seed}
        found: ValueMap = KeyedIds(feature.num_embeddings, id_map)
    elif table in manifest.vocabularies:
        file = Path(dataset) / manifest.vocabularies[table].file
        found = _read_vocabulary(file, feature.num_embeddings)
        with open(file, "rb") as content:
            described |= {"vocabulary_sha256": hashlib.file_digest(content, "sha256").hexdigest()}
    else:
        found = PlainIds(feature.num_embeddings)
    return found, described | {"fingerprint": hashlib.sha256(json.dumps(described).encode()).hexdigest()}


def _read_vocabulary(file: Path, num_embeddings: int) -> ValueMap:
    if not file.is_file():
        raise UserError(f"the vocabulary {file} is missing: the dataset is not whole; prepare it again.")
    try:
        table = pq.read_table(file, columns=["id", "key"]).combine_chunks()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"the vocabulary {file} cannot be read ({error}); prepare the dataset again.") from error
    ids, keys = (table[name].chunk(0) if len(table) else pa.array([], table[name].type) for name in ("id", "key"))
    key_ids = ids.to_numpy().astype(np.int64)
    if pa.types.is_integer(keys.type):
        ascending, order = sort_keys(keys.to_numpy().astype(np.uint32))
        return KeyedIds(num_embeddings, VocabularyMap(ascending, key_ids[order]))
    return TextIds(num_embeddings, keys.cast(pa.string()), key_ids)


def decimal_numbers(values: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Numbers of 0 to 2^63-1, and which values are none."""
    if pa.types.is_integer(values.type):
        numbers = _integers(values)
        return numbers, numbers < 0
    good = _matches(values, "^0*[0-9]{1,18}$")
    return pc.cast(pc.if_else(good, values, "0"), pa.int64()).to_numpy(), _not(good)


def hexadecimal_keys(values: pa.Array) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    """Numbers of 32 bits, and which values are none."""
    if pa.types.is_integer(values.type):
        numbers = _integers(values)
        malformed = (numbers < 0) | (numbers > _MAX_KEY)
        return np.where(malformed, 0, numbers).astype(np.uint32), malformed
    good = _matches(values, f"^[0-9a-fA-F]{{1,{_HEX_DIGITS}}}$")
    digits = pc.utf8_lpad(pc.if_else(good, values, "0"), width=_HEX_DIGITS, padding="0")
    text = np.frombuffer(digits.buffers()[2] or b"", np.uint8)[: _HEX_DIGITS * len(digits)]
    return np.frombuffer(binascii.unhexlify(text.data), ">u4").astype(np.uint32), _not(good)


def _integers(values: pa.Array) -> NDArray[np.int64]:
    """Null, and what exceeds 63 bits, becomes negative."""
    unsigned = pa.types.is_uint64(values.type)
    filled = values.fill_null(2**64 - 1 if unsigned else -1) if values.null_count else values
    numbers: NDArray[np.int64] = filled.to_numpy().astype(np.int64)
    return numbers


def _matches(values: pa.Array, pattern: str) -> pa.Array:
    return pc.fill_null(pc.match_substring_regex(values, pattern), False)


def _not(matches: pa.Array) -> NDArray[np.bool_]:
    result: NDArray[np.bool_] = ~matches.to_numpy(zero_copy_only=False)
    return result
