"""DLRM (Naumov et al., arXiv 1906.00091), in the size of Shi et al., KDD 2020, section 5.

A bottom network embeds the dense features. Its vector and the pairwise dot products of it and all feature embeddings,
without self-products, go into a top network that ends in one logit. The sum of the dense features' soft one-hot vectors
takes the place of the bottom network's vector, or is added to it. Cross layers of low rank take the place of the dot
products in MLPerf's DLRM-DCNv2; their output alone goes into the top network.
"""

import warnings
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.data.dataset.schema import DENSE_FEATURES, SPARSE_FEATURES
from distembed.models.base import Model
from distembed.models.layers import MLP, CrossLayersV2, StackFeatures
from distembed.models.pairwise_dots import PairwiseDots, dots_beside, has_kernels
from distembed.models.soft_one_hot import SoftOneHotSum


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
        dense = None if dense is None else dense.to(vectors.dtype)
        if isinstance(self.interactions, PairwiseDots) and has_kernels(vectors):
            return self.top(dots_beside(dense, vectors)).squeeze(1)
        if dense is not None:
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
