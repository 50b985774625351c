"""Turns values of a column into ids of a table: by the dataset's vocabulary, by its hash, or as they are.

A value is an integer or a text. Where a dataset's keys are 32-bit numbers, as Criteo's are, a text is 1 to 8
hexadecimal digits, as in the raw files, and an integer is the number that they stand for. Where values are ids already,
a text is a decimal number. Where a vocabulary's keys are texts, an integer stands for its decimal digits. Of tables of
any columns, a value is what it was in the table.
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
from distembed.data.prepare.blocks import KeyColumn
from distembed.data.prepare.column_numbers import decimal_numbers, hexadecimal_keys
from distembed.data.prepare.vocabulary import OUT_OF_VOCABULARY_ID, HashMap, IdMap, VocabularyMap, sort_keys
from distembed.data.table.keys import KEY_KINDS
from distembed.data.table.parser import table_layout
from distembed.data.table.raw_columns import INTEGER, TEXT
from distembed.data.table.schema import TableSchema
from distembed.data.table.vocabularies import column_id_map
from distembed.errors import UserError
from distembed.graph.csr import Graph
from distembed.names import one_of


@dataclass(frozen=True)
class FoundIds:
    """The ids of a column's values.

    Attributes:
        ids: Id of each value; meaningless where the value is malformed or unknown.
        malformed: Whether each value is none of the kind that is allowed.
        unknown: Whether the table has no id for each value.
    """

    ids: NDArray[np.int64]
    malformed: NDArray[np.bool_]
    unknown: NDArray[np.bool_]


@dataclass(frozen=True)
class ValueMap(ABC):
    """A function from a column's values to a table's ids.

    Attributes:
        num_nodes: Number of ids, which lie in ``[0, num_nodes)``.
        kinds: Kinds of values that a column may hold, besides text.
        allowed: What a value must be, in words.
    """

    num_nodes: int

    kinds: ClassVar[Sequence[str]]
    allowed: ClassVar[str]

    @property
    def unknown_means(self) -> str:
        """What an error says of a value without an id."""
        return "is not in the table's vocabulary"

    @abstractmethod
    def find(self, values: pa.Array) -> FoundIds:
        """Returns the id of each value, and which values have none."""


@dataclass(frozen=True)
class PlainIds(ValueMap):
    """Values that are ids themselves."""

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
    """Values that are 32-bit keys, in a vocabulary or hashed.

    Attributes:
        id_map: Vocabulary, or hash.
    """

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
    """Values that are texts in a vocabulary.

    Attributes:
        keys: Texts of the vocabulary.
        key_ids: Id of each text.
    """

    keys: pa.Array
    key_ids: NDArray[np.int64]

    kinds = (INTEGER, TEXT)
    allowed = "a text or an integer"

    def find(self, values: pa.Array) -> FoundIds:
        values = values.cast(pa.string())
        found = pc.fill_null(pc.index_in(values, value_set=self.keys), -1).to_numpy(zero_copy_only=False)
        malformed = values.is_null().to_numpy(zero_copy_only=False)
        ids = np.where(found < 0, OUT_OF_VOCABULARY_ID, self.key_ids[found]) if len(self.keys) else found
        return FoundIds(ids.astype(np.int64), malformed, ~malformed & (found < 0))


@dataclass(frozen=True)
class RawIds(ValueMap):
    """Values of a column of a table of any columns, in a vocabulary or hashed.

    Attributes:
        id_map: Vocabulary, or hash.
        kind: What the values are, one of :data:`distembed.data.table.keys.KEY_KINDS`.
    """

    id_map: IdMap
    kind: str

    kinds = (INTEGER, TEXT)
    allowed = "what the column has in the table"

    def find(self, values: pa.Array) -> FoundIds:
        found = KEY_KINDS[self.kind](values.fill_null("") if pa.types.is_string(values.type) else values.fill_null(0))
        malformed = found.wrong | values.is_null().to_numpy(zero_copy_only=False)
        ids = self.id_map.ids(found.keys)
        is_vocabulary = isinstance(self.id_map, VocabularyMap)
        return FoundIds(ids, malformed, is_vocabulary & ~malformed & (ids == OUT_OF_VOCABULARY_ID))


def table_ids(dataset: str | os.PathLike[str], table: str) -> tuple[ValueMap, dict[str, Any]]:
    """Returns how a prepared dataset gives ids to the values of a table, and the :func:`describe_ids` of it.

    Raises:
        UserError: There is no such dataset or table, or its vocabulary cannot be read.
    """
    manifest = Manifest.load(dataset)
    node_ids = describe_ids(dataset, manifest, table)
    num_embeddings = node_ids["num_embeddings"]
    column = _raw_column(manifest, table)
    if column is not None:
        kind = TableSchema.of_manifest(manifest).categorical[table].kind
        return RawIds(num_embeddings, column_id_map(Path(dataset), manifest, column), kind), node_ids
    if "hash_seed" in node_ids:
        return KeyedIds(num_embeddings, HashMap(num_embeddings, node_ids["hash_seed"])), node_ids
    if table in manifest.vocabularies:
        return _read_vocabulary(Path(dataset) / manifest.vocabularies[table].file, num_embeddings), node_ids
    return PlainIds(num_embeddings), node_ids


def describe_ids(dataset: str | os.PathLike[str], manifest: Manifest, table: str) -> dict[str, Any]:
    """Returns what the ids of a table are, in plain JSON values.

    Its ``fingerprint`` is the same where ids stand for the same values.

    Raises:
        UserError: There is no such table, or its vocabulary cannot be read.
    """
    one_of("table", table, manifest.schema.categorical_names)
    (feature,) = [feature for feature in manifest.schema.categorical if feature.name == table]
    node_ids: dict[str, Any] = {"table": table, "num_embeddings": feature.num_embeddings}
    column = _raw_column(manifest, table)
    if manifest.preparation.get("hash_size") is not None:
        node_ids |= {"hash_seed": manifest.preparation["hash_seed"]}
    elif column is not None and column.hash_size is not None:
        node_ids |= {"hash_seed": column.hash_seed}
    elif table in manifest.vocabularies:
        file = manifest.require_unchanged(dataset, manifest.vocabularies[table].file)
        try:
            with open(file, "rb") as content:
                node_ids |= {"vocabulary_sha256": hashlib.file_digest(content, "sha256").hexdigest()}
        except OSError as error:
            raise UserError(f"the vocabulary {file} cannot be read ({error}); prepare the dataset again.") from error
    return node_ids | {"fingerprint": hashlib.sha256(json.dumps(node_ids).encode()).hexdigest()}


def _raw_column(manifest: Manifest, table: str) -> KeyColumn | None:
    """Returns the column of a table of any columns whose values have the ids; None where they are bins, or not such."""
    if "schema" not in manifest.preparation:
        return None
    layout = table_layout(TableSchema.of_manifest(manifest))
    return next((column for column in layout.ids if column.name == table), None)


def require_same_ids(graph: Graph, dataset: str | os.PathLike[str], manifest: Manifest, table: str) -> None:
    """Makes sure that a graph was not prepared for other ids than those of a dataset's table.

    A graph over plain ids says nothing of what they stand for, and fits every table of its size.

    Raises:
        UserError: The graph was prepared for other ids.
    """
    graph_ids = graph.details.get("ids", {})
    if "fingerprint" not in graph_ids:
        return
    found = describe_ids(dataset, manifest, table)
    if graph_ids["fingerprint"] != found["fingerprint"]:
        raise UserError(
            f"the graph {graph.folder} was prepared for table {graph_ids.get('table')!r} of a dataset with other ids "
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
