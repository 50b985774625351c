"""Tensor train: an id's vector is a product of small matrices, one from each partition's row (TT-Rec).

Source: Yin, Acun, Wu, Liu, "TT-Rec: Tensor Train Compression for Deep Learning Recommendation Models", MLSys 2021. The
dimension is factorised, ``D = d_1 * ... * d_k``. Row i_j of partition j holds the slice ``G_j[i_j]`` of a core, of
shape ``[r_(j-1), d_j, r_j]`` with ``r_0 = r_k = 1``::

    e[(c_1, ..., c_k)] = G_1[i_1][1, c_1, :] @ G_2[i_2][:, c_2, :] @ ... @ G_k[i_k][:, c_k, 1]

    rank 2, D = 4 = 2 * 2        row of core 1             row of core 2           vector
                                 a b | c d                 e f | g h               ae+bg af+bh | ce+dg cf+dh

Trade-off: a higher rank makes any table of these ids representable, at bytes that grow with the rank (with its square
in the cores between) and at ``D * r`` multiplications an id in place of the product's D. Columns depend on whole rows,
so that no columns can be composed apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import pydantic.dataclasses
from jaxtyping import Float
from pydantic import field_validator

from distembed.base.errors import UserError
from distembed.base.lazy import torch
from distembed.base.names import STRICT
from distembed.base.validation import Widths
from distembed.composition.base import Composition, Distribution, NearSigns, Uniform
from distembed.partitions.base import require_positive
from distembed.partitions.settings import SchemeSettings

if TYPE_CHECKING:
    from torch import Tensor


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class TensorTrainSettings(SchemeSettings):
    """The settings of ``tensor_train``."""

    rank: Widths = field(default_factory=lambda: [8])  # the rank between two cores, for all or for each: 8 or [4, 8]
    dims: Widths | None = None  # the factors d_1, ..., d_k of embedding_dim; as equal as possible unless given

    @field_validator("rank", mode="before")
    @classmethod
    def _one_rank(cls, value: Any) -> Any:
        return [value] if isinstance(value, int) else value


class TensorTrain(Composition):
    """``G_1[i_1] @ G_2[i_2] @ ... @ G_k[i_k]``, with the slice of a core in the row of each partition.

    FBGEMM stores rows of a multiple of four numbers, which every rank that is a multiple of four gives.

    Args:
        rank: The rank between two neighbouring cores, or a list of the k - 1 ranks.
        dims: The factors d_1, ..., d_k, whose product is ``embedding_dim``. Unless given, they are as equal as
            possible, larger ones first.

    Raises:
        UserError: A rank or a factor is not a positive integer.
    """

    name = "tensor_train"
    settings = TensorTrainSettings
    commutes_with_sum = False

    def __init__(self, rank: int | Sequence[int] = 8, dims: Sequence[int] | None = None) -> None:
        self.rank = tuple(rank) if isinstance(rank, (list, tuple)) else (cast(int, rank),)
        for j, value in enumerate(self.rank):
            require_positive(f"rank[{j}]", value, "It is the rank between two cores; 8 is usual.")
        for j, dim in enumerate(dims or ()):
            require_positive(f"dims[{j}]", dim, "It is a factor of embedding_dim.")
        self.dims = None if dims is None else tuple(dims)

    def factors(self, embedding_dim: int, num_partitions: int) -> tuple[int, ...]:
        """Returns d_1, ..., d_k; refuses given ones that do not fit."""
        if self.dims is None or num_partitions == 1:
            return _equal_factors(embedding_dim, num_partitions)
        if len(self.dims) != num_partitions or math.prod(self.dims) != embedding_dim:
            raise UserError(
                f"dims is {list(self.dims)}, {len(self.dims)} factors with the product {math.prod(self.dims)}; "
                f"tensor_train needs {num_partitions}, one a partition, with the product embedding_dim, "
                f"{embedding_dim}: {list(_equal_factors(embedding_dim, num_partitions))} do, or leave dims out."
            )
        return self.dims

    def ranks(self, num_partitions: int) -> tuple[int, ...]:
        """Returns r_0 = 1, r_1, ..., r_k = 1; refuses a list of another length than k - 1."""
        if num_partitions == 1:  # a table that stays full
            return (1, 1)
        inner = self.rank * (num_partitions - 1) if len(self.rank) == 1 else self.rank
        if len(inner) != num_partitions - 1:
            raise UserError(
                f"rank is {list(inner)}, {len(inner)} ranks; tensor_train of {num_partitions} partitions needs "
                f"{num_partitions - 1}, one between neighbouring cores, or one number for all."
            )
        return (1, *inner, 1)

    def partition_dims(self, embedding_dim: int, num_partitions: int) -> tuple[int, ...]:
        ranks = self.ranks(num_partitions)
        dims = self.factors(embedding_dim, num_partitions)
        return tuple(before * dim * after for dim, (before, after) in zip(dims, pairwise(ranks), strict=True))

    def columns(self, embedding_dim: int, num_partitions: int) -> tuple[range, ...] | None:
        return (range(embedding_dim),) if num_partitions == 1 else None

    def compose(self, vectors: Sequence[Float[Tensor, "*batch dim_j"]]) -> Float[Tensor, "*batch dim"]:
        """Multiplies the slices from left to right; each product has the columns of its factors in row-major order.

        Products are computed in the dtype of the vectors, under autocast too.
        """
        from distembed.base.tracing import without_autocast

        first, *further = vectors
        if not further:
            return first
        # sums over broadcast products take longer than bmm on a CPU (tools/RESULTS.md)
        ranks = self.ranks(len(vectors))
        columns = first.shape[-1] // ranks[1]
        composed = first.reshape(-1, columns, ranks[1])
        for core, (before, after) in zip(further, pairwise(ranks[1:]), strict=True):
            slices = core.reshape(-1, before, core.shape[-1] // before)
            columns *= core.shape[-1] // (before * after)
            with without_autocast(first.device.type):
                composed = torch.bmm(composed, slices).view(-1, columns, after)
        return composed.view(*first.shape[:-1], columns)

    def num_saved(self, dims: Sequence[int]) -> int:
        ranks, columns, saved = self.ranks(len(dims)), 1, sum(dims)
        for dim, (before, after) in zip(dims[:-1], pairwise(ranks[:-1]), strict=True):
            columns *= dim // (before * after)
            saved += columns * after
        return saved - dims[0]  # the first product is the first row

    def initial_weights(self, variance: float, num_partitions: int, embedding_dim: int) -> tuple[Distribution, ...]:
        # A number of ``left @ G_j`` sums r_(j-1) products of independent numbers of mean 0. Its variance is r_(j-1) *
        # Var(left) * Var(G_j), which with Var(G_j) = 1 / r_(j-1) stays that of the first core. Products of Gaussians
        # have too many numbers near 0, so TT-Rec draws the cores' numbers near 0 again ("sampled Gaussian"). Near-signs
        # have no numbers near 0.
        further = [NearSigns(1.0 / rank) for rank in self.ranks(num_partitions)[1:-1]]
        return (Uniform(variance), *further)


def _equal_factors(number: int, count: int) -> tuple[int, ...]:
    """Returns ``count`` factors of a number, larger ones first: each the least divisor that reaches its equal share."""
    if count == 1:
        return (number,)
    factor = next(d for d in range(1, number + 1) if number % d == 0 and d**count >= number)
    return tuple(sorted((factor, *_equal_factors(number // factor, count - 1)), reverse=True))
