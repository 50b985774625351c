"""The raw values of ids as text files, for programs that have neither Arrow nor distembed.

A line is a JSON text, and the first one has id 2 (0 is a missing value, 1 any other)::

    "68fd1e64"
    "05db9164"
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.schema import Schema
from distembed.data.table.vocabulary import FIRST_ID, raw_values

_VALUES_AT_ONCE = 1 << 16


def write_vocabularies(folder: Path, dataset: Path, manifest: Manifest, features: Sequence[str]) -> dict[str, str]:
    """Writes a file for each table whose ids have raw values.

    Args:
        folder: The folder of the exported model.
        dataset: The dataset, or what a run keeps of it.
        manifest: Its manifest.
        features: Names of the features.

    Returns:
        The file of each feature that has one, relative to the folder.

    Raises:
        UserError: A vocabulary is damaged.
    """
    tables = _tables(manifest.schema)
    files: dict[str, str] = {}
    for table in dict.fromkeys(tables[name] for name in features):
        if table not in manifest.vocabularies:
            continue
        values = raw_values(dataset, manifest, table)
        is_plain = re.fullmatch(r"[A-Za-z]\w{0,99}", table, re.ASCII) is not None
        file = folder / "vocabularies" / (f"{table}.jsonl" if is_plain else f"{len(files)}.jsonl")
        file.parent.mkdir(exist_ok=True)
        with file.open("w", encoding="utf-8") as written:
            for start in range(FIRST_ID, len(values), _VALUES_AT_ONCE):
                chunk = values.slice(start, _VALUES_AT_ONCE).to_pylist()
                written.writelines(f"{json.dumps(value)}\n" for value in chunk)
        files[table] = f"vocabularies/{file.name}"
    return {name: files[tables[name]] for name in features if tables[name] in files}


def _tables(schema: Schema) -> Mapping[str, str]:
    """Returns the name of the feature whose ids a feature has."""
    return {feature.name: feature.table_name for feature in schema.categorical}
