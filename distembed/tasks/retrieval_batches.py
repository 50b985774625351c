"""Stacks rows that have some of a dataset's features each into one batch of all features.

A feature that a row lacks has no id there, and the number 0::

    rows                  user      item        batch    user      item
    queries               7 9       4 5                  7 9 - -   4 5 6 8
    further items         -         6 8
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.data.dataset.schema import DENSE_FEATURES, SPARSE_FEATURES, Schema
from distembed.data.reader.batch import Batch
from distembed.data.single_ids import mark_single_ids
from distembed.tasks.sequence_batches import columns, jagged


@dataclass(frozen=True)
class FeatureRows:
    """Some features of some rows.

    Attributes:
        num_rows: Number of the rows.
        ids: For each categorical feature, its ids, row after row, and the number of ids of each row.
        numbers: For each dense feature, the number of each row.
    """

    num_rows: int
    ids: Mapping[str, tuple[Tensor, NDArray[np.int64]]]
    numbers: Mapping[str, Tensor]

    @classmethod
    def of(cls, batch: Batch, schema: Schema) -> "FeatureRows":
        """Returns all features of a batch on the CPU that has the columns of a schema."""
        features, dense = batch[SPARSE_FEATURES], batch[DENSE_FEATURES]
        assert isinstance(features, KeyedJaggedTensor) and isinstance(dense, Tensor)
        return cls(features.stride(), columns(features), dict(zip(schema.dense, dense.unbind(1), strict=True)))

    def without(self, names: list[str]) -> "FeatureRows":
        """Returns the rows without some features."""
        ids = {name: values for name, values in self.ids.items() if name not in names}
        numbers = {name: values for name, values in self.numbers.items() if name not in names}
        return FeatureRows(self.num_rows, ids, numbers)

    def where(self, is_kept: NDArray[np.bool_]) -> "FeatureRows":
        """Returns some of the rows."""
        if is_kept.all():
            return self
        ids = {
            name: (values[torch.from_numpy(np.repeat(is_kept, lengths))], lengths[is_kept])
            for name, (values, lengths) in self.ids.items()
        }
        numbers = {name: values[torch.from_numpy(is_kept)] for name, values in self.numbers.items()}
        return FeatureRows(int(is_kept.sum()), ids, numbers)


def stacked(schema: Schema, *parts: FeatureRows) -> dict[str, Tensor | KeyedJaggedTensor]:
    """Returns the fields of ids and numbers, with all features of a schema, of the parts' rows one after another."""
    none = torch.zeros(0, dtype=torch.int64)
    ids = {}
    for name in schema.categorical_names:
        own = [part.ids.get(name, (none, np.zeros(part.num_rows, np.int64))) for part in parts]
        ids[name] = torch.cat([values for values, _ in own]), np.concatenate([lengths for _, lengths in own])
    num_rows = sum(part.num_rows for part in parts)
    dense = torch.zeros(num_rows, len(schema.dense))
    for column, name in enumerate(schema.dense):
        torch.cat([part.numbers.get(name, torch.zeros(part.num_rows)) for part in parts], out=dense[:, column])
    features = jagged(ids, num_rows)
    if not any(feature.multi_hot for feature in schema.categorical):  # so on all ranks, and in every batch
        mark_single_ids(features)
    return {DENSE_FEATURES: dense, SPARSE_FEATURES: features}
