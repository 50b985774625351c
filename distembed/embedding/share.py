"""The vectors of all ids of a table, each composed on one rank: what a softmax over a catalogue and a ranking go over.

Every id of a table is in the share of exactly one rank. A rank goes through its share chunk by chunk, so that neither
the composed vectors of a compositional table nor the scores of all ids are ever in memory at once::

    ids       0 ................................ num_embeddings
    rank 0    | chunk 0 | chunk 1 | chunk 2 |
    rank 1                                  | chunk 0 | chunk 1 | chunk 2 |      in the order in which rows lie there
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist
from jaxtyping import Float, Int64
from torch import Tensor

from distembed.embedding.config import CompositionalEmbeddingConfig


@dataclass(frozen=True)
class VectorChunk:
    """Some ids of a rank's share.

    Attributes:
        ids: The ids; there may be none.
        vectors: The composed vector of each, without gradients.
    """

    ids: Int64[Tensor, " ids"]
    vectors: Float[Tensor, "ids dim"]


class TableShare(ABC):
    """The ids of a table whose vectors this rank composes.

    Attributes:
        table: The table.
        group: The process group over which the ids are shared; None for this process alone.
    """

    table: CompositionalEmbeddingConfig
    group: dist.ProcessGroup | None

    @property
    def world_size(self) -> int:
        """The number of ranks that share the table."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @abstractmethod
    def chunks(self, most_ids: int) -> Iterator[VectorChunk]:
        """Yields this rank's ids with their vectors; all ranks call it, and get equally many chunks.

        Args:
            most_ids: Most ids of a chunk, 1 or more.
        """
