"""DLRM (Naumov et al., arXiv 1906.00091), in the size of Shi et al., KDD 2020, section 5.

A bottom network embeds the dense features; pairwise dot products of that vector and all feature embeddings, without
self-products, go with it into a top network that ends in one logit.
"""

from collections.abc import Sequence
from dataclasses import field
from typing import Literal

import pydantic.dataclasses
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.data.dataset.schema import DENSE_FEATURES, SPARSE_FEATURES
from distembed.errors import UserError
from distembed.models.base import STRICT, Model, Sizes
from distembed.models.embedded import StackFeatures
from distembed.models.inputs import ModelInputs
from distembed.models.interaction import PairwiseDots
from distembed.models.mlp import MLP


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class DLRMConfig:
    """Hidden sizes of :class:`DLRM`; its input, D and 1 follow from the data and the tables.

    Attributes:
        name: ``dlrm``.
        bottom: Hidden sizes of the network over the dense features, which ends in D.
        top: Hidden sizes of the network over the interactions, which ends in 1.
    """

    name: Literal["dlrm"] = "dlrm"
    bottom: Sizes = field(default_factory=lambda: [512, 256, 64])
    top: Sizes = field(default_factory=lambda: [512, 256])

    def build(self, inputs: ModelInputs) -> Model:
        """Builds the model over all features of the dataset."""
        embeddings, vector_names = inputs.pooled_embeddings()
        return DLRM(embeddings, vector_names, inputs.embedding_dim, inputs.num_dense, self.bottom, self.top)


class DLRM(Model):
    """Dense [B, I] and ids -> logits [B].

    Args:
        embeddings: KeyedJaggedTensor -> KeyedTensor, each key of ``embedding_dim``.
        vector_names: its F keys: the categorical features, or more where a feature gives several vectors.
        embedding_dim: D.
        num_dense: I; with 0 the bottom network is left out.
        bottom: hidden sizes of the bottom network, which ends in D.
        top: hidden sizes of the top network, which ends in 1.
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
    ) -> None:
        super().__init__()
        num_vectors = len(vector_names) + (num_dense > 0)
        if num_vectors < 1:
            raise UserError("DLRM needs at least one dense or categorical feature; the data set has none.")
        self.embeddings = embeddings
        self.stack = StackFeatures(vector_names, embedding_dim)
        self.bottom = MLP(num_dense, [*bottom, embedding_dim]) if num_dense else None
        self.interactions = PairwiseDots(num_vectors)
        top_in = (embedding_dim if num_dense else 0) + self.interactions.num_pairs
        self.top = MLP(top_in, [*top, 1], last_is_linear=True)

    def forward(
        self, dense_features: Float[Tensor, "batch dense"], sparse_features: KeyedJaggedTensor
    ) -> Float[Tensor, " batch"]:
        """Logits of a click."""
        vectors = self.stack(self.embeddings(sparse_features))
        if self.bottom is None:
            return self.top(self.interactions(vectors)).squeeze(1)
        dense = self.bottom(dense_features).to(vectors.dtype)
        vectors = torch.cat([dense.unsqueeze(1), vectors], dim=1)
        return self.top(torch.cat([dense, self.interactions(vectors)], dim=1)).squeeze(1)
