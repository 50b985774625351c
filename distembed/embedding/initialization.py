"""Initial weights of a table, a function of (seed, table's name) alone.

Neither the number of ranks nor the order in which tables are made changes a table's first weights, so that runs on one
and on many ranks start from the same model.
"""

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class UniformInit:
    """Fills a weight in place with U(-b, b), where ``b = sqrt(3 * variance)``; fits TorchRec's ``init_fn``."""

    variance: float
    seed: int
    name: str

    @property
    def bound(self) -> float:
        """b, the largest absolute value."""
        return math.sqrt(3.0 * self.variance)

    def __call__(self, weight: Tensor) -> Tensor:
        digest = hashlib.sha256(f"{self.seed}/{self.name}".encode()).digest()
        # 63 bits: what a torch generator takes on every device
        generator = torch.Generator(weight.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        with torch.no_grad():
            return weight.uniform_(-self.bound, self.bound, generator=generator)
