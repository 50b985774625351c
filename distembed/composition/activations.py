"""Activations: their values, their gradients, and the second moments of their outputs."""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from distembed.base.errors import UserError
from distembed.composition import ACTIVATIONS

Pullback = Callable[[Tensor], Tensor]
"""A function from the gradient of an activation's values to that of its inputs; it may overwrite its argument."""


def save_for_backward(activation: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Returns the tensor from which an activation's values and gradients are computed.

    It is ``inputs``, or for relu, whose values are enough, the values; these are written over ``inputs``.
    """
    # In place, so that a block's values stay in the cache: twice as fast as through autograd.
    return torch.relu_(inputs) if activation is torch.relu else inputs


def activate(activation: Callable[[Tensor], Tensor], saved: Tensor) -> Tensor:
    """Returns the activation's values, from the tensor of :func:`save_for_backward`."""
    return saved if activation is torch.relu else activation(saved)


def pull_back(activation: Callable[[Tensor], Tensor], saved: Tensor) -> tuple[Tensor, Pullback]:
    """Returns the activation's values, detached, and its pullback, from the tensor of :func:`save_for_backward`."""
    if activation is torch.relu:
        return saved, lambda gradient: torch.ops.aten.threshold_backward(gradient, saved, 0, grad_input=gradient)
    with torch.enable_grad():
        leaf = saved.detach().requires_grad_()
        values = activation(leaf)
    return values.detach(), lambda gradient: torch.autograd.grad(values, leaf, gradient)[0]


_NUM_NODES = 100

_FLOAT32_RESOLUTION = 1e-6
"""A relative difference well above float32's rounding, 6e-8."""


@cache
def _quadrature() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Returns the nodes and weights, which take milliseconds to find."""
    return np.polynomial.hermite_e.hermegauss(_NUM_NODES)


def second_moment(activation: Callable[[Tensor], Tensor], variance: float, offset: float = 0.0) -> float:
    """Returns ``E[(activation(z) - offset)^2]`` for normal z with zero mean, by Gauss-Hermite quadrature in float64.

    Args:
        activation: An elementwise function.
        variance: The variance of z.
        offset: A number that is subtracted from each value.

    Raises:
        UserError: The moment is not positive and finite, so that no weights after the activation give a variance.
    """
    nodes, weights = _quadrature()
    values = activation(torch.from_numpy(nodes * variance**0.5)).numpy() - offset
    moment = float(weights @ values**2 / weights.sum())
    if not 0.0 < moment < math.inf:
        raise UserError(
            f"activation is {activation!r}, whose mean square is {moment} for inputs of variance {variance}; functions "
            f"can start from none but a positive, finite one. Known activations: {', '.join(ACTIVATIONS)}."
        )
    return moment


def removable_offset(activation: Callable[[Tensor], Tensor], variance: float) -> float:
    """Returns the activation's value at 0, or 0 where its other values are the same but for float32's rounding.

    Args:
        activation: An elementwise function.
        variance: The variance of its inputs.
    """
    at_zero = float(activation(torch.zeros((), dtype=torch.float64)))
    if at_zero == 0.0:
        return 0.0
    change = second_moment(activation, variance, at_zero) ** 0.5
    return at_zero if change > _FLOAT32_RESOLUTION * abs(at_zero) else 0.0
