"""DeepFM (Guo et al., IJCAI 2017): a factorisation machine and a deep network over the same vectors.

The logit is ``b + sum_i w_i + sum_{i<j} <v_i, v_j> + deep(all vectors)``. The first number of a feature's vector is its
weight w_i and the other numbers are its factors v_i, so that weights lie in the same compressed and sharded tables. The
sum over pairs is ``(|sum_i v_i|^2 - sum_i |v_i|^2) / 2``, which takes V D products in place of V^2 D.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from distembed.models.deepfm_config import DeepFMConfig
from distembed.models.inputs import ModelInputs
from distembed.models.layers import MLP
from distembed.models.soft_one_hot import start_short
from distembed.models.vectors import FeatureVectorModel


class DeepFM(FeatureVectorModel):
    """The sum of a factorisation machine and a deep network."""

    def __init__(self, inputs: ModelInputs, config: DeepFMConfig) -> None:
        super().__init__(inputs, config.soft_one_hot)
        if self.soft_one_hot is not None:
            # dot products of unit vectors would add up to logits of more than 2 before anything is learned
            start_short(self.soft_one_hot)
        self.deep = MLP(self.num_inputs, [*config.deep, 1], last_is_linear=True, dropout=config.dropout)
        self.bias = nn.Parameter(torch.zeros(1))

    def logits(self, vectors: Float[Tensor, "batch vectors dim"]) -> Float[Tensor, " batch"]:
        weights, factors = vectors[..., 0], vectors[..., 1:]
        pairs = (factors.sum(1).square() - factors.square().sum(1)).sum(1) / 2
        return self.bias + weights.sum(1) + pairs + self.deep(vectors.flatten(1)).squeeze(1)
