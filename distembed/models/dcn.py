"""Deep & Cross Network (Wang et al., ADKDD 2017), in the size of Shi et al., KDD 2020, section 5.

Dense features and all embeddings, side by side, go through a deep network and, in parallel, through cross layers
``x_{l+1} = x_0 (w_l . x_l) + b_l + x_l``; one linear layer computes a logit from both outputs. Soft one-hot vectors of
the dense features take the place of their numbers, or stand beside them.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.data.dataset.schema import DENSE_FEATURES, SPARSE_FEATURES
from distembed.models.base import Model
from distembed.models.layers import MLP, StackFeatures, make_linear
from distembed.models.soft_one_hot import SoftOneHot


class CrossLayers(nn.Module):
    """Layers ``x_{l+1} = x_0 (w_l . x_l) + b_l + x_l`` (Wang et al. 2017, equation 3)."""

    def __init__(self, in_features: int, num_layers: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(num_layers, in_features) * in_features**-0.5)
        self.biases = nn.Parameter(torch.zeros(num_layers, in_features))

    def forward(self, inputs: Float[Tensor, "batch in"]) -> Float[Tensor, "batch in"]:
        crossed = inputs
        for weight, bias in zip(self.weights, self.biases, strict=True):
            crossed = torch.addcmul(crossed + bias, inputs, (crossed @ weight.to(crossed.dtype)).unsqueeze(1))
        return crossed


class DCN(Model):
    """Maps dense features [batch, dense] and ids to logits [batch].

    Args:
        embeddings: Maps a KeyedJaggedTensor to a KeyedTensor whose keys have ``embedding_dim`` numbers each.
        vector_names: The keys of that KeyedTensor.
        embedding_dim: Dimension of a composed vector.
        num_dense: Number of dense features whose numbers are among the inputs; 0 for none.
        deep: Hidden sizes of the deep network.
        num_cross_layers: Number of cross layers.
        soft_one_hot: Maps dense features to a vector each, further inputs; missing numbers are 0 then.
    """

    batch_fields = (DENSE_FEATURES, SPARSE_FEATURES)

    def __init__(
        self,
        embeddings: nn.Module,
        vector_names: Sequence[str],
        embedding_dim: int,
        num_dense: int,
        deep: Sequence[int] = (512, 256, 64),
        num_cross_layers: int = 6,
        soft_one_hot: SoftOneHot | None = None,
    ) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.stack = StackFeatures(vector_names, embedding_dim)
        self._num_dense = num_dense
        self.soft_one_hot = soft_one_hot
        num_vectors = len(vector_names) + (0 if soft_one_hot is None else soft_one_hot.num_features)
        in_features = num_dense + num_vectors * embedding_dim
        self.deep = MLP(in_features, deep)
        self.cross = CrossLayers(in_features, num_cross_layers)
        self.output = make_linear(deep[-1] + in_features, 1)

    def forward(
        self, dense_features: Float[Tensor, "batch dense"], sparse_features: KeyedJaggedTensor
    ) -> Float[Tensor, " batch"]:
        vectors = self.stack(self.embeddings(sparse_features))
        inputs = self._inputs(dense_features, vectors.flatten(1).to(dense_features.dtype))
        return self.output(torch.cat([self.deep(inputs), self.cross(inputs)], dim=1)).squeeze(1)

    def _inputs(
        self, dense_features: Float[Tensor, "batch dense"], vectors: Float[Tensor, "batch features_dim"]
    ) -> Float[Tensor, "batch in"]:
        """Returns numbers, soft one-hot vectors and the features' vectors, side by side, as far as there are any."""
        if self.soft_one_hot is None:
            return torch.cat([dense_features, vectors], dim=1)
        soft_one_hot = self.soft_one_hot(dense_features).flatten(1)
        numbers = [dense_features.nan_to_num(nan=0.0)] if self._num_dense else []
        return torch.cat([*numbers, soft_one_hot, vectors], dim=1)
