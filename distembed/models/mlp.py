"""A multi-layer perceptron and its initial weights."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers with a ReLU after each of them.

    Weights start from N(0, 2/(fan_in + fan_out)) (Glorot and Bengio, AISTATS 2010, equation 12) and biases from 0.

    Args:
        in_features: Size of the input.
        sizes: Output size of each layer.
        last_is_linear: Whether the last layer has no ReLU.
    """

    def __init__(self, in_features: int, sizes: Sequence[int], last_is_linear: bool = False) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for fan_in, fan_out in zip([in_features, *sizes[:-1]], sizes, strict=True):
            layers += [make_linear(fan_in, fan_out), nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*(layers[:-1] if last_is_linear else layers))

    def forward(self, inputs: Float[Tensor, "batch in"]) -> Float[Tensor, "batch out"]:
        """Applies the layers one after another."""
        outputs: Tensor = self.layers(inputs)
        return outputs


def make_linear(fan_in: int, fan_out: int) -> nn.Linear:
    """Returns a linear layer with the initial weights that :class:`MLP` describes."""
    linear = nn.Linear(fan_in, fan_out)
    nn.init.xavier_normal_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
