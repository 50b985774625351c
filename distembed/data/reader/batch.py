"""A batch of named fields, which the dataset's schema declares, in a form that TorchRec's pipelines take.

Ids are a ``KeyedJaggedTensor`` with the features in the schema's order, feature by feature::

    keys      [ C1                | genres              ]
    lengths     1    1    1         2       0    1            ids of each row, feature by feature
    values      17   4    17        3  9         5            int64

Numbers beside the ids of lists are such a tensor too, with float32 values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from distembed.data.dataset.schema import SPARSE_FEATURES
from distembed.data.single_ids import carry_single_ids

Field: TypeAlias = Tensor | KeyedJaggedTensor
"""The values of a field: a float32 tensor with one row a sample, or int64 ids or float32 numbers in lists."""


@dataclass
class Batch(Pipelineable):
    """The rows of one step on one rank.

    Models and tasks take a field by its name, ``batch["labels"]``, which TorchRec's pipelines understand too.

    Attributes:
        fields: The fields by name. Each is a float32 tensor with one row a sample, or the int64 ids of features or the
            float32 numbers beside them, whose stride is the number of samples; see
            :attr:`distembed.data.dataset.schema.Schema.fields`.
        global_batch_size: Rows of this step on all ranks, to weigh a rank's share of the loss. An evaluation has no
            loss: its batches may say any number above 0.
    """

    fields: Mapping[str, Field]
    global_batch_size: int

    def __getitem__(self, name: str) -> Field:
        """Returns the field of this name."""
        return self.fields[name]

    def __contains__(self, name: object) -> bool:
        return name in self.fields

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """Returns this batch on another device."""
        return self._each(lambda field: field.to(device=device, non_blocking=non_blocking))

    def record_stream(self, stream: torch.Stream) -> None:
        """Holds the memory until the work that is queued on this stream has used it."""
        for field in self.fields.values():
            field.record_stream(stream)

    def pin_memory(self) -> Batch:
        """Returns this batch in page-locked memory, for asynchronous copies to a GPU."""
        return self._each(lambda field: field.pin_memory())

    def write(self, path: Path) -> None:
        """Writes the rows as a NumPy archive: an array a field, and three for a field of lists.

        These are ``feature_names``, ``ids`` and ``lengths`` of the ids, and ``<field>_names``, ``<field>`` and
        ``<field>_lengths`` of others.
        """
        arrays: dict[str, np.ndarray] = {}
        for name, values in self.fields.items():
            if isinstance(values, KeyedJaggedTensor):
                keys = {"names": f"{name}_names", "values": name, "lengths": f"{name}_lengths"}
                if name == SPARSE_FEATURES:
                    keys = {"names": "feature_names", "values": "ids", "lengths": "lengths"}
                arrays[keys["names"]] = np.array(values.keys())
                arrays |= {keys["values"]: values.values().numpy(), keys["lengths"]: values.lengths().numpy()}
            else:
                arrays[name] = values.numpy()
        np.savez(path, **arrays)  # type: ignore[arg-type]

    def _each(self, change: Callable[[Field], Field]) -> Batch:
        """Returns a batch of the changed fields."""
        return Batch(
            {name: _keep_mark(field, change(field)) for name, field in self.fields.items()}, self.global_batch_size
        )


def _keep_mark(before: Field, after: Field) -> Field:
    if isinstance(before, KeyedJaggedTensor) and isinstance(after, KeyedJaggedTensor):
        return carry_single_ids(before, after)
    return after
