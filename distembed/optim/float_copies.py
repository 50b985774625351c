"""Weights of half precision that torch's optimizers train in float32, as FBGEMM's do.

In half precision by itself, torch would keep its states in the weights' dtype: in fp16 squares of gradients below 2e-4
are 0 there, and so is an ``eps`` of 1e-8, so that Adam divides by 0. So a step is made on float32 copies, with float32
states, and the copies are rounded to the weights. The price is eight bytes a weight while the step lasts.
"""

from typing import Any

import torch
from torch import Tensor

_FLOAT_BYTES = 4


def is_half(weight: Tensor) -> bool:
    """Returns whether a weight is of half precision, so that it is trained in a copy."""
    return weight.is_floating_point() and weight.itemsize < _FLOAT_BYTES


def state_dtype(weight: Tensor) -> torch.dtype:
    """Returns the dtype of the states that an optimizer keeps of a weight."""
    return torch.float32 if is_half(weight) else weight.dtype


def train_in_float32(optimizer: torch.optim.Optimizer) -> None:
    """Registers hooks by which each step of an optimizer trains half-precision weights in float32 copies.

    States that exist already become float32. Gradients must be there before a step: a closure that computes them within
    the step would not reach the copies.
    """
    for weight, states in optimizer.state.items():  # Adagrad makes its states before the first step
        if is_half(weight):
            states.update({name: value.float() for name, value in states.items() if value.dtype == weight.dtype})
    copies = _FloatCopies()
    optimizer.register_step_pre_hook(copies.widen)
    optimizer.register_step_post_hook(copies.narrow)


class _FloatCopies:
    """Puts copies in the place of weights while a step lasts."""

    def __init__(self) -> None:
        self._replaced: list[tuple[list[Tensor], int, Tensor]] = []

    def widen(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Before a step: puts float32 copies of weights and gradients in the weights' place, with their states."""
        for group in optimizer.param_groups:
            weights: list[Tensor] = group["params"]
            for index, weight in enumerate(weights):
                if not is_half(weight) or weight.grad is None:
                    continue
                copy = weights[index] = weight.detach().float()
                copy.grad = weight.grad.float()
                _move_state(optimizer, weight, copy)
                self._replaced.append((weights, index, weight))

    def narrow(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """After a step: rounds each copy into its weight, and puts the weight back in its place with the states."""
        for weights, index, weight in self._replaced:
            copy, weights[index] = weights[index], weight
            weight.data.copy_(copy)
            _move_state(optimizer, copy, weight)
        self._replaced.clear()


def _move_state(optimizer: torch.optim.Optimizer, source: Tensor, target: Tensor) -> None:
    if source in optimizer.state:
        optimizer.state[target] = optimizer.state.pop(source)
