"""The vectors of a catalogue's items that a network computes, as one looks them up in a table, to be ranked.

An evaluation shows the model the items batch by batch, before the queries. Each rank keeps the vectors of its batches
as its share of the catalogue. Trade-off: memory for all vectors of the share, ``items / ranks * dim`` float32 numbers,
in place of computing them anew for each block of queries.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from jaxtyping import Float, Int64
from torch import Tensor

from distembed.embedding.share import VectorChunk


class ItemVectors:
    """This rank's items with their vectors, as a :class:`~distembed.tasks.catalogue.ranking.RankedCatalogue`.

    Args:
        group: The ranks that share the items; None for this process alone.
    """

    bias: Tensor | None = None

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self._parts: list[VectorChunk] = []

    @property
    def world_size(self) -> int:
        """The number of ranks that share the items."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def add(self, ids: Int64[Tensor, " items"], vectors: Float[Tensor, "items dim"]) -> None:
        """Adds items; each id is added once, on one rank."""
        self._parts.append(VectorChunk(ids, vectors.detach().float()))

    def all(self) -> VectorChunk:
        """Returns all items of this rank, in the order in which they were added."""
        if len(self._parts) > 1:
            ids, vectors = (torch.cat([getattr(part, name) for part in self._parts]) for name in ("ids", "vectors"))
            self._parts = [VectorChunk(ids, vectors)]
        return self._parts[0]

    def share(self) -> "ItemVectors":
        """Returns this rank's share of the items."""
        return self

    def chunks(self, most_ids: int) -> Iterator[VectorChunk]:
        """Yields this rank's items, at most ``most_ids`` at once."""
        items = self.all()
        for ids, vectors in zip(items.ids.split(most_ids), items.vectors.split(most_ids), strict=True):
            yield VectorChunk(ids, vectors)
