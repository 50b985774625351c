"""FinalMLP (Mao et al., AAAI 2023): two deep networks over differently gated inputs, joined by a bilinear layer.

Stream s multiplies the vectors x of all features, number by number, by a gate ``2 sigmoid(gate_s(c_s))`` (equation 5),
where the context c_s is the vectors of chosen features, or a learned vector. With the streams' outputs h and g cut into
K heads, the logit is ``b + u.h + v.g + sum_k h_k^T W_k g_k`` (equations 7 and 9).
"""

from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from distembed.base.names import one_of
from distembed.models.finalmlp_config import FinalMLPConfig, StreamConfig
from distembed.models.inputs import ModelInputs
from distembed.models.layers import MLP, make_linear
from distembed.models.vectors import FeatureVectorModel


class Stream(nn.Module):
    """A gate and a deep network: maps vectors [batch, vectors, dim] to hidden numbers [batch, out].

    Args:
        features: The feature of each vector.
        dim: Dimension of a vector.
        config: The stream's settings.
        gate: Hidden sizes of the gate's network; None for no gate.
        dropout: Share of hidden numbers that are dropped in training.
    """

    def __init__(
        self, features: list[str], dim: int, config: StreamConfig, gate: list[int] | None, dropout: float
    ) -> None:
        super().__init__()
        num_inputs = len(features) * dim
        self.deep = MLP(num_inputs, config.sizes, dropout=dropout)
        self.gate = self.context = None
        if gate is None:
            return
        chosen = {one_of("feature that gates a stream", name, features) for name in config.gated_by}
        positions = [number for number, feature in enumerate(features) if feature in chosen]
        self.register_buffer("_chosen", torch.tensor(positions, dtype=torch.int64), persistent=False)
        if not positions:
            # not zeros, from which the ReLU of the gate's network would give no gradient
            self.context = nn.Parameter(torch.randn(1, dim) * dim**-0.5)
        self.gate = MLP(max(1, len(positions)) * dim, [*gate, num_inputs], last_is_linear=True)

    def forward(self, vectors: Float[Tensor, "batch vectors dim"]) -> Float[Tensor, "batch out"]:
        inputs = vectors.flatten(1)
        if self.gate is not None:
            context = (
                vectors.index_select(1, cast(Tensor, self._chosen)).flatten(1) if self.context is None else self.context
            )
            inputs = inputs * (2 * torch.sigmoid(self.gate(context)))
        hidden: Tensor = self.deep(inputs)
        return hidden


class FinalMLP(FeatureVectorModel):
    """Two gated streams and their bilinear fusion."""

    def __init__(self, inputs: ModelInputs, config: FinalMLPConfig) -> None:
        super().__init__(inputs, config.soft_one_hot)
        features, dim = self.vector_features, inputs.embedding_dim
        self.first = Stream(features, dim, config.first, config.gate, config.dropout)
        self.second = Stream(features, dim, config.second, config.gate, config.dropout)
        self.num_heads = config.num_heads
        first_width, second_width = config.first.sizes[-1], config.second.sizes[-1]
        self.linear = make_linear(first_width + second_width, 1)
        heads = (config.num_heads, first_width // config.num_heads, second_width // config.num_heads)
        self.bilinear = nn.Parameter(torch.randn(heads) * (2 / (heads[1] + heads[2])) ** 0.5)

    def logits(self, vectors: Float[Tensor, "batch vectors dim"]) -> Float[Tensor, " batch"]:
        first, second = self.first(vectors), self.second(vectors)
        by_head = [hidden.unflatten(1, (self.num_heads, -1)).transpose(0, 1) for hidden in (first, second)]
        products = (torch.bmm(by_head[0], self.bilinear.to(first.dtype)) * by_head[1]).sum((0, 2))
        return self.linear(torch.cat([first, second], dim=1)).squeeze(1) + products
