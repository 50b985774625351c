"""DCN V2 (Wang et al., WWW 2021) and Gated DCN (Wang et al., CIKM 2023).

Cross layers over the vectors of all features multiply features of ever higher orders; a deep network runs beside them,
and one linear layer computes a logit from both outputs (parallel), or it runs on the cross layers' output (stacked).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from distembed.models.dcnv2_config import CrossAndDeepConfig
from distembed.models.inputs import ModelInputs
from distembed.models.layers import MLP, CrossLayersV2, make_linear
from distembed.models.vectors import FeatureVectorModel


class DCNv2(FeatureVectorModel):
    """Cross layers, with a rank or gates as :class:`CrossLayersV2` has them, and a deep network."""

    def __init__(
        self, inputs: ModelInputs, config: CrossAndDeepConfig, rank: int | None = None, gated: bool = False
    ) -> None:
        super().__init__(inputs, config.soft_one_hot)
        self.cross = CrossLayersV2(self.num_inputs, config.num_cross_layers, rank, gated)
        self.deep = MLP(self.num_inputs, config.deep, dropout=config.dropout)
        self.is_parallel = config.structure == "parallel"
        self.output = make_linear(config.deep[-1] + (self.num_inputs if self.is_parallel else 0), 1)

    def logits(self, vectors: Float[Tensor, "batch vectors dim"]) -> Float[Tensor, " batch"]:
        inputs = vectors.flatten(1)
        crossed = self.cross(inputs)
        hidden = torch.cat([self.deep(inputs), crossed], dim=1) if self.is_parallel else self.deep(crossed)
        return self.output(hidden).squeeze(1)
