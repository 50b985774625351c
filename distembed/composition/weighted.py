"""Weighted sum: vectors times importance weights of the id, which are looked up too ("hash embeddings").

Source: Svenstrup, Hansen, Winther, "Hash Embeddings for Efficient Word Representations", NeurIPS 2017, section 3:
``e = sum_j p_j(x) v_j``, where the row of the last partition holds the numbers ``p_1(x), ..., p_(k-1)(x)``.

Trade-off: an importance row has k-1 numbers, so the last partition may have many rows at few bytes, and two ids with
equal vectors are told apart by their weights; but every column depends on all importance numbers, so that no columns
can be composed apart, and ids are composed one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxtyping import Float

from distembed.base.lazy import torch
from distembed.composition.base import Composition, Distribution, NearSigns, Uniform

if TYPE_CHECKING:
    from torch import Tensor

_ALIGNMENT = 4
"""FBGEMM stores vectors whose length is a multiple of four."""


class WeightedSum(Composition):
    """``p_1 v_1 + ... + p_(k-1) v_(k-1)``, with the numbers p_j in the row of partition k; ``v_1`` of one partition.

    Where ``embedding_dim`` is a multiple of four, importance rows are padded to one; the padding is never read.
    """

    name = "weighted_sum"
    commutes_with_sum = False

    def partition_dims(self, embedding_dim: int, num_partitions: int) -> tuple[int, ...]:
        if num_partitions == 1:
            return (embedding_dim,)
        unit = _ALIGNMENT if embedding_dim % _ALIGNMENT == 0 else 1
        return (embedding_dim,) * (num_partitions - 1) + (-(-(num_partitions - 1) // unit) * unit,)

    def columns(self, embedding_dim: int, num_partitions: int) -> tuple[range, ...] | None:
        return (range(embedding_dim),) if num_partitions == 1 else None

    def compose(self, vectors: Sequence[Float[Tensor, "*batch dim_j"]]) -> Float[Tensor, "*batch dim"]:
        """Returns the sum of ``vectors[j] * vectors[-1][..., j]`` over all j but the last."""
        if len(vectors) == 1:
            return vectors[0]
        first, *further, importance = vectors
        composed = first * importance[..., :1]
        for j, vector in enumerate(further, start=1):
            composed = torch.addcmul(composed, vector, importance[..., j : j + 1])
        return composed

    def num_saved(self, dims: Sequence[int]) -> int:
        return sum(dims)

    def initial_weights(self, variance: float, num_partitions: int, embedding_dim: int) -> tuple[Distribution, ...]:
        # With E[p_j^2] = 1 each term has the variance of its vector. Signs, as in a product, leave the vectors' size
        # and gradients whole, and ids that share vectors start uncorrelated.
        if num_partitions == 1:
            return (Uniform(variance),)
        num_vectors = num_partitions - 1
        return (*[Uniform(variance / num_vectors)] * num_vectors, NearSigns())
