"""Distributions of initial weights; each fills a tensor in place."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from distembed.base.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class Distribution(Protocol):
    """A distribution of initial weights."""

    def fill(self, weight: Tensor, generator: torch.Generator) -> Tensor:
        """Draws every element of a weight in place, and returns the weight."""


@dataclass(frozen=True)
class Uniform:
    """The uniform distribution U(-b, b) with ``b = sqrt(3 * variance)``."""

    variance: float

    def fill(self, weight: Tensor, generator: torch.Generator) -> Tensor:
        bound = math.sqrt(3.0 * self.variance)
        return weight.uniform_(-bound, bound, generator=generator)


@dataclass(frozen=True)
class NearSigns:
    """Random signs times magnitudes near 1, uniform within a tenth of it, so that no two rows are the same."""

    variance: float = 1.0

    def fill(self, weight: Tensor, generator: torch.Generator) -> Tensor:
        drawn = weight.uniform_(-1.0, 1.0, generator=generator)
        # |u| is uniform on [0, 1]; E[(0.9 + 0.2 |u|)^2] = 1 + 0.01 / 3
        scale = math.sqrt(self.variance / (1.0 + 0.01 / 3.0))
        return drawn.copy_(drawn.sign() * (0.9 + 0.2 * drawn.abs()) * scale)
