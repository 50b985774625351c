"""Exponential moving averages of networks' weights, which a trained model is used with (Polyak & Juditsky, 1992).

With the weights w_t after step t, the decay d and n = t - start_step, the averages are::

    a_t = w_t                               n <= 0
    a_t = d_n a_{t-1} + (1 - d_n) w_t       afterwards, with d_n = min(d, (1 + n) / (10 + n))

d_n is that of TensorFlow's ``ExponentialMovingAverage`` with ``num_updates``. A constant d would keep d^n of the random
initial weights: 82% of them after 200 steps of d = 0.999.

Networks and path functions are averaged: all ranks have them, with the same numbers, so that no rank tells another its
averages. Tables are not averaged. A copy of them would double the memory that decides whether a model fits, and FBGEMM
updates the rows of a batch alone, within the backward pass, whereas an average changes all rows in each step.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

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
        self._config = config or EMAConfig()
        self._weights = [] if config is None else list(weights.values())
        self.values = {} if config is None else {name: weight.detach().clone() for name, weight in weights.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes the weights after ``step`` steps into the averages."""
        num_updates = max(0, step - self._config.start_step)
        decay = min(self._config.decay, (1 + num_updates) / (10 + num_updates)) if num_updates else 0.0
        if self.values:
            torch._foreach_lerp_(list(self.values.values()), self._weights, 1.0 - decay)

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
