"""Cross layers of low rank (Wang et al., DCN V2, WWW 2021, equation 2), the interaction of MLPerf's DLRM-DCNv2.

A layer multiplies by two narrow matrices, [D, r] and [r, D], in place of one [D, D]: 2 D r numbers, not D^2.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from distembed.models.mlp import make_linear


class LowRankCross(nn.Module):
    """Layers ``x_{l+1} = x_0 * (U_l V_l x_l + b_l) + x_l``, where ``*`` multiplies number by number.

    Args:
        in_features: Numbers D of each ``x_l``.
        num_layers: Number of layers.
        rank: Rows r of each V_l, and columns of each U_l.
    """

    def __init__(self, in_features: int, num_layers: int, rank: int) -> None:
        super().__init__()
        self.num_outputs = in_features
        self.down = nn.ModuleList(nn.Linear(in_features, rank, bias=False) for _ in range(num_layers))
        self.up = nn.ModuleList(make_linear(rank, in_features) for _ in range(num_layers))
        for linear in self.down:
            nn.init.xavier_normal_(linear.weight)  # type: ignore[arg-type]

    def forward(self, vectors: Float[Tensor, "batch vectors dim"]) -> Float[Tensor, "batch in"]:
        """Returns the last layer's output for the vectors of each row side by side, in their dtype."""
        inputs = vectors.flatten(1)
        crossed = inputs
        for down, up in zip(self.down, self.up, strict=True):
            crossed = torch.addcmul(crossed, inputs, up(down(crossed)).to(inputs.dtype))
        return crossed
