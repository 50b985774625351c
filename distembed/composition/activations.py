"""Activations by name, and the size of what they give."""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from distembed.errors import UserError

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "leaky_relu": F.leaky_relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "silu": F.silu,
    "elu": F.elu,
    "softplus": F.softplus,
}
"""Elementwise function by name."""

Pullback = Callable[[Tensor], Tensor]
"""From the gradient of an activation's values to that of its inputs; it may overwrite what it is given."""


def settle(activation: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """What an activation is evaluated and pulled back from: ``inputs``, or its values written over them if they do."""
    # In place, so that a block's values stay in the cache: twice as fast as through autograd.
    return torch.relu_(inputs) if activation is torch.relu else inputs


def activate(activation: Callable[[Tensor], Tensor], settled: Tensor) -> Tensor:
    """The activation's values, from what :func:`settle` gave."""
    return settled if activation is torch.relu else activation(settled)


def pull_back(activation: Callable[[Tensor], Tensor], settled: Tensor) -> tuple[Tensor, Pullback]:
    """The activation's values, detached, and how gradients go back through it, from what :func:`settle` gave."""
    if activation is torch.relu:
        return settled, lambda gradient: torch.ops.aten.threshold_backward(gradient, settled, 0, grad_input=gradient)
    with torch.enable_grad():
        leaf = settled.detach().requires_grad_()
        values = activation(leaf)
    return values.detach(), lambda gradient: torch.autograd.grad(values, leaf, gradient)[0]


_NUM_NODES = 100

_FLOAT32_TELLS = 1e-6
"""Relative differences well above float32's rounding, 6e-8."""


def second_moment(activation: Callable[[Tensor], Tensor], variance: float, offset: float = 0.0) -> float:
    """``E[(activation(z) - offset)^2]`` for z normal with zero mean, by Gauss-Hermite quadrature in float64.

    Raises:
        UserError: where it is not a positive number, so that no weights after the activation give a variance.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NUM_NODES)
    values = activation(torch.from_numpy(nodes * variance**0.5)).numpy() - offset
    moment = float(weights @ values**2 / weights.sum())
    if not 0.0 < moment < math.inf:
        raise UserError(
            f"activation is {activation!r}, whose mean square is {moment} for inputs of variance {variance}; functions "
            f"can start from none but a positive, finite one. Known activations: {', '.join(ACTIVATIONS)}."
        )
    return moment


def removable_offset(activation: Callable[[Tensor], Tensor], variance: float) -> float:
    """What the activation gives for 0, where its inputs change that by enough for float32 to tell, else 0."""
    at_zero = float(activation(torch.zeros((), dtype=torch.float64)))
    if at_zero == 0.0:
        return 0.0
    change = second_moment(activation, variance, at_zero) ** 0.5
    return at_zero if change > _FLOAT32_TELLS * abs(at_zero) else 0.0
