"""Initial weights of a table, a function of (seed, table's name) alone.

Neither the number of ranks nor the order in which tables are made changes a table's first weights, so that runs on one
and on many ranks start from the same model.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from distembed.composition.initial import Distribution


@dataclass(frozen=True)
class SeededInit:
    """Fills a whole weight in place with draws that depend on (seed, name); fits TorchRec's ``init_fn``."""

    distribution: Distribution
    seed: int
    name: str

    def __call__(self, weight: Tensor) -> Tensor:
        digest = hashlib.sha256(f"{self.seed}/{self.name}".encode()).digest()
        # 63 bits: what a torch generator takes on every device
        generator = torch.Generator(weight.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        with torch.no_grad():
            return self.distribution.fill(weight, generator)
