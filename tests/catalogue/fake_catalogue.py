"""A catalogue whose items lie on ranks as a test says."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from distembed.embedding.share import VectorChunk


class FakeCatalogue:
    """Items of which a rank has every ``world_size``-th, in chunks of at most ``most_ids``."""

    def __init__(self, vectors: Tensor, bias: Tensor | None, most_ids: int) -> None:
        self.vectors, self.bias, self.most_ids = vectors, bias, most_ids
        self.group: Any = dist.group.WORLD if dist.is_initialized() else None

    def share(self) -> Any:
        world_size = 1 if self.group is None else dist.get_world_size()
        return SimpleNamespace(group=self.group, world_size=world_size, chunks=self.chunks)

    def chunks(self, most_ids: int) -> Iterator[VectorChunk]:
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        size = min(most_ids, self.most_ids)
        for first in range(0, -(-len(self.vectors) // world_size), size):
            ids = torch.arange(rank, len(self.vectors), world_size)[first : first + size]
            yield VectorChunk(ids, self.vectors[ids])


def brute_force(
    scores: np.ndarray[Any, Any], relevant: list[int], excluded: list[int], reserved: tuple[int, ...], num_best: int
) -> tuple[list[int], list[int]]:
    """Returns the number of candidates ahead of each relevant item, -1 for no candidate, and the best, by loops."""
    ranked = [item for item in range(len(scores)) if item not in excluded and item not in reserved]
    ranks = []
    for place, own in enumerate(relevant):
        if own not in ranked:
            ranks.append(-1)
            continue
        ahead = 0
        for item in ranked:
            if item in relevant:
                tied_earlier = scores[item] == scores[own] and relevant.index(item) < place
                ahead += bool(scores[item] > scores[own] or tied_earlier)
            else:
                ahead += bool(scores[item] >= scores[own])
        ranks.append(ahead)
    best = sorted(ranked, key=lambda item: (-scores[item], item))[:num_best]
    return ranks, best + [-1] * (num_best - len(best))
