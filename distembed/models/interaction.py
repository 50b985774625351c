"""Pairwise dot products of feature vectors (Naumov et al., arXiv 1906.00091, section 2.1), with their own backward.

Autograd would go back through both operands of ``V V^T`` and a scatter; the gradient is ``(G + G^T) V``, which is one
gather and one product.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.amp import custom_bwd, custom_fwd
from torch.autograd.function import once_differentiable


class PairwiseDots(nn.Module):
    """Vectors [B, V, D] -> dot products [B, V(V-1)/2] of each pair i < j, in the order (0,1), (0,2), ..., (1,2), ..."""

    def __init__(self, num_vectors: int) -> None:
        super().__init__()
        first, second = torch.triu_indices(num_vectors, num_vectors, offset=1)
        self.num_pairs = len(first)
        # where in the flattened V x V matrix each pair stands, and which pair (or the zero after them) each cell takes
        pair_of_cell = torch.full((num_vectors, num_vectors), self.num_pairs)
        pair_of_cell[first, second] = pair_of_cell[second, first] = torch.arange(self.num_pairs)
        self.register_buffer("_cell_of_pair", first * num_vectors + second, persistent=False)
        self.register_buffer("_pair_of_cell", pair_of_cell.flatten(), persistent=False)

    def forward(self, vectors: Float[Tensor, "batch vectors dim"]) -> Float[Tensor, "batch pairs"]:
        """Multiplies every pair."""
        products: Tensor = _PairwiseDots.apply(vectors, self._cell_of_pair, self._pair_of_cell)
        return products


class _PairwiseDots(torch.autograd.Function):
    # under autocast a CPU computes this in float32: gathering bf16 takes it twice as long as all that bf16 would save
    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, vectors: Tensor, cell_of_pair: Tensor, pair_of_cell: Tensor) -> Tensor:
        ctx.save_for_backward(vectors, pair_of_cell)
        return torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, cell_of_pair)

    @staticmethod
    @once_differentiable
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        vectors, pair_of_cell = ctx.saved_tensors
        num_vectors = vectors.shape[1]
        padded = nn.functional.pad(gradient, (0, 1))
        symmetric = padded.index_select(1, pair_of_cell).view(-1, num_vectors, num_vectors)
        return torch.bmm(symmetric, vectors), None, None
