"""How often each id of a table occurs in training, and the weights of ids that follow."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.schema import CategoricalFeature, Schema
from distembed.data.table.encoder import INTERACTIONS
from distembed.data.table.vocabulary import FIRST_ID
from distembed.embedding.config import CompositionalEmbeddingConfig

TRAIN = "train"
_UNSEEN_WEIGHT = 1e-3
"""Weight of an id that never occurred; one that occurred once weighs 1."""


def id_occurrences(
    dataset: str,
    manifest: Manifest,
    schema: Schema,
    tables: Sequence[CompositionalEmbeddingConfig],
    split: str = TRAIN,
) -> dict[str, Tensor]:
    """Returns how often each id occurs in training, by table name, from the counts in a dataset's vocabularies.

    A vocabulary of interactions counts all splits, and an applied vocabulary counts another dataset. In both cases the
    ids in the files of ``split`` are counted instead, if these files exist. Missing and unknown
    values occur as often as the manifest counts rows without a value and rows of dropped values; an empty list looks
    no id up. A unified table has the counts of its features, one after another. Tables that hash their ids, or have
    another number of ids than the vocabularies, are left out.

    Args:
        dataset: The folder of the dataset.
        manifest: Its manifest.
        schema: The columns of batches: the dataset's and the task's, whose features may have the ids of others.
        tables: The tables.
        split: The training split.
    """
    features = {feature.name: feature for feature in schema.categorical}
    occurrences = {}
    for table in tables:
        own = [features[name] for name in table.feature_names if name in features]
        own.sort(key=lambda feature: table.ids_of(feature.name).first)
        owners = dict.fromkeys(feature.table_name for feature in own)  # several in a unified table alone
        if table.pre_hash is not None or not owners.keys() <= manifest.vocabularies.keys():
            continue
        counts = [
            _counts(dataset, manifest, owner, [feature for feature in own if feature.table_name == owner], split)
            for owner in owners
        ]
        if sum(map(len, counts)) == table.num_embeddings:
            occurrences[table.name] = torch.cat(counts)
    return occurrences


def _counts(
    dataset: str, manifest: Manifest, owner: str, features: Sequence[CategoricalFeature], split: str
) -> Int64[Tensor, " ids"]:
    """Returns how often each id of the vocabulary of ``owner`` occurs in training, in the features that have it."""
    vocabulary = manifest.vocabularies[owner]
    is_applied = vocabulary.rows_dropped_by_split is not None
    if split != TRAIN or is_applied or manifest.preparation.get("source") == INTERACTIONS:
        files = [Path(dataset) / file.path for file in manifest.splits[split].files] if split in manifest.splits else []
        if files and all(file.is_file() for file in files):
            columns = [own for own in manifest.schema.categorical if own.table_name == owner]
            return _ids_in_files(files, columns, FIRST_ID + vocabulary.num_ids)
    file = manifest.require_unchanged(dataset, vocabulary.file)
    counted = torch.from_numpy(pq.read_table(file, columns=["count"])["count"].to_numpy().copy())
    single = [manifest.vocabularies.get(feature.name) for feature in features if not feature.multi_hot]
    num_missing = sum(found.rows_missing for found in single if found is not None)
    reserved = torch.tensor([num_missing, vocabulary.rows_dropped], dtype=counted.dtype)
    return torch.cat([reserved, counted])


def _ids_in_files(files: Sequence[Path], columns: Sequence[CategoricalFeature], num_ids: int) -> Int64[Tensor, " ids"]:
    """Returns how often each id occurs in some columns of a split's files, in lists or as single values."""
    counts = np.zeros(num_ids, np.int64)
    for file in files:
        with pq.ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(columns=[own.name for own in columns]):
                for own in columns:
                    ids = batch.column(own.name)
                    values = pc.list_flatten(ids) if own.multi_hot else ids
                    counts += np.bincount(values.to_numpy(zero_copy_only=False), minlength=num_ids)
    return torch.from_numpy(counts)


def id_weights(table: CompositionalEmbeddingConfig, counts: Tensor | None) -> Float[Tensor, " ids"]:
    """Returns a positive weight of each id: its count, :data:`_UNSEEN_WEIGHT` for a count of 0, or 1 without counts.

    Raises a :class:`UserError` unless there is a finite count of 0 or more for each id.
    """
    if counts is None:
        return torch.ones(1).expand(table.num_embeddings)
    weights = counts.to(torch.float32)
    if tuple(counts.shape) != (table.num_embeddings,) or not bool((weights.isfinite() & (weights >= 0)).all()):
        raise UserError(
            f"table {table.name!r}: counts has the shape {tuple(counts.shape)}; give a count that is not negative for "
            f"each of {table.num_embeddings} ids."
        )
    return torch.where(weights > 0, weights, _UNSEEN_WEIGHT)
