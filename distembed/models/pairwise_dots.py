"""Dot products of all pairs of a row's vectors, beside its dense vector: the interaction of DLRM.

In training on a CPU, one pass reads the vectors and writes the input of the top network, and one pass back reads its
gradient and writes the vectors' (:mod:`distembed.kernels.dots`). Elsewhere torch multiplies and gathers.
"""

from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from distembed.base.tracing import is_as_on_cuda, is_traced
from distembed.kernels import layout
from distembed.kernels.loading import load_dots, reason_unavailable
from distembed.kernels.operation import in_threads

_ROWS_A_THREAD = 64


class PairwiseDots(nn.Module):
    """Maps vectors [B, V, D] to the dot products [B, V(V-1)/2] of all pairs i < j: (0,1), (0,2), ..., (1,2), ...

    Autograd would go back through both operands of ``V V^T`` and a scatter; the gradient is ``(G + G^T) V``, which is
    one gather and one product.
    """

    def __init__(self, num_vectors: int) -> None:
        super().__init__()
        first, second = torch.triu_indices(num_vectors, num_vectors, offset=1)
        self.num_outputs = len(first)
        # in the flattened V x V matrix: the cell i * V + j of each pair, and the pair of each cell; on the diagonal the
        # pair is num_outputs, the index of a zero after the pairs
        pair_of_cell = torch.full((num_vectors, num_vectors), self.num_outputs)
        pair_of_cell[first, second] = pair_of_cell[second, first] = torch.arange(self.num_outputs)
        self.register_buffer("_cell_of_pair", first * num_vectors + second, persistent=False)
        self.register_buffer("_pair_of_cell", pair_of_cell.flatten(), persistent=False)

    def forward(self, vectors: Float[Tensor, "batch vectors dim"]) -> Float[Tensor, "batch pairs"]:
        """Returns the dot product of every pair, in the dtype of the vectors; under autocast computed in its dtype."""
        in_dtype = _computed_dtype(vectors)
        products = _PairwiseDots.apply(vectors, self._cell_of_pair, self._pair_of_cell, in_dtype)  # type: ignore[no-untyped-call]
        return cast(Tensor, products)


def _computed_dtype(vectors: Tensor) -> torch.dtype:
    """Returns the dtype of products of vectors: autocast's where it is on, else the vectors'."""
    device_type = vectors.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else vectors.dtype


class _PairwiseDots(torch.autograd.Function):
    """Computes products in ``in_dtype`` and gathers in the vectors' dtype, as bf16 gathers are slow on a CPU.

    In backward, each cell (i, j) of the symmetric ``G + G^T`` takes its pair's gradient; the diagonal takes 0.
    """

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, cell_of_pair: Tensor, pair_of_cell: Tensor, in_dtype: torch.dtype) -> Tensor:
        operand = vectors.to(in_dtype)
        ctx.save_for_backward(operand, pair_of_cell)
        products = torch.bmm(operand, operand.transpose(1, 2)).to(vectors.dtype)
        return products.flatten(1).index_select(1, cell_of_pair)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        operand, pair_of_cell = ctx.saved_tensors
        num_vectors = operand.shape[1]
        padded = nn.functional.pad(gradient, (0, 1))
        symmetric = padded.index_select(1, pair_of_cell).view(-1, num_vectors, num_vectors)
        return torch.bmm(symmetric.to(operand.dtype), operand).to(gradient.dtype), None, None, None


def has_kernels(vectors: Float[Tensor, "batch features dim"]) -> bool:
    """Returns whether :func:`dots_beside` can multiply: float32 vectors on a CPU, in training.

    Without gradients torch multiplies, so that a server need neither load numba nor compile. A planner's step on fake
    tensors, which have no values, allocates as the kernels do and runs none.
    """
    is_fake = isinstance(vectors, FakeTensor)
    return (
        (type(vectors) is Tensor or (is_fake and not is_as_on_cuda()))
        and vectors.device.type == "cpu"
        and vectors.dtype == torch.float32
        and _computed_dtype(vectors) in (torch.float32, torch.bfloat16)
        and torch.is_grad_enabled()
        and not is_traced()
        and (reason_unavailable() is None if is_fake else load_dots() is not None)
    )


def dots_beside(
    dense: Float[Tensor, "batch dim"] | None, vectors: Float[Tensor, "batch features dim"]
) -> Float[Tensor, "batch outputs"]:
    """Returns the dense vector, the dot products of all pairs, and zeros up to a multiple of 16 columns.

    Call it where :func:`has_kernels`. Products are summed in float32; the outputs are float32, or bf16 under autocast.

    Args:
        dense: The dense vector in float32, the first of the vectors that are multiplied; None without one.
        vectors: The vectors of features.
    """
    return cast(Tensor, _DotsBesideDense.apply(vectors, dense, _computed_dtype(vectors)))  # type: ignore[no-untyped-call]


class _DotsBesideDense(torch.autograd.Function):
    """The autograd function of :func:`dots_beside`."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, dense: Tensor | None, dtype: torch.dtype) -> Tensor:
        vectors, dense = vectors.contiguous(), None if dense is None else dense.contiguous()
        ctx.save_for_backward(vectors, dense)
        num_rows, num_vectors, dim = vectors.shape
        num_vectors += dense is not None
        num_outputs = num_vectors * (num_vectors - 1) // 2 + (0 if dense is None else dim)
        width = -(-num_outputs // layout.DOTS_ALIGNMENT) * layout.DOTS_ALIGNMENT
        outputs = torch.empty(num_rows, width, dtype=dtype)
        _run("multiply", vectors, dense, outputs)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor | None, None]:
        vectors, dense = ctx.saved_tensors
        found = torch.empty_like(vectors), None if dense is None else torch.empty_like(dense)
        _run("gradients", vectors, dense, gradients[0].contiguous(), found)
        return *found, None


def _run(
    kernel: str,
    vectors: Float[Tensor, "batch features dim"],
    dense: Float[Tensor, "batch dim"] | None,
    outputs: Float[Tensor, "batch outputs"],
    gradients: tuple[Tensor | None, ...] = (None, None),
) -> None:
    """Runs a kernel over all rows, in threads; writes ``gradients``, of ``vectors`` and of ``dense``."""
    if isinstance(vectors, FakeTensor):
        return
    num_rows, num_features, dim = vectors.shape
    width, is_bf16 = outputs.shape[1], outputs.dtype == torch.bfloat16
    given = (dense, vectors, num_features, dim, outputs, width, is_bf16, *reversed(gradients))
    # in the order of layout, addresses for tensors and 0 for None
    job = np.array([part.data_ptr() if isinstance(part, Tensor) else int(part or 0) for part in given], np.int64)
    run = getattr(load_dots(), kernel)
    scratch_floats = layout.dots_scratch(num_features + (dense is not None), dim, width)

    def rows_of(share: int, num_shares: int) -> None:
        scratch = torch.zeros(scratch_floats)
        run(job.ctypes.data, num_rows * share // num_shares, num_rows * (share + 1) // num_shares, scratch.data_ptr())

    in_threads(rows_of, max(1, min(torch.get_num_threads(), num_rows // _ROWS_A_THREAD)))
