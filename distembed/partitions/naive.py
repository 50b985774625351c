"""Naive: the full table, one row an id (Shi et al., KDD 2020, section 3.1, example 1).

Trade-off: no compression, and every id is trained on its own occurrences alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxtyping import Int64

from distembed.base.lazy import torch
from distembed.partitions.base import Digit, Partition

if TYPE_CHECKING:
    from torch import Tensor


class Naive(Partition):
    """``p_1(x) = x``: n rows for n ids."""

    name = "naive"

    def __init__(self, num_embeddings: int) -> None:
        super().__init__(num_embeddings)
        self.num_rows = (self.num_embeddings,)

    @property
    def description(self) -> str:
        return "p_1(x) = x"

    def rows(self, ids: Int64[Tensor, "*shape"]) -> Int64[Tensor, "k *shape"]:
        return ids.unsqueeze(0)

    def colliding_ids(self) -> None:
        return None

    def grown_settings(self, num_embeddings: int) -> dict[str, Any]:
        """Returns no settings: rows are added behind the old ones."""
        return {}

    def _candidates(self, rows: Int64[Tensor, "k *shape"]) -> Int64[Tensor, "*shape"]:
        return rows[0]

    def digits(self) -> tuple[Digit, ...]:
        return (Digit(1, None),)

    @classmethod
    def constants(cls, partitions: Sequence[Partition]) -> Int64[Tensor, "constants tables"]:
        """Returns none: an id is its own row."""
        return torch.empty(0, len(partitions), dtype=torch.int64)

    @classmethod
    def rows_by_constants(
        cls, ids: Int64[Tensor, "*shape"], constants: Int64[Tensor, "constants *shape"]
    ) -> Int64[Tensor, "k *shape"]:
        return ids.unsqueeze(0)
