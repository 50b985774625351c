"""Schemes and compositions by name, for the tests that run over all of them."""

import torch

from distembed.composition import COMPOSITIONS, Composition, PathMLP
from distembed.partitions import PARTITIONS, Explicit, Partition


def make_partition(name: str, num_embeddings: int) -> Partition:
    """A scheme for so many ids, of more than one partition where it can have that."""
    if name == "explicit":
        ids = torch.arange(num_embeddings)
        return Explicit(num_embeddings, [ids % 7, ids // 7])
    return PARTITIONS[name](num_embeddings)


def small_composition(name: str) -> Composition:
    """With few hidden values, for gradients that are taken number by number."""
    return PathMLP(hidden=[5]) if name == "path_mlp" else COMPOSITIONS[name]()
