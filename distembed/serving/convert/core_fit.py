"""The least squares fit of one core of a tensor train, while its other cores are fixed.

With the product L_x of an id's slices left of core j and the product R_x of the slices right of it, an id's vector is
``L_x G R_x`` for the slice G in its row. Each column c of G has its own least squares over the ids of a row::

    sum_x w_x (L_x^T L_x) kron (R_x R_x^T)  @  vec(G[:, c, :])  =  sum_x w_x vec(L_x^T V_x[:, c, :] R_x^T)

The normal matrix has ``(r_(j-1) r_j)^2`` numbers a row: 64 at the ends at rank 8, 4,096 between two ranks of 8.
"""

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from distembed.base.errors import UserError
from distembed.base.machine import available_memory_bytes
from distembed.base.units import format_bytes
from distembed.composition import TensorTrain

if TYPE_CHECKING:
    from distembed.serving.convert.tables import WeightedVectors

_BLOCK_NUMBERS = 1 << 22
"""Numbers of the normal matrices of ids that are made at once: 32 MiB."""
_COPIES = 3
"""Copies of all rows' normal matrices in memory at once: the sums, their inverses and the decomposition."""
_RESOLUTION = 1e-11
"""Singular values of a normal matrix below this share of its largest are rounding errors."""


def solve_core(
    full: "WeightedVectors", combine: TensorTrain, partitions: Sequence[Float[Tensor, "rows_j dim_j"]], j: int
) -> tuple[Float[Tensor, "rows dim_j"], float]:
    """Returns the best core j for fixed other cores, and the weighted squared error with it.

    Rows without ids keep their numbers. Numbers that the ids leave open are the least ones.
    """
    ranks, dims = combine.ranks(len(partitions)), combine.factors(full.vectors.shape[1], len(partitions))
    cores = [core.view(-1, ranks[i], dims[i], ranks[i + 1]) for i, core in enumerate(partitions)]
    num_rows, before, dim, after = cores[j].shape
    unknown = before * after
    num_bytes = _COPIES * 8 * num_rows * unknown**2
    available = available_memory_bytes()
    if num_bytes > available:
        raise UserError(
            f"fitting {num_rows:,} rows of a tensor train's core between ranks {before} and {after} takes "
            f"{format_bytes(num_bytes)} of memory, and {format_bytes(available)} are available: lower rank."
        )
    normal = torch.zeros(num_rows, unknown, unknown, dtype=torch.float64)
    projected = torch.zeros(num_rows, unknown, dim, dtype=torch.float64)
    total = 0.0
    for chunk in full.chunks():
        total += float((chunk.weights * chunk.vectors.square()).sum())
        for ids in torch.arange(len(chunk.vectors)).split(max(1, _BLOCK_NUMBERS // unknown**2)):
            slices = [core[rows[ids]] for core, rows in zip(cores, chunk.rows, strict=True)]
            left = reduce(_multiply, slices[:j], torch.ones(len(ids), 1, 1, 1, dtype=torch.float64))[:, 0]
            one = torch.ones(len(ids), after, 1, 1, dtype=torch.float64) if j == len(cores) - 1 else None
            right = (reduce(_multiply, slices[j + 1 :]) if one is None else one)[..., 0]
            weights, rows = chunk.weights[ids].unsqueeze(2), chunk.rows[j][ids]
            targets = chunk.vectors[ids].view(len(ids), left.shape[1], dim, right.shape[2])
            left_square, right_square = left.mT @ (left * weights), right @ right.mT
            normal.index_add_(
                0, rows, torch.einsum("npu,nqs->npqus", left_square, right_square).reshape(-1, unknown, unknown)
            )
            sums = torch.einsum("nap,nacb,nqb->npqc", left * weights, targets, right)
            projected.index_add_(0, rows, sums.reshape(-1, unknown, dim))
    solved = torch.linalg.pinv(normal, hermitian=True, rtol=_RESOLUTION) @ projected
    explained = float((solved * projected).sum())
    core = solved.view(num_rows, before, after, dim).transpose(2, 3)
    has_ids = normal.diagonal(dim1=1, dim2=2).sum(1).view(-1, 1, 1, 1) > 0
    return torch.where(has_ids, core, cores[j]).flatten(1), max(0.0, total - explained)


def balanced_cores(combine: TensorTrain, cores: Sequence[Float[Tensor, "rows_j dim_j"]]) -> list[Tensor]:
    """Rescales cores, without changing their products, to the mean squares of initial weights: 1 / r in all but one."""
    first, *further = cores
    balanced = []
    for core, rank in zip(further, combine.ranks(len(cores))[1:-1], strict=True):
        size = core.square().mean().mul(rank).sqrt()
        size = torch.where(size > 0, size, 1.0)
        balanced.append(core / size)
        first = first * size
    return [first, *balanced]


def _multiply(
    left: Float[Tensor, "ids a columns b"], right: Float[Tensor, "ids b columns2 c"]
) -> Float[Tensor, "ids a columns3 c"]:
    """Returns products of slices; their columns are in row-major order."""
    return torch.einsum("naib,nbjc->naijc", left, right).flatten(2, 3)
