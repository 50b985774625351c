"""Values of a column as ids of a table: by the dataset's vocabulary, by its hash, or as they are.

A value is an integer or a text. Where a dataset's keys are 32-bit numbers, as Criteo's are, a text is 1 to 8
hexadecimal digits, as in the raw files, and an integer is the number that they stand for. Where values are ids already,
a text is a decimal number. Where a vocabulary's keys are texts, so are the values.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from distembed.data.dataset.manifest import Manifest
from distembed.data.prepare.merge import sort_keys
from distembed.data.prepare.vocabulary import OUT_OF_VOCABULARY_ID, HashMap, VocabularyMap
from distembed.errors import UserError
from distembed.graph.graph import Graph
from distembed.graph.prepare.input import INTEGER, TEXT
from distembed.graph.prepare.values import decimal_numbers, hexadecimal_keys
from distembed.names import one_of


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


@dataclass(frozen=True)
class ValueMap(ABC):
    """From a column's values to a table's ids, which lie in ``[0, num_nodes)``."""

    num_nodes: int

    kinds: ClassVar[Sequence[str]]
    allowed: ClassVar[str]

    @property
    def unknown_means(self) -> str:
        """What is said of a value without an id."""
        return "is not in the table's vocabulary"

    @abstractmethod
    def find(self, values: pa.Array) -> FoundIds:
        """The id of each value."""


@dataclass(frozen=True)
class PlainIds(ValueMap):
    """Values are ids."""

    kinds = (INTEGER,)
    allowed = "an integer of 0 or more"

    @property
    def unknown_means(self) -> str:
        return f"is beyond the table: its ids lie in 0 to {self.num_nodes - 1}"

    def find(self, values: pa.Array) -> FoundIds:
        ids, malformed = decimal_numbers(values)
        return FoundIds(ids, malformed, ~malformed & (ids >= self.num_nodes))


@dataclass(frozen=True)
class KeyedIds(ValueMap):
    """Values are 32-bit keys, in a vocabulary or hashed."""

    id_map: VocabularyMap | HashMap

    kinds = (INTEGER,)
    allowed = "1 to 8 hexadecimal digits, or an integer of 0 to 2^32-1"

    def find(self, values: pa.Array) -> FoundIds:
        keys, malformed = hexadecimal_keys(values)
        ids = self.id_map.ids(keys)
        in_vocabulary = isinstance(self.id_map, VocabularyMap)
        return FoundIds(ids, malformed, in_vocabulary & ~malformed & (ids == OUT_OF_VOCABULARY_ID))


@dataclass(frozen=True)
class TextIds(ValueMap):
    """Values are texts in a vocabulary."""

    keys: pa.Array
    key_ids: NDArray[np.int64]

    kinds = (TEXT,)
    allowed = "a text"

    def find(self, values: pa.Array) -> FoundIds:
        found = pc.fill_null(pc.index_in(values, value_set=self.keys), -1).to_numpy(zero_copy_only=False)
        malformed = values.is_null().to_numpy(zero_copy_only=False)
        ids = np.where(found < 0, OUT_OF_VOCABULARY_ID, self.key_ids[found]) if len(self.keys) else found
        return FoundIds(ids.astype(np.int64), malformed, ~malformed & (found < 0))


def table_ids(dataset: str | os.PathLike[str], table: str) -> tuple[ValueMap, dict[str, Any]]:
    """How a prepared dataset gives ids to the values of a table, and what tells that from other ways.

    Raises:
        UserError: there is no such dataset or table, or its vocabulary cannot be read.
    """
    manifest = Manifest.load(dataset)
    described = describe_ids(dataset, manifest, table)
    num_embeddings = described["num_embeddings"]
    if "hash_seed" in described:
        return KeyedIds(num_embeddings, HashMap(num_embeddings, described["hash_seed"])), described
    if table in manifest.vocabularies:
        return _read_vocabulary(Path(dataset) / manifest.vocabularies[table].file, num_embeddings), described
    return PlainIds(num_embeddings), described


def describe_ids(dataset: str | os.PathLike[str], manifest: Manifest, table: str) -> dict[str, Any]:
    """What the ids of a table are; ``fingerprint`` is equal where ids stand for the same values.

    Raises:
        UserError: there is no such table, or its vocabulary cannot be read.
    """
    one_of("table", table, manifest.schema.categorical_names)
    (feature,) = [feature for feature in manifest.schema.categorical if feature.name == table]
    described: dict[str, Any] = {"table": table, "num_embeddings": feature.num_embeddings}
    if manifest.preparation.get("hash_size") is not None:
        described |= {"hash_seed": manifest.preparation["hash_seed"]}
    elif table in manifest.vocabularies:
        file = Path(dataset) / manifest.vocabularies[table].file
        try:
            with open(file, "rb") as content:
                described |= {"vocabulary_sha256": hashlib.file_digest(content, "sha256").hexdigest()}
        except OSError as error:
            raise UserError(f"the vocabulary {file} cannot be read ({error}); prepare the dataset again.") from error
    return described | {"fingerprint": hashlib.sha256(json.dumps(described).encode()).hexdigest()}


def require_same_ids(graph: Graph, dataset: str | os.PathLike[str], manifest: Manifest, table: str) -> None:
    """Makes sure that a graph over a dataset's table was not prepared for other ids.

    Raises:
        UserError: where it was. A graph over plain ids says nothing of what they stand for.
    """
    made_for = graph.details.get("ids", {})
    if "fingerprint" not in made_for:
        return
    found = describe_ids(dataset, manifest, table)
    if made_for["fingerprint"] != found["fingerprint"]:
        raise UserError(
            f"the graph {graph.folder} was prepared for table {made_for.get('table')!r} of a dataset with other ids "
            f"than table {table!r} of {dataset}; prepare it again with --data {dataset} --table {table}."
        )


def _read_vocabulary(file: Path, num_embeddings: int) -> ValueMap:
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
