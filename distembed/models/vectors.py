"""The base of click models that take one vector for each feature of a row, categorical or dense."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.data.dataset.schema import DENSE_FEATURES, SPARSE_FEATURES
from distembed.models.base import Model
from distembed.models.config import SoftOneHotConfig
from distembed.models.inputs import ModelInputs
from distembed.models.layers import StackFeatures
from distembed.models.soft_one_hot import SoftOneHot


class FeatureVectorModel(Model):
    """Maps dense features [batch, dense] and ids to logits, by a network over the vectors of all features.

    There is a logit for each row [batch], or, of a model of several labels, for each row and label [batch, labels].

    A dense feature's vector is the soft one-hot vector of its number, so numbers may be missing.

    Args:
        inputs: The features and their tables.
        soft_one_hot: The settings of the dense features' vectors.
        tables: Names of the tables whose vectors are pooled; all unless given.

    Attributes:
        vector_names: The name of each vector, dense features first; a feature may have several vectors.
        vector_features: The feature of each vector.
        num_inputs: Numbers of all vectors of a row.

    Raises:
        UserError: There is no categorical feature.
    """

    batch_fields: ClassVar[tuple[str, ...]] = (DENSE_FEATURES, SPARSE_FEATURES)

    def __init__(
        self, inputs: ModelInputs, soft_one_hot: SoftOneHotConfig, tables: Sequence[str] | None = None
    ) -> None:
        super().__init__()
        dim = inputs.embedding_dim
        if not inputs.tables:
            raise UserError("the model needs at least one categorical feature, and the dataset has none.")
        self.embeddings: nn.Module | None = None
        names: list[str] = []
        if tables is None or tables:
            self.embeddings, names = inputs.pooled_embeddings(tables)
        features = [
            feature
            for table in (inputs.tables if tables is None else tables)
            for feature in inputs.tables[table].feature_names
            for _ in inputs.tables[table].vector_names(feature)
        ]
        self.stack = StackFeatures(names, dim)
        self.soft_one_hot = SoftOneHot(*soft_one_hot.arguments(inputs.num_dense, dim)) if inputs.num_dense else None
        self.vector_names = [*inputs.schema.dense, *names]
        self.vector_features = [*inputs.schema.dense, *features]
        self.num_inputs = len(self.vector_names) * dim

    def forward(
        self, dense_features: Float[Tensor, "batch dense"], sparse_features: KeyedJaggedTensor
    ) -> Float[Tensor, "batch *labels"]:
        return self.logits(join(self.feature_vectors(dense_features, sparse_features)))

    def feature_vectors(
        self, dense_features: Float[Tensor, "batch dense"], sparse_features: KeyedJaggedTensor
    ) -> list[Float[Tensor, "batch vectors dim"]]:
        """Returns the vectors of the dense features and of the pooled tables, each if there are any."""
        vectors = [] if self.soft_one_hot is None else [self.soft_one_hot(dense_features)]
        if self.embeddings is not None:
            vectors.append(self.stack(self.embeddings(sparse_features)))
        return vectors

    @abstractmethod
    def logits(self, vectors: Float[Tensor, "batch vectors dim"]) -> Float[Tensor, "batch *labels"]:
        """Returns the logits of each row, given the vectors of its features in the order of ``vector_names``."""


def join(vectors: Sequence[Float[Tensor, "batch _ dim"]]) -> Float[Tensor, "batch vectors dim"]:
    """Returns the vectors of each row one after another, in the dtype of the last ones, which tables give."""
    if len(vectors) == 1:
        return vectors[0]
    return torch.cat([own.to(vectors[-1].dtype) for own in vectors], dim=1)
