"""Cross layers of DCN V2 (Wang et al., WWW 2021), with low rank or with the gates of GDCN (Wang et al., CIKM 2023)."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from distembed.models.layers import make_linear


class CrossLayersV2(nn.Module):
    """Layers ``x_{l+1} = x_0 * (W_l x_l + b_l) + x_l``, where ``*`` multiplies number by number (DCN V2, equation 1).

    With a rank, ``W_l = U_l V_l`` of narrow matrices [D, r] and [r, D]: 2 D r numbers, not D^2 (equation 2). With
    gates, ``x_0 * (W_l x_l + b_l)`` is multiplied by ``sigmoid(G_l x_l)`` (GDCN, equation 2).

    Args:
        in_features: Numbers D of each ``x_l``.
        num_layers: Number of layers.
        rank: Rows r of each V_l, and columns of each U_l; None for a whole matrix W_l.
        gated: Whether each layer has a gate, a matrix G_l [D, D].
    """

    def __init__(self, in_features: int, num_layers: int, rank: int | None = None, gated: bool = False) -> None:
        super().__init__()
        self.num_outputs = in_features
        layers = range(num_layers)
        self.down = nn.ModuleList(nn.Linear(in_features, rank, bias=False) for _ in layers if rank is not None)
        self.up = nn.ModuleList(make_linear(rank or in_features, in_features) for _ in layers)
        self.gates = nn.ModuleList(nn.Linear(in_features, in_features, bias=False) for _ in layers if gated)
        for linear in [*self.down, *self.gates]:
            nn.init.xavier_normal_(linear.weight)

    def forward(self, vectors: Float[Tensor, "batch *vectors"]) -> Float[Tensor, "batch in"]:
        """Returns the last layer's output for the numbers of each row side by side, in their dtype."""
        inputs = vectors.flatten(1)
        crossed = inputs
        for layer, up in enumerate(self.up):
            product = up(self.down[layer](crossed) if self.down else crossed)
            if self.gates:
                product = product * torch.sigmoid(self.gates[layer](crossed))
            crossed = torch.addcmul(crossed, inputs, product.to(inputs.dtype))
        return crossed
