"""DLRM (Naumov et al., arXiv 1906.00091), in the size of Shi et al., KDD 2020, section 5.

A bottom network embeds the dense features; pairwise dot products of that vector and all feature embeddings, without
self-products, go with it into a top network that ends in one logit.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.errors import UserError
from distembed.models.embedded import stack_features
from distembed.models.mlp import MLP


class DLRM(nn.Module):
    """Dense [B, I] and ids -> logits [B].

    Args:
        embeddings: KeyedJaggedTensor -> KeyedTensor with a key a feature, each of ``embedding_dim``.
        feature_names: the F categorical features.
        embedding_dim: D.
        num_dense: I; with 0 the bottom network is left out.
        bottom: hidden sizes of the bottom network, which ends in D.
        top: hidden sizes of the top network, which ends in 1.
    """

    def __init__(
        self,
        embeddings: nn.Module,
        feature_names: Sequence[str],
        embedding_dim: int,
        num_dense: int,
        bottom: Sequence[int] = (512, 256, 64),
        top: Sequence[int] = (512, 256),
    ) -> None:
        super().__init__()
        self.feature_names = list(feature_names)
        self.embedding_dim = embedding_dim
        num_vectors = len(self.feature_names) + (num_dense > 0)
        if num_vectors < 1:
            raise UserError("DLRM needs at least one dense or categorical feature; the data set has none.")
        self.embeddings = embeddings
        self.bottom = MLP(num_dense, [*bottom, embedding_dim]) if num_dense else None
        pairs = torch.triu_indices(num_vectors, num_vectors, offset=1)
        self.register_buffer("_pairs", pairs[0] * num_vectors + pairs[1], persistent=False)
        self._pairs: Tensor
        self.top = MLP((embedding_dim if num_dense else 0) + len(self._pairs), [*top, 1], last_is_linear=True)

    def forward(
        self, dense_features: Float[Tensor, "batch dense"], sparse_features: KeyedJaggedTensor
    ) -> Float[Tensor, " batch"]:
        """Logits of a click."""
        vectors = stack_features(self.embeddings(sparse_features), self.feature_names, self.embedding_dim)
        if self.bottom is None:
            return self.top(self._interactions(vectors)).squeeze(1)
        dense = self.bottom(dense_features)
        vectors = torch.cat([dense.unsqueeze(1), vectors.to(dense.dtype)], dim=1)
        return self.top(torch.cat([dense, self._interactions(vectors)], dim=1)).squeeze(1)

    def _interactions(self, vectors: Float[Tensor, "batch vectors dim"]) -> Float[Tensor, "batch pairs"]:
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return products.flatten(1).index_select(1, self._pairs)
