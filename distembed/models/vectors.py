"""The base of click models that take one vector for each feature of a row, categorical or dense."""

from abc import abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.data.dataset.schema import DENSE_FEATURES, SPARSE_FEATURES
from distembed.models.base import Model
from distembed.models.config import SoftOneHotConfig
from distembed.models.inputs import ModelInputs
from distembed.models.layers import StackFeatures
from distembed.models.soft_one_hot import SoftOneHot


class FeatureVectorModel(Model):
    """Maps dense features [batch, dense] and ids to logits [batch], by a network over the vectors of all features.

    A dense feature's vector is the soft one-hot vector of its number, so numbers may be missing.

    Args:
        inputs: The features and their tables.
        soft_one_hot: The settings of the dense features' vectors.

    Attributes:
        vector_names: The name of each vector, dense features first; a feature may have several vectors.
        num_inputs: Numbers of all vectors of a row.

    Raises:
        UserError: There is no feature.
    """

    batch_fields = (DENSE_FEATURES, SPARSE_FEATURES)

    def __init__(self, inputs: ModelInputs, soft_one_hot: SoftOneHotConfig) -> None:
        super().__init__()
        dim = inputs.embedding_dim
        self.embeddings, categorical_names = inputs.pooled_embeddings()
        self.stack = StackFeatures(categorical_names, dim)
        self.soft_one_hot = SoftOneHot(*soft_one_hot.arguments(inputs.num_dense, dim)) if inputs.num_dense else None
        self.vector_names = [*inputs.schema.dense, *categorical_names]
        self.num_inputs = len(self.vector_names) * dim
        if not self.vector_names:
            raise UserError("the model needs at least one dense or categorical feature; the dataset has none.")

    def forward(
        self, dense_features: Float[Tensor, "batch dense"], sparse_features: KeyedJaggedTensor
    ) -> Float[Tensor, " batch"]:
        vectors: Tensor = self.stack(self.embeddings(sparse_features))
        if self.soft_one_hot is not None:
            vectors = torch.cat([self.soft_one_hot(dense_features).to(vectors.dtype), vectors], dim=1)
        return self.logits(vectors)

    @abstractmethod
    def logits(self, vectors: Float[Tensor, "batch vectors dim"]) -> Float[Tensor, " batch"]:
        """Returns the logit of each row, given the vectors of its features in the order of ``vector_names``."""
