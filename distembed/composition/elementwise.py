"""Elementwise compositions: product and sum (Shi et al., KDD 2020, section 4, operation-based).

Trade-off: both keep the full dimension in every partition. The product tells ids apart best in the paper's figures and
must be taken id by id; the sum is cheaper for bags, since it may be pooled first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING

from jaxtyping import Float

from distembed.base.lazy import torch
from distembed.composition.base import Composition, Distribution, NearSigns, Uniform

if TYPE_CHECKING:
    from torch import Tensor


class _Elementwise(Composition):
    """Base of compositions whose output column c depends on column c of every partition alone."""

    def partition_dims(self, embedding_dim: int, num_partitions: int) -> tuple[int, ...]:
        return (embedding_dim,) * num_partitions

    def columns(self, embedding_dim: int, num_partitions: int) -> tuple[range, ...]:
        return (range(embedding_dim),) * num_partitions


class Product(_Elementwise):
    """``v_1 * v_2 * ... * v_k``, elementwise."""

    name = "product"
    commutes_with_sum = False

    def compose(self, vectors: Sequence[Float[Tensor, "*batch dim"]]) -> Float[Tensor, "*batch dim"]:
        return reduce(torch.mul, vectors)

    def num_saved(self, dims: Sequence[int]) -> int:
        # a product of three keeps the product of the first two as well
        return sum(dims) + max(0, len(dims) - 2) * dims[0]

    def initial_weights(self, variance: float, num_partitions: int, embedding_dim: int) -> tuple[Distribution, ...]:
        # Signs leave the first factor's size and gradients whole, and ids that share its row start uncorrelated. Equal
        # factors of variance ** (1/k) train worse, and so do factors of 1 (tools/RESULTS.md).
        return (Uniform(variance), *[NearSigns()] * (num_partitions - 1))


class Sum(_Elementwise):
    """``v_1 + v_2 + ... + v_k``."""

    name = "sum"
    commutes_with_sum = True

    def compose(self, vectors: Sequence[Float[Tensor, "*batch dim"]]) -> Float[Tensor, "*batch dim"]:
        return reduce(torch.add, vectors)

    def initial_weights(self, variance: float, num_partitions: int, embedding_dim: int) -> tuple[Distribution, ...]:
        return (Uniform(variance / num_partitions),) * num_partitions
