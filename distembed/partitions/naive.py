"""Naive: the full table, one row an id (Shi et al., KDD 2020, section 3.1, example 1).

Trade-off: no compression, and every id is trained on its own occurrences alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxtyping import Int64

from distembed.partitions.digits import DigitPartition

if TYPE_CHECKING:
    from torch import Tensor


class Naive(DigitPartition):
    """``p_1(x) = x``: n rows for n ids."""

    name = "naive"

    def __init__(self, num_embeddings: int) -> None:
        super().__init__(num_embeddings)
        self.num_rows = (self.num_embeddings,)

    @property
    def description(self) -> str:
        return "p_1(x) = x"

    def grown_settings(self, num_embeddings: int) -> dict[str, Any]:
        """Returns no settings: new rows follow the old ones."""
        return {}

    @classmethod
    def rows_by_constants(
        cls, ids: Int64[Tensor, "*shape"], constants: Int64[Tensor, "constants *shape"]
    ) -> Int64[Tensor, "k *shape"]:
        return ids.unsqueeze(0)  # torch.export cannot save a program that iterates over a tensor of no constants
