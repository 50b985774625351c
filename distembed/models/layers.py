"""Layers that models share: a perceptron, cross layers, dropout, and the stack of a batch's feature vectors."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torchrec.sparse.jagged_tensor import KeyedTensor

_BITS = 16
"""Random bits of an entry that may be dropped; four entries share one 64-bit number."""


class MLP(nn.Module):
    """Linear layers with a ReLU after each of them, except after the last one where ``last_is_linear``.

    Weights start from N(0, 2/(fan_in + fan_out)) (Glorot and Bengio, AISTATS 2010, equation 12) and biases from 0.
    With ``dropout``, that share of the numbers after each ReLU is dropped in training. The inputs may have columns of
    zeros after ``in_features``.
    """

    def __init__(
        self, in_features: int, sizes: Sequence[int], last_is_linear: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.in_features = in_features
        layers: list[nn.Module] = []
        for fan_in, fan_out in zip([in_features, *sizes[:-1]], sizes, strict=True):
            activation = nn.ReLU(inplace=True)
            # one module after each linear layer, so that weights have equal names with dropout and without
            layers += [
                make_linear(fan_in, fan_out),
                nn.Sequential(activation, Dropout(dropout)) if dropout > 0 else activation,
            ]
        self.layers = nn.Sequential(*(layers[:-1] if last_is_linear else layers))

    def forward(self, inputs: Float[Tensor, "batch in"]) -> Float[Tensor, "batch out"]:
        num_zeros = inputs.shape[1] - self.in_features
        if num_zeros == 0:
            outputs: Tensor = self.layers(inputs)
            return outputs
        first, *others = cast(Iterable[Any], self.layers)
        # zeros that align rows of inputs save time where rows of the weight are aligned, too
        outputs = functional.linear(inputs, functional.pad(first.weight, (0, num_zeros)), first.bias)
        for layer in others:
            outputs = layer(outputs)
        return outputs


class LabelTowers(nn.Module):
    """A network for each label, which maps the label's hidden numbers [batch, in] to its logit.

    Args:
        in_features: Numbers of each label's input.
        num_labels: Number of labels.
        sizes: Hidden sizes of each network.
        dropout: Share of the numbers after each hidden layer that are dropped in training.
    """

    def __init__(self, in_features: int, num_labels: int, sizes: Sequence[int], dropout: float = 0.0) -> None:
        super().__init__()
        self.networks = nn.ModuleList(
            MLP(in_features, [*sizes, 1], last_is_linear=True, dropout=dropout) for _ in range(num_labels)
        )

    def __len__(self) -> int:
        return len(self.networks)

    def forward(self, hidden: Sequence[Float[Tensor, "batch in"]]) -> Float[Tensor, "batch labels"]:
        """Returns the logit of each label."""
        return torch.cat([network(own) for network, own in zip(self.networks, hidden, strict=True)], dim=1)


def make_linear(fan_in: int, fan_out: int) -> nn.Linear:
    """Returns a linear layer with the initial weights that :class:`MLP` describes."""
    linear = nn.Linear(fan_in, fan_out)
    nn.init.xavier_normal_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


class CrossLayersV2(nn.Module):
    """Layers ``x_{l+1} = x_0 * (W_l x_l + b_l) + x_l`` of DCN V2 (Wang et al., WWW 2021, equation 1).

    ``*`` multiplies number by number.

    With a rank, ``W_l = U_l V_l`` of narrow matrices [D, r] and [r, D]: 2 D r numbers, not D^2 (equation 2). With
    gates, ``x_0 * (W_l x_l + b_l)`` is multiplied by ``sigmoid(G_l x_l)`` (GDCN, Wang et al., CIKM 2023, equation 2).

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


class StackFeatures(nn.Module):
    """Stacks the vectors of a KeyedTensor in a given order of features, as its own order follows the sharding plan.

    It is a module, not a function: TorchRec's pipeline traces the code of a model down to modules without tables, and
    in tracing a KeyedTensor has no keys to compare.
    """

    def __init__(self, vector_names: Sequence[str], embedding_dim: int) -> None:
        super().__init__()
        self.vector_names = list(vector_names)
        self.embedding_dim = embedding_dim

    def forward(self, embedded: KeyedTensor) -> Float[Tensor, "batch features dim"]:
        if embedded.keys() == self.vector_names:
            values = embedded.values()
        else:
            by_name = embedded.to_dict()
            values = torch.cat([by_name[name] for name in self.vector_names], dim=1)
        return values.view(-1, len(self.vector_names), self.embedding_dim)


def drop(values: Float[Tensor, "*shape"], probability: float) -> Float[Tensor, "*shape"]:
    """Returns values, each 0 with a probability and otherwise scaled to the same mean.

    On a CPU, torch draws a number for each entry, which takes a third of the step of a small transformer. Here four
    entries share the bits of one 64-bit number, so the probability is rounded to a multiple of 2^-16.
    """
    if values.device.type != "cpu":
        return functional.dropout(values, probability)
    num_dropped = min(round(probability * 2**_BITS), 2**_BITS - 1)
    words = torch.empty(-(-values.numel() * _BITS // 64), dtype=torch.int64)
    words.random_(-(2**63), None)  # given the least int64, all 64 bits are random; 0 and up by default
    # 16 random bits are uniform on [-2^15, 2^15): num_dropped of the 2^16 values are dropped
    bits = words.view(torch.int16)[: values.numel()].view(values.shape)
    is_kept = bits >= num_dropped - 2 ** (_BITS - 1)
    return values * is_kept.to(values.dtype).mul_(2**_BITS / (2**_BITS - num_dropped))


class Dropout(nn.Module):
    """Drops a share of the numbers in training, as :func:`drop` does."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def extra_repr(self) -> str:
        return f"probability={self.probability}"

    def forward(self, values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return drop(values, self.probability) if self.training and self.probability > 0 else values
