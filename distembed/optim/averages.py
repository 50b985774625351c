"""Exponential moving averages of networks' weights, which a trained model is used with (Polyak & Juditsky, 1992).

With the weights w_t after step t and the decay d, the averages are::

    a_t = w_t                           t <= start_step
    a_t = d a_{t-1} + (1 - d) w_t       afterwards

Networks and path functions are averaged: all ranks have them, with the same numbers, so that no rank tells another its
averages. Tables are not averaged. A copy of them would double the memory that decides whether a model fits, and FBGEMM
updates the rows of a batch alone, within the backward pass, whereas an average changes all rows in each step.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from distembed.optim.config import EMAConfig


class AveragedWeights:
    """The averages of weights, and the exchange of both.

    Args:
        weights: The weights, by name, as :func:`~distembed.optim.optimizers.averaged_parameters` returns them.
        config: The decay; None for no averages.

    Attributes:
        values: The averages, by the names of the weights; none without a config.
    """

    def __init__(self, weights: Mapping[str, Tensor], config: EMAConfig | None) -> None:
        self._weights = [] if config is None else list(weights.values())
        self.values = {} if config is None else {name: weight.detach().clone() for name, weight in weights.items()}
        self._start_step = 0 if config is None else config.start_step
        self._average = None if config is None else get_ema_multi_avg_fn(config.decay)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes the weights after ``step`` steps into the averages."""
        if not self.values:
            return
        if step <= self._start_step or self._average is None:
            torch._foreach_copy_(list(self.values.values()), self._weights)
        else:
            self._average(list(self.values.values()), self._weights, step)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Puts the averages in the place of the weights within the block, in which nothing is trained or saved."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for weight, average in zip(self._weights, self.values.values(), strict=True):
            weight.data, average.data = average.data, weight.data
