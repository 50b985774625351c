"""Feature generation: each partition's vector is a feature of its own (Shi et al., KDD 2020, section 4).

Trade-off: nothing is lost by composing, and the model itself learns how the parts interact; but it sees k vectors of
the full dimension for each table, so its interaction and first layer grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxtyping import Float

from distembed.base.lazy import torch
from distembed.composition.base import Composition
from distembed.composition.concat import side_by_side
from distembed.composition.initial import Distribution, Uniform

if TYPE_CHECKING:
    from torch import Tensor


class Feature(Composition):
    """``v_1``, ``v_2``, ..., ``v_k``, one after another: k vectors of ``embedding_dim``."""

    name = "feature"
    commutes_with_sum = True

    def partition_dims(self, embedding_dim: int, num_partitions: int) -> tuple[int, ...]:
        return (embedding_dim,) * num_partitions

    def columns(self, embedding_dim: int, num_partitions: int) -> tuple[range, ...]:
        return side_by_side(self.partition_dims(embedding_dim, num_partitions))

    def num_vectors(self, num_partitions: int) -> int:
        return num_partitions

    def compose(self, vectors: Sequence[Float[Tensor, "*batch dim"]]) -> Float[Tensor, "*batch dims"]:
        return torch.cat(list(vectors), dim=-1)

    def initial_weights(self, variance: float, num_partitions: int, embedding_dim: int) -> tuple[Distribution, ...]:
        return (Uniform(variance),) * num_partitions
