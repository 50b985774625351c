"""Schemas of YAML files, of the ones that are shipped, and of the manifests of datasets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from distembed.base.errors import UserError
from distembed.base.files import read_regular_file
from distembed.base.names import nearest
from distembed.base.validation import MAX_BYTES, parse_yaml
from distembed.data.dataset.manifest import Manifest
from distembed.data.table.schema import CRITEO, TABLE, TableSchema

_SHIPPED_FOLDER = Path(__file__).parent / "schemas"
_SUFFIX = ".yaml"


def shipped_schemas() -> list[str]:
    """Returns the names of the schemas that are shipped."""
    return sorted(path.stem for path in _SHIPPED_FOLDER.glob(f"*{_SUFFIX}"))


@cache
def _shipped_schema(name: str) -> TableSchema:
    return read_schema(_SHIPPED_FOLDER / (name + _SUFFIX))


def load_schema(name_or_path: str) -> TableSchema:
    """Reads a shipped schema by its name, or a YAML file; a UserError lists every mistake with the nearest name."""
    if name_or_path in shipped_schemas():
        return _shipped_schema(name_or_path)
    path = Path(name_or_path)
    if not path.exists() and not path.suffix and path.name == name_or_path:
        guess = nearest(name_or_path, shipped_schemas())
        hint = f" Did you mean {guess!r}?" if guess else ""
        raise UserError(
            f"the schema (--schema) is {name_or_path!r}, which is neither a file nor one that is shipped.{hint} "
            f"Shipped: {', '.join(shipped_schemas())}; `distembed prepare schema INPUT -o schema.yaml` writes one."
        )
    return read_schema(path)


def read_schema(path: Path) -> TableSchema:
    """Reads a schema from a YAML file; a UserError lists every mistake."""
    try:
        text = read_regular_file(path, MAX_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:  # ValueErrors are other encodings, and a path that no file can have
        raise UserError(f"the schema {path} cannot be read: {error}") from error
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise UserError(f"the schema {path} holds a {type(values).__name__}; it must hold keys such as `categorical:`.")
    return TableSchema.from_json(values, str(path))


def schema_of_preparation(preparation: Mapping[str, Any]) -> TableSchema:
    """Returns the schema of a dataset's raw rows from the manifest's ``preparation``.

    A table's preparation holds its schema; Criteo's holds the options that change the shipped schema. Raises a
    UserError for datasets of other sources.
    """
    source = preparation.get("source")
    if source == TABLE and isinstance(preparation.get("schema"), Mapping):
        return TableSchema.from_json(preparation["schema"], "the schema in the dataset's manifest")
    if source != CRITEO:
        raise UserError(
            f"the dataset was prepared from {source or 'files of its own'!r}: raw rows are known of datasets of "
            "`distembed prepare table` and `prepare criteo`"
        )
    schema = load_schema(CRITEO)
    missing = preparation.get("missing", "zero")
    seed = preparation.get("hash_seed", 0)
    return dataclasses.replace(
        schema,
        dense={name: dataclasses.replace(column, missing=missing) for name, column in schema.dense.items()},
        categorical={name: dataclasses.replace(column, hash_seed=seed) for name, column in schema.categorical.items()},
        split=preparation.get("split", schema.split),
        min_count=preparation.get("min_count", schema.min_count),
        hash_size=preparation.get("hash_size"),
    )


def schema_of_manifest(manifest: Manifest) -> TableSchema:
    """Returns the schema of the raw rows that a dataset of a table, or of Criteo's rows, was prepared from."""
    return schema_of_preparation(manifest.preparation)
