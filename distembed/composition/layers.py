"""Small dense functions, each packed into a row of numbers (Shi et al., KDD 2020, section 4.1), and their activations.

A function of D numbers with hidden sizes h_1, ..., h_m is a row of F numbers, layer after layer, each layer's matrix
[in, out] row by row and then its bias [out]::

    | W_1: D x h_1 | b_1: h_1 | W_2: h_1 x h_2 | b_2: h_2 | ... | W: h_m x D | b: D |

The activation stands between two layers; the last one ends linear, so without hidden sizes the function is ``x W + b``.
Many functions are evaluated at once, each on inputs of its own, by batched products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise, zip_longest
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
from jaxtyping import Float

from distembed.base.errors import UserError
from distembed.base.lazy import NameTable, torch

if TYPE_CHECKING:
    from torch import Tensor

Activation: TypeAlias = "Callable[[Tensor], Tensor]"
"""An elementwise function of a tensor that autograd supports."""

ACTIVATIONS: NameTable[Activation] = NameTable(
    {
        "relu": "torch:relu",
        "leaky_relu": "torch.nn.functional:leaky_relu",
        "tanh": "torch:tanh",
        "sigmoid": "torch:sigmoid",
        "gelu": "torch.nn.functional:gelu",
        "silu": "torch.nn.functional:silu",
        "elu": "torch.nn.functional:elu",
        "softplus": "torch.nn.functional:softplus",
    }
)
"""The elementwise function of each name."""

_NUM_NODES = 100
_FLOAT32_RESOLUTION = 1e-6
"""A relative difference well above float32's rounding, 6e-8."""


@dataclass(frozen=True)
class PackedLayers:
    """The shape of the functions: the size of each hidden layer, none for linear functions, and the activation."""

    hidden: tuple[int, ...]
    activation: Activation

    def num_parameters(self, dim: int) -> int:
        """Returns F, the number of weights and biases of one function from ``dim`` numbers to ``dim`` numbers."""
        return sum(self._widths(dim))

    def layers(self, dim: int) -> list[tuple[int, int]]:
        """Returns the number of inputs and of outputs of each layer."""
        return list(pairwise((dim, *self.hidden, dim)))

    def forward(
        self,
        inputs: Float[Tensor, "functions inputs dim"],
        packed: Float[Tensor, "functions F"],
        hidden: list[Tensor] | None = None,
    ) -> Float[Tensor, "functions inputs dim"]:
        """Returns ``packed[f]`` applied to each of the inputs ``inputs[f]``, for every function f.

        Appends a tensor for each hidden layer to ``hidden``, from which :meth:`backward` can start.
        """
        (weight, bias), *further = self._unpack(packed, inputs.shape[2])
        values = torch.baddbmm(bias, inputs, weight)
        for weight, bias in further:
            saved = save_for_backward(self.activation, values)
            if hidden is not None:
                hidden.append(saved)
            values = torch.baddbmm(bias, activate(self.activation, saved), weight)
        return values

    def backward(
        self,
        inputs: Float[Tensor, "functions inputs dim"],
        packed: Float[Tensor, "functions F"],
        gradient: Float[Tensor, "functions inputs dim"],
        hidden: Sequence[Tensor] = (),
    ) -> tuple[Float[Tensor, "functions inputs dim"], Float[Tensor, "functions F"]]:
        """Returns the gradients of the inputs and of the packed functions, given the ``gradient`` of the outputs.

        ``hidden`` holds the tensors that :meth:`forward` appended; without them they are computed again.
        """
        # for y = x W + b:  dW = x^T dy,  db = sum of dy over the inputs,  dx = dy W^T; from the last layer to the first
        layers = self._unpack(packed, inputs.shape[2])
        layer_inputs, pullbacks = [inputs], []
        for (weight, bias), saved in zip_longest(layers[:-1], hidden):
            if saved is None:
                saved = save_for_backward(self.activation, torch.baddbmm(bias, layer_inputs[-1], weight))
            values, pullback = pull_back(self.activation, saved)
            layer_inputs.append(values)
            pullbacks.append(pullback)
        packed_gradients: list[Tensor] = []
        for (weight, _), values in zip(reversed(layers), reversed(layer_inputs), strict=True):
            packed_gradients[:0] = [torch.bmm(values.mT, gradient).flatten(1), gradient.sum(1)]
            gradient = torch.bmm(gradient, weight.mT)
            if pullbacks:
                gradient = pullbacks.pop()(gradient)
        return gradient, torch.cat(packed_gradients, dim=1)

    def _widths(self, dim: int) -> list[int]:
        """Returns the number of entries of each matrix and each bias, in the order of packing."""
        return [width for n_in, n_out in self.layers(dim) for width in (n_in * n_out, n_out)]

    def _unpack(self, packed: Tensor, dim: int) -> list[tuple[Tensor, Tensor]]:
        """Returns the weight [functions, in, out] and the bias [functions, 1, out] of each layer, as views."""
        ends = list(accumulate(self._widths(dim)))
        # torch.fx traces it, for which a split has no known number of pieces
        slices = [packed.narrow(1, start, end - start) for start, end in pairwise([0, *ends])]
        return [
            (weight.view(-1, n_in, n_out), bias.unsqueeze(1))
            for (n_in, n_out), weight, bias in zip(self.layers(dim), slices[::2], slices[1::2], strict=True)
        ]


def save_for_backward(activation: Activation, inputs: Tensor) -> Tensor:
    """Returns the tensor that :func:`activate` and :func:`pull_back` take: the inputs; relu's values overwrite them."""
    # In place, so that a block's values stay in the cache: twice as fast as through autograd.
    return torch.relu_(inputs) if activation is torch.relu else inputs


def activate(activation: Activation, saved: Tensor) -> Tensor:
    """Returns the activation's values, from the tensor of :func:`save_for_backward`."""
    return saved if activation is torch.relu else activation(saved)


def pull_back(activation: Activation, saved: Tensor) -> tuple[Tensor, Activation]:
    """Returns the activation's values, detached, and a function from their gradient to the gradient of its inputs.

    ``saved`` is the tensor of :func:`save_for_backward`. Relu's function overwrites the gradient that it is given.
    """
    if activation is torch.relu:
        return saved, lambda gradient: torch.ops.aten.threshold_backward(gradient, saved, 0, grad_input=gradient)
    with torch.enable_grad():
        leaf = saved.detach().requires_grad_()
        values = activation(leaf)
    return values.detach(), lambda gradient: torch.autograd.grad(values, leaf, gradient)[0]


@cache
def _quadrature() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    return np.polynomial.hermite_e.hermegauss(_NUM_NODES)


def second_moment(activation: Activation, variance: float, offset: float = 0.0) -> float:
    """Returns ``E[(activation(z) - offset)^2]`` of normal z of mean 0, by Gauss-Hermite quadrature; refuses 0, inf."""
    nodes, weights = _quadrature()
    values = activation(torch.from_numpy(nodes * variance**0.5)).numpy() - offset
    moment = float(weights @ values**2 / weights.sum())
    if not 0.0 < moment < math.inf:
        raise UserError(
            f"activation is {activation!r}, whose mean square is {moment} for inputs of variance {variance}; functions "
            f"can start from none but a positive, finite one. Known activations: {', '.join(ACTIVATIONS)}."
        )
    return moment


def removable_offset(activation: Activation, variance: float) -> float:
    """Returns the activation's value at 0, which biases subtract at the start; 0 if only rounding would be left."""
    at_zero = float(activation(torch.zeros((), dtype=torch.float64)))
    if at_zero == 0.0:
        return 0.0
    change = second_moment(activation, variance, at_zero) ** 0.5
    return at_zero if change > _FLOAT32_RESOLUTION * abs(at_zero) else 0.0
