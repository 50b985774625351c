"""Pairwise dot products of feature vectors (Naumov et al., arXiv 1906.00091, section 2.1), with their own backward.

Autograd would go back through both operands of ``V V^T`` and a scatter; the gradient is ``(G + G^T) V``, which is one
gather and one product.
"""

from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn


class PairwiseDots(nn.Module):
    """Maps vectors [B, V, D] to the dot products [B, V(V-1)/2] of all pairs i < j.

    Pairs are in the order (0,1), (0,2), ..., (1,2), ...

    Args:
        num_vectors: Number V of vectors a row.
    """

    def __init__(self, num_vectors: int) -> None:
        super().__init__()
        first, second = torch.triu_indices(num_vectors, num_vectors, offset=1)
        self.num_outputs = len(first)
        # where in the flattened V x V matrix each pair stands, and which pair (or the zero after them) each cell takes
        pair_of_cell = torch.full((num_vectors, num_vectors), self.num_outputs)
        pair_of_cell[first, second] = pair_of_cell[second, first] = torch.arange(self.num_outputs)
        self.register_buffer("_cell_of_pair", first * num_vectors + second, persistent=False)
        self.register_buffer("_pair_of_cell", pair_of_cell.flatten(), persistent=False)

    def forward(self, vectors: Float[Tensor, "batch vectors dim"]) -> Float[Tensor, "batch pairs"]:
        """Returns the dot product of every pair, in the dtype of the vectors; under autocast computed in its dtype."""
        device_type = vectors.device.type
        in_dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else vectors.dtype
        products = _PairwiseDots.apply(vectors, self._cell_of_pair, self._pair_of_cell, in_dtype)  # type: ignore[no-untyped-call]
        return cast(Tensor, products)


class _PairwiseDots(torch.autograd.Function):
    """Computes products in ``in_dtype`` and gathers in the vectors' dtype, as bf16 gathers are slow on a CPU."""

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
