"""DLRM (Naumov et al., arXiv 1906.00091), in the size of Shi et al., KDD 2020, section 5.

A bottom network embeds the dense features. Its vector and the pairwise dot products of it and all feature embeddings,
without self-products, go into a top network that ends in one logit. The sum of the dense features' soft one-hot vectors
takes the place of the bottom network's vector, or is added to it. Cross layers of low rank take the place of the dot
products in MLPerf's DLRM-DCNv2; their output alone goes into the top network.
"""

import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.data.dataset.schema import DENSE_FEATURES, SPARSE_FEATURES
from distembed.models.base import Model
from distembed.models.layers import MLP, CrossLayersV2, StackFeatures
from distembed.models.soft_one_hot import SoftOneHotSum


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
        device_type = vectors.device.type
        in_dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else vectors.dtype
        products = _PairwiseDots.apply(vectors, self._cell_of_pair, self._pair_of_cell, in_dtype)  # type: ignore[no-untyped-call]
        return cast(Tensor, products)


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


class DLRM(Model):
    """Maps dense features [batch, dense] and ids to logits [batch].

    A single categorical feature without dense ones gets a warning: there is no pair to multiply.

    Args:
        embeddings: Maps a KeyedJaggedTensor to a KeyedTensor whose keys have ``embedding_dim`` numbers each.
        vector_names: The keys of that KeyedTensor: the categorical features, or more where a feature has several
            vectors.
        embedding_dim: Dimension of a composed vector.
        num_dense: Number of dense features that the bottom network takes; with 0 there is none.
        bottom: Hidden sizes of the bottom network, whose output has ``embedding_dim`` numbers.
        top: Hidden sizes of the top network, whose output is one logit.
        soft_one_hot: Maps dense features to the sum of their vectors, with ``embedding_dim`` numbers; the bottom
            network then takes 0 for a missing number.
        cross: Cross layers over the dense vector, if there is one, and all feature embeddings; None for dot products.
    """

    batch_fields = (DENSE_FEATURES, SPARSE_FEATURES)

    def __init__(
        self,
        embeddings: nn.Module,
        vector_names: Sequence[str],
        embedding_dim: int,
        num_dense: int,
        bottom: Sequence[int] = (512, 256, 64),
        top: Sequence[int] = (512, 256),
        soft_one_hot: SoftOneHotSum | None = None,
        cross: CrossLayersV2 | None = None,
    ) -> None:
        super().__init__()
        has_dense = num_dense > 0 or soft_one_hot is not None
        num_vectors = len(vector_names) + has_dense
        if num_vectors < 1:
            raise UserError("DLRM needs at least one dense or categorical feature; the data set has none.")
        self.embeddings = embeddings
        self.stack = StackFeatures(vector_names, embedding_dim)
        self.bottom = MLP(num_dense, [*bottom, embedding_dim]) if num_dense else None
        self.soft_one_hot = soft_one_hot
        # dot products go into the top network together with the dense vector; cross layers contain it
        self.interactions = cross or PairwiseDots(num_vectors)
        self._has_dense_beside = has_dense and cross is None
        top_in = (embedding_dim if self._has_dense_beside else 0) + self.interactions.num_outputs
        if top_in == 0:
            warnings.warn(
                "DLRM multiplies pairs of vectors, and the data set has one categorical feature and no dense one: all "
                "rows get the same prediction. Use model={name: dcn}, which takes vectors as they are.",
                stacklevel=2,
            )
        self.top = MLP(top_in, [*top, 1], last_is_linear=True)

    def forward(
        self, dense_features: Float[Tensor, "batch dense"], sparse_features: KeyedJaggedTensor
    ) -> Float[Tensor, " batch"]:
        vectors = self.stack(self.embeddings(sparse_features))
        dense = self._dense_vector(dense_features)
        if dense is not None:
            dense = dense.to(vectors.dtype)
            vectors = torch.cat([dense.unsqueeze(1), vectors], dim=1)
        if dense is None or not self._has_dense_beside:
            return self.top(self.interactions(vectors)).squeeze(1)
        return self.top(torch.cat([dense, self.interactions(vectors)], dim=1)).squeeze(1)

    def _dense_vector(self, dense_features: Float[Tensor, "batch dense"]) -> Float[Tensor, "batch dim"] | None:
        """Returns the vector of all dense features; None where there are none."""
        if self.soft_one_hot is None:
            return None if self.bottom is None else self.bottom(dense_features)
        vector: Tensor = self.soft_one_hot(dense_features)
        return vector if self.bottom is None else vector + self.bottom(dense_features.nan_to_num(nan=0.0))
