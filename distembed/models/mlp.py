"""Multi-layer perceptron, and its initialisation."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers with ReLU after each (also after the last unless ``last_is_linear``).

    Weights start from N(0, 2/(fan_in + fan_out)) (Glorot and Bengio, AISTATS 2010, equation 12) and biases from 0.
    """

    def __init__(self, in_features: int, sizes: Sequence[int], last_is_linear: bool = False) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for fan_in, fan_out in zip([in_features, *sizes[:-1]], sizes, strict=True):
            layers += [make_linear(fan_in, fan_out), nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*(layers[:-1] if last_is_linear else layers))

    def forward(self, inputs: Float[Tensor, "batch in"]) -> Float[Tensor, "batch out"]:
        """Applies the layers."""
        outputs: Tensor = self.layers(inputs)
        return outputs


def make_linear(fan_in: int, fan_out: int) -> nn.Linear:
    """A linear layer with the initialisation that :class:`MLP` describes."""
    linear = nn.Linear(fan_in, fan_out)
    nn.init.xavier_normal_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
