"""Turns values of a column into ids of a table: by the dataset's vocabulary, by its hash, or as they are.

A value is an integer or a text. Where a dataset's keys are 32-bit numbers, as Criteo's are, a text is 1 to 8
hexadecimal digits, as in the raw files, and an integer is the number that they stand for. Where values are ids already,
a text is a decimal number. Where a vocabulary's keys are texts, an integer stands for its decimal digits. The values of
a table of any columns keep the type that they had in the table.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distembed.base.errors import UserError
from distembed.base.names import one_of
from distembed.data.dataset.manifest import Manifest
from distembed.data.table.blocks import KeyColumn
from distembed.data.table.keys import KEY_KINDS, Keys, hexadecimal_keys, plain_numbers
from distembed.data.table.parser import table_layout
from distembed.data.table.schema import CRITEO, TABLE
from distembed.data.table.schema_files import schema_of_manifest
from distembed.data.table.vocabulary import OUT_OF_VOCABULARY_ID, VocabularyMap, column_id_map
from distembed.graph.csr import Graph


class FoundIds(NamedTuple):
    """The id of each value of an array without nulls; no value is both malformed and unknown."""

    ids: NDArray[np.int64]  # meaningless where the value is malformed or unknown
    malformed: NDArray[np.bool_]  # whether the value is not of an allowed kind
    unknown: NDArray[np.bool_]  # whether the value is allowed, but the table has no id for it


@dataclass(frozen=True)
class ValueIds:
    """How the values of a column become ids."""

    num_nodes: int  # ids lie in [0, num_nodes)
    allowed: str  # values that there can be, in words
    unknown_means: str  # text that an error adds to a value without an id
    find: Callable[[pa.Array], FoundIds]


def plain_ids(num_nodes: int) -> ValueIds:
    """Returns the map for values that are already ids, integers or decimal text, in ``[0, num_nodes)``."""

    def find(values: pa.Array) -> FoundIds:
        ids, malformed = plain_numbers(values)
        return FoundIds(ids, malformed, ~malformed & (ids >= num_nodes))

    unknown_means = f"is beyond the table: its ids lie in 0 to {num_nodes - 1}"
    return ValueIds(num_nodes, "an integer of 0 or more", unknown_means, find)


def table_ids(dataset: str | os.PathLike[str], table: str) -> tuple[ValueIds, dict[str, Any]]:
    """Returns the map from raw values to ids of a dataset's table, and the result of :func:`describe_ids`."""
    manifest = Manifest.load(dataset)
    node_ids = describe_ids(dataset, manifest, table)
    column = _key_column(manifest, table)
    if column is None:
        return plain_ids(node_ids["num_embeddings"]), node_ids
    value_keys: Callable[[pa.Array], Keys] = KEY_KINDS[column.kind]
    allowed = "a text or an integer"
    if manifest.preparation.get("source") == TABLE:
        value_keys = KEY_KINDS[schema_of_manifest(manifest).categorical[table].kind]
        allowed = "what the column has in the table"
    elif manifest.preparation.get("source") == CRITEO:
        # the rows are text: an integer is a key, as their vocabularies have it
        value_keys, allowed = (
            lambda values: Keys(*hexadecimal_keys(values)),
            "1 to 8 hexadecimal digits, or an integer of 0 to 2^32-1",
        )
    id_map = column_id_map(Path(dataset), manifest, column)

    def find(values: pa.Array) -> FoundIds:
        keys = value_keys(values)
        ids = id_map.ids(keys.keys)
        is_vocabulary = isinstance(id_map, VocabularyMap)
        return FoundIds(ids, keys.wrong, is_vocabulary & ~keys.wrong & (ids == OUT_OF_VOCABULARY_ID))

    return ValueIds(node_ids["num_embeddings"], allowed, "is not in the table's vocabulary", find), node_ids


def describe_ids(dataset: str | os.PathLike[str], manifest: Manifest, table: str) -> dict[str, Any]:
    """Describes the ids of a table in JSON values, for ``graph.json``.

    Their ``fingerprint`` covers the table's name, number of ids, and hash seed or vocabulary. Raises a UserError if the
    vocabulary file is missing or changed.
    """
    one_of("table", table, manifest.schema.categorical_names)
    (feature,) = [feature for feature in manifest.schema.categorical if feature.name == table]
    node_ids: dict[str, Any] = {"table": table, "num_embeddings": feature.num_embeddings}
    column = _key_column(manifest, table)
    if column is not None and column.hash_size is not None:
        node_ids |= {"hash_seed": column.hash_seed}
    elif table in manifest.vocabularies:
        file = manifest.require_unchanged(dataset, manifest.vocabularies[table].file)
        try:
            with open(file, "rb") as content:
                node_ids |= {"vocabulary_sha256": hashlib.file_digest(content, "sha256").hexdigest()}
        except OSError as error:
            raise UserError(f"the vocabulary {file} cannot be read ({error}); prepare the dataset again.") from error
    return node_ids | {"fingerprint": hashlib.sha256(json.dumps(node_ids).encode()).hexdigest()}


def _key_column(manifest: Manifest, table: str) -> KeyColumn | None:
    """Returns the column whose keys a vocabulary or hash turns into a table's ids; None for bins and for plain ids."""
    if manifest.preparation.get("source") in (TABLE, CRITEO):
        layout = table_layout(schema_of_manifest(manifest))
        return next((column for column in layout.ids if column.name == table), None)
    return KeyColumn(table, "feature", "string") if table in manifest.vocabularies else None


def require_same_ids(graph: Graph, dataset: str | os.PathLike[str], manifest: Manifest, table: str) -> None:
    """Raises a UserError if a graph is for other ids than a table's; a graph over plain ids fits any table."""
    graph_ids = graph.details.get("ids", {})
    if "fingerprint" not in graph_ids:
        return
    dataset_ids = describe_ids(dataset, manifest, table)
    if graph_ids["fingerprint"] != dataset_ids["fingerprint"]:
        raise UserError(
            f"the graph {graph.folder} was prepared for table {graph_ids.get('table')!r} of a dataset with other ids "
            f"than table {table!r} of {dataset}; prepare it again with --data {dataset} --table {table}."
        )
