"""Concatenation: each partition gives a part of the vector (Shi et al., KDD 2020, section 4).

Trade-off: each partition's table has only a share of the dimension, so it is about k times smaller again, and two ids
with the same row in one partition agree in that whole part of the vector.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from distembed.composition.base import Composition
from distembed.composition.initial import Distribution, Uniform
from distembed.errors import UserError


class Concat(Composition):
    """``[v_1, v_2, ..., v_k]`` with dimensions as equal as they can be, larger ones first."""

    name = "concat"
    commutes_with_sum = True

    def partition_dims(self, embedding_dim: int, num_partitions: int) -> tuple[int, ...]:
        if embedding_dim < num_partitions:
            raise UserError(
                f"embedding_dim is {embedding_dim}, but concat gives each of {num_partitions} partitions at least one "
                f"dimension; use embedding_dim >= {num_partitions}, or composition product or sum."
            )
        share, rest = divmod(embedding_dim, num_partitions)
        return tuple(share + (j < rest) for j in range(num_partitions))

    def compose(self, vectors: Sequence[Float[Tensor, "*batch dim_j"]]) -> Float[Tensor, "*batch dim"]:
        return torch.cat(list(vectors), dim=-1)

    def initial_weights(self, variance: float, num_partitions: int) -> tuple[Distribution, ...]:
        return (Uniform(variance),) * num_partitions
