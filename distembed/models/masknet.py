"""MaskNet (Wang et al., DLP-KDD 2021): networks whose inputs are multiplied by masks made of the row's features.

A mask block computes ``relu(norm(W (x * mask)))`` with ``mask = W_2 relu(W_1 v + b_1) + b_2`` of the vectors v of all
features (equations 3 to 8). In parallel, each block takes the normalised vectors, and a deep network the blocks'
outputs side by side; in series, each block takes the output of the block before, and the last one's output gives the
logit.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from distembed.models.inputs import ModelInputs
from distembed.models.layers import MLP
from distembed.models.masknet_config import MaskNetConfig
from distembed.models.vectors import FeatureVectorModel


class MaskBlock(nn.Module):
    """Maps inputs [batch, in] to hidden numbers [batch, out], masked by the vectors [batch, vectors * dim]."""

    def __init__(self, num_vector_numbers: int, in_features: int, out_features: int, reduction: float) -> None:
        super().__init__()
        self.mask = MLP(num_vector_numbers, [max(1, round(reduction * in_features)), in_features], last_is_linear=True)
        self.linear = nn.Linear(in_features, out_features, bias=False)
        nn.init.xavier_normal_(self.linear.weight)
        self.norm = nn.LayerNorm(out_features)

    def forward(
        self, inputs: Float[Tensor, "batch in"], vectors: Float[Tensor, "batch numbers"]
    ) -> Float[Tensor, "batch out"]:
        return functional.relu(self.norm(self.linear(inputs * self.mask(vectors))))


class MaskNet(FeatureVectorModel):
    """Mask blocks over the vectors of all features, in parallel or in series."""

    def __init__(self, inputs: ModelInputs, config: MaskNetConfig) -> None:
        super().__init__(inputs, config.soft_one_hot)
        dim, num_vectors = inputs.embedding_dim, len(self.vector_names)
        self.norm_scale = nn.Parameter(torch.ones(num_vectors, dim))
        self.norm_shift = nn.Parameter(torch.zeros(num_vectors, dim))
        self.is_parallel = config.structure == "parallel"
        sizes = config.blocks
        in_sizes = [self.num_inputs] * len(sizes) if self.is_parallel else [self.num_inputs, *sizes[:-1]]
        self.blocks = nn.ModuleList(
            MaskBlock(self.num_inputs, fan_in, fan_out, config.reduction)
            for fan_in, fan_out in zip(in_sizes, sizes, strict=True)
        )
        hidden, deep = (sum(sizes), config.deep) if self.is_parallel else (sizes[-1], [])
        self.output = MLP(hidden, [*deep, 1], last_is_linear=True, dropout=config.dropout)

    def logits(self, vectors: Float[Tensor, "batch vectors dim"]) -> Float[Tensor, " batch"]:
        normal = functional.layer_norm(vectors, vectors.shape[-1:]) * self.norm_scale + self.norm_shift
        inputs, masks = normal.flatten(1), vectors.flatten(1)
        if self.is_parallel:
            hidden = torch.cat([block(inputs, masks) for block in self.blocks], dim=1)
        else:
            hidden = inputs
            for block in self.blocks:
                hidden = block(hidden, masks)
        return self.output(hidden).squeeze(1)
