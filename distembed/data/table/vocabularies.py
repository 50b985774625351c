"""The vocabularies of a dataset that is there: raw values to ids, and ids to raw values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.pieces import REMEDY
from distembed.data.prepare.blocks import KeyColumn
from distembed.data.prepare.vocabulary import FIRST_ID, HashMap, IdMap, vocabulary_map


def column_id_map(folder: Path, manifest: Manifest, column: KeyColumn) -> IdMap:
    """Returns the function from a column's keys to the ids that a dataset, or a run's copy of it, gave them.

    Raises:
        UserError: The vocabulary is missing or damaged, or two of its texts have the same key.
    """
    if column.hash_size is not None:
        return HashMap(column.hash_size, column.hash_seed)
    return vocabulary_map(_vocabulary_file(folder, manifest, column.name), column)


def raw_values(folder: Path, manifest: Manifest, feature: str) -> pa.Array:
    """Returns the raw value of each id of a feature as Arrow's string, null for missing and unknown ones.

    Hexadecimal values have 8 digits.

    Raises:
        UserError: The dataset has no vocabulary of the feature, or it is damaged.
    """
    path = _vocabulary_file(folder, manifest, feature)
    try:
        keys = pq.read_table(path, columns=["key"])["key"].combine_chunks()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"the vocabulary {path} cannot be read: {error}; {REMEDY}") from error
    if pa.types.is_uint32(keys.type):
        texts = pa.array([f"{key:08x}" for key in keys.to_pylist()], pa.string())
    else:
        texts = keys.cast(pa.string())
    return pa.concat_arrays([pa.nulls(FIRST_ID, pa.string()), texts])


def take_values(values: pa.Array, ids: NDArray[np.int64]) -> pa.Array:
    """Returns the raw values of ids; null for those that stand for none, such as -1."""
    return values.take(pa.array(np.where((ids < 0) | (ids >= len(values)), 0, ids)))


def _vocabulary_file(folder: Path, manifest: Manifest, feature: str) -> Path:
    """Returns the path of a feature's vocabulary, once it is held against its checksum."""
    if feature not in manifest.vocabularies:
        raise UserError(
            f"the dataset of {folder} has no vocabulary of {feature!r}, so that its raw values are not known: they are "
            "hashed, or it was made elsewhere"
        )
    path = manifest.require_unchanged(folder, manifest.vocabularies[feature].file)
    if not path.exists():
        raise UserError(f"the vocabulary {path} is missing; {REMEDY}")
    return path
