"""The modules' meaning in plain Python: one id at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.embedding import CompositionalEmbeddingConfig

Bags = dict[str, list[list[int]]]


def jagged(bags: Bags, weights: dict[str, list[list[float]]] | None = None) -> KeyedJaggedTensor:
    """A batch of ids, and of their weights, bag after bag and feature after feature."""
    return KeyedJaggedTensor(
        list(bags),
        torch.tensor([i for feature in bags.values() for bag in feature for i in bag], dtype=torch.long),
        weights=None if weights is None else torch.tensor([w for f in weights.values() for bag in f for w in bag]),
        lengths=torch.tensor([len(bag) for feature in bags.values() for bag in feature], dtype=torch.long),
    )


def vector_of(config: CompositionalEmbeddingConfig, weights: Sequence[Tensor], i: int) -> Tensor:
    """The composed vector of one id, from its own row of every partition."""
    rows = [int(row) for row in config.scheme.rows(torch.tensor(i))]
    return config.combine.compose([weight.detach()[row] for weight, row in zip(weights, rows, strict=True)])


def pooled(vectors: Sequence[Tensor], weights: Sequence[float], pooling: str, width: int) -> Tensor:
    """One bag, a number at a time."""
    if not vectors:
        return torch.zeros(width, dtype=torch.float64)
    columns = []
    for column in range(width):
        values = [float(vector[column]) * weight for vector, weight in zip(vectors, weights, strict=True)]
        columns.append(max(values) if pooling == "max" else sum(values) / (len(values) if pooling == "mean" else 1))
    return torch.tensor(columns, dtype=torch.float64)
