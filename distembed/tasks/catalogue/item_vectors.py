"""The vectors of a catalogue's items that a network computes, stored to be ranked like the vectors of a table.

An evaluation shows the model the items batch by batch, before the queries. Each rank keeps the vectors of its batches
as its share of the catalogue. Trade-off: memory for all vectors of the share, ``items / ranks * dim`` float32 numbers,
instead of computing them for each block of queries.
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
        num_items: Number of this rank's items.
    """

    bias: Tensor | None = None

    def __init__(self, group: dist.ProcessGroup | None = None, num_items: int = 0) -> None:
        self.group, self._num_items, self._num_added = group, num_items, 0
        self._items: VectorChunk | None = None

    @property
    def world_size(self) -> int:
        """The number of ranks that share the items."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def add(self, ids: Int64[Tensor, " items"], vectors: Float[Tensor, "items dim"]) -> None:
        """Adds items; each id is added once, on one rank."""
        if self._items is None:  # the first batch, maybe without items, shows the device and the dimension
            shape = self._num_items, vectors.shape[1]
            self._items = VectorChunk(ids.new_empty(self._num_items), vectors.new_empty(shape, dtype=torch.float32))
        place = slice(self._num_added, self._num_added + len(ids))
        self._items.ids[place], self._items.vectors[place] = ids, vectors.detach()
        self._num_added = place.stop

    def all(self) -> VectorChunk:
        """Returns all items of this rank, in the order in which they were added."""
        assert self._items is not None and self._num_added == self._num_items, "the model has seen each item once"
        return self._items

    def share(self) -> "ItemVectors":
        """Returns this rank's share of the items."""
        return self

    def chunks(self, most_ids: int) -> Iterator[VectorChunk]:
        """Yields this rank's items, at most ``most_ids`` at once."""
        items = self.all()
        for ids, vectors in zip(items.ids.split(most_ids), items.vectors.split(most_ids), strict=True):
            yield VectorChunk(ids, vectors)
