"""One training batch, ready for TorchRec's pipelines.

Ids are a ``KeyedJaggedTensor`` with the features in the schema's order, feature by feature::

    keys      [ C1                | genres              ]
    lengths     1    1    1         2       0    1            ids of each row, feature by feature
    values      17   4    17        3  9         5            int64
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable


@dataclass
class Batch(Pipelineable):
    """Rows of one step on one rank.

    Attributes:
        dense_features: float32, one row a sample.
        sparse_features: int64 ids of every categorical feature; its stride is the number of rows.
        labels: float32, one a sample.
        global_batch_size: rows of this step over all ranks, to weigh a rank's share of the loss.
    """

    dense_features: Float[Tensor, "batch dense"]
    sparse_features: KeyedJaggedTensor
    labels: Float[Tensor, " batch"]
    global_batch_size: int

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """This batch on another device."""
        return Batch(
            dense_features=self.dense_features.to(device=device, non_blocking=non_blocking),
            sparse_features=self.sparse_features.to(device=device, non_blocking=non_blocking),
            labels=self.labels.to(device=device, non_blocking=non_blocking),
            global_batch_size=self.global_batch_size,
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until the work queued on this stream has used it."""
        self.dense_features.record_stream(stream)
        self.sparse_features.record_stream(stream)
        self.labels.record_stream(stream)

    def pin_memory(self) -> Batch:
        """This batch in page-locked memory, for asynchronous copies to a GPU."""
        return Batch(
            dense_features=self.dense_features.pin_memory(),
            sparse_features=self.sparse_features.pin_memory(),
            labels=self.labels.pin_memory(),
            global_batch_size=self.global_batch_size,
        )
