"""Concatenation, and feature generation: the partitions' vectors side by side (Shi et al., KDD 2020, section 4).

``concat`` makes one vector of the parts. Trade-off: each partition's table has only a share of the dimension, so it is
about k times smaller again, and two ids with the same row in one partition agree in that part of the vector.

``feature`` gives the model k vectors of the full dimension. Trade-off: nothing is lost by composing, and the model
itself learns how the parts interact; but its interaction and first layer grow.

``concat_sum`` concatenates sums of two, as CCE does (Tsang and Ahle, NeurIPS 2023): ids share each half of a sum with
other ids, so that a part of few rows has as many vectors as pairs of rows occur.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import pydantic.dataclasses
from jaxtyping import Float

from distembed.base.errors import UserError
from distembed.base.lazy import torch
from distembed.base.names import STRICT
from distembed.base.validation import Widths
from distembed.composition.base import Composition, Distribution, Uniform
from distembed.partitions.base import num_first_half, require_positive
from distembed.partitions.settings import SchemeSettings

if TYPE_CHECKING:
    from torch import Tensor


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class ConcatSettings(SchemeSettings):
    """The settings of ``concat``."""

    dims: Widths | None = None  # the dimension of each partition's vectors; equal shares unless given


class Concat(Composition):
    """``[v_1, v_2, ..., v_k]``.

    Args:
        dims: The dimension of each partition's part. Unless given, the parts are as equal as multiples of four can be,
            larger ones first.

    Raises:
        UserError: A dimension is not a positive integer.
    """

    name = "concat"
    settings = ConcatSettings
    commutes_with_sum = True

    def __init__(self, dims: Sequence[int] | None = None) -> None:
        for j, dim in enumerate(dims or ()):
            require_positive(f"dims[{j}]", dim, "It is the dimension of a partition's part of the vector.")
        self.dims = None if dims is None else tuple(dims)

    def partition_dims(self, embedding_dim: int, num_partitions: int) -> tuple[int, ...]:
        """Returns the dimensions as given, or equal shares; errors where they do not fit ``embedding_dim``."""
        if self.dims is None:
            return _equal_shares(embedding_dim, num_partitions)
        if len(self.dims) != num_partitions or sum(self.dims) != embedding_dim:
            raise UserError(
                f"dims is {list(self.dims)}, {len(self.dims)} dimensions that sum to {sum(self.dims)}; concat needs "
                f"{num_partitions}, one a partition, that sum to embedding_dim, {embedding_dim}. Leave dims out for "
                f"equal shares."
            )
        return self.dims

    def columns(self, embedding_dim: int, num_partitions: int) -> tuple[range, ...]:
        return side_by_side(self.partition_dims(embedding_dim, num_partitions))

    def compose(self, vectors: Sequence[Float[Tensor, "*batch dim_j"]]) -> Float[Tensor, "*batch dim"]:
        return torch.cat(list(vectors), dim=-1)

    def initial_weights(self, variance: float, num_partitions: int, embedding_dim: int) -> tuple[Distribution, ...]:
        return (Uniform(variance),) * num_partitions


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


class ConcatSum(Composition):
    """``[v_1 + v_(c+1), ..., v_c + v_2c]`` of 2c partitions; of an odd number, the last part is one vector."""

    name = "concat_sum"
    commutes_with_sum = True

    def partition_dims(self, embedding_dim: int, num_partitions: int) -> tuple[int, ...]:
        parts = _equal_shares(embedding_dim, num_first_half(num_partitions))
        return (parts + parts)[:num_partitions]

    def columns(self, embedding_dim: int, num_partitions: int) -> tuple[range, ...]:
        parts = side_by_side(_equal_shares(embedding_dim, num_first_half(num_partitions)))
        return (parts + parts)[:num_partitions]

    def compose(self, vectors: Sequence[Float[Tensor, "*batch dim_j"]]) -> Float[Tensor, "*batch dim"]:
        """Returns the sums side by side; also of the partitions of some neighbouring parts alone."""
        num_parts = num_first_half(len(vectors))
        second = vectors[num_parts:]
        sums = [own + other for own, other in zip(vectors, second, strict=False)]
        return torch.cat([*sums, *vectors[len(second) : num_parts]], dim=-1)

    def initial_weights(self, variance: float, num_partitions: int, embedding_dim: int) -> tuple[Distribution, ...]:
        is_odd, half = num_partitions % 2, num_partitions // 2
        return (*[Uniform(variance / 2)] * half, *[Uniform(variance)] * is_odd, *[Uniform(variance / 2)] * half)


def side_by_side(dims: Sequence[int]) -> tuple[range, ...]:
    """Returns the columns of vectors of these dimensions, one after another."""
    ends = list(accumulate(dims))
    return tuple(range(end - dim, end) for end, dim in zip(ends, dims, strict=True))


def _equal_shares(embedding_dim: int, num_partitions: int) -> tuple[int, ...]:
    """Returns k dimensions that sum to ``embedding_dim``, larger ones first, all multiples of four where possible."""
    if embedding_dim < num_partitions:
        raise UserError(
            f"embedding_dim is {embedding_dim}, but concat gives each of {num_partitions} partitions at least one "
            f"dimension; use embedding_dim >= {num_partitions}, or composition product or sum."
        )
    # FBGEMM stores vectors whose length is a multiple of four
    unit = 4 if embedding_dim % 4 == 0 and embedding_dim // 4 >= num_partitions else 1
    units, num_larger = divmod(embedding_dim // unit, num_partitions)
    return tuple(unit * (units + (j < num_larger)) for j in range(num_partitions))
