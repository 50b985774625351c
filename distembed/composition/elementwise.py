"""Elementwise compositions: product and sum (Shi et al., KDD 2020, section 4, operation-based).

Trade-off: both keep the full dimension in every partition. The product tells ids apart best in the paper's figures and
must be taken id by id; the sum is cheaper for bags, since it may be pooled first.
"""

from collections.abc import Sequence
from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor

from distembed.composition.base import Composition


class _Elementwise(Composition):
    def partition_dims(self, embedding_dim: int, num_partitions: int) -> tuple[int, ...]:
        return (embedding_dim,) * num_partitions


class Product(_Elementwise):
    """``v_1 * v_2 * ... * v_k``, elementwise."""

    name = "product"
    commutes_with_sum = False

    def compose(self, vectors: Sequence[Float[Tensor, "*batch dim"]]) -> Float[Tensor, "*batch dim"]:
        return reduce(torch.mul, vectors)

    def partition_variance(self, variance: float, num_partitions: int) -> float:
        # Var(XY) = Var(X) Var(Y) for independent zero-mean factors
        return float(variance ** (1.0 / num_partitions))


class Sum(_Elementwise):
    """``v_1 + v_2 + ... + v_k``."""

    name = "sum"
    commutes_with_sum = True

    def compose(self, vectors: Sequence[Float[Tensor, "*batch dim"]]) -> Float[Tensor, "*batch dim"]:
        return reduce(torch.add, vectors)

    def partition_variance(self, variance: float, num_partitions: int) -> float:
        return variance / num_partitions
