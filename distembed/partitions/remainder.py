"""Remainder: the hashing trick (Weinberger et al., ICML 2009; Shi et al., KDD 2020, algorithm 1).

Trade-off: the smallest and the fastest table, but not complementary: about c ids share each row and cannot be told
apart, however long the training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxtyping import Int64

from distembed.base.errors import UserError
from distembed.base.lazy import torch
from distembed.partitions.base import Digit, Partition, require_positive
from distembed.partitions.settings import BucketSettings

if TYPE_CHECKING:
    from torch import Tensor


def rows_for_collisions(num_embeddings: int, collisions: int) -> int:
    """Returns ``m = ceil(n / c)``, the fewest rows with which at most c ids share one."""
    return -(-num_embeddings // collisions)


class Remainder(Partition):
    """``p_1(x) = x mod m``, which is not complementary unless m reaches n; :attr:`description` says so.

    Args:
        num_embeddings: The number of ids, n.
        collisions: The number c of ids that share a row, so that ``m = ceil(n / c)``; 4 where ``num_buckets`` is not
            given either.
        num_buckets: The number m of rows.

    Raises:
        UserError: Both are given, or one is no positive integer.
    """

    name = "remainder"
    settings = BucketSettings

    def __init__(self, num_embeddings: int, collisions: int | None = None, num_buckets: int | None = None) -> None:
        super().__init__(num_embeddings)
        if collisions is not None and num_buckets is not None:
            raise UserError(
                f"remainder was given collisions={collisions} and num_buckets={num_buckets}; give one of the two."
            )
        if num_buckets is None:
            collisions = require_positive("collisions", 4 if collisions is None else collisions, "1 keeps every id.")
            num_buckets = rows_for_collisions(self.num_embeddings, collisions)
        self.modulus = require_positive("num_buckets", num_buckets, "It is the number of rows.")
        self.num_rows = (self.modulus,)

    @property
    def description(self) -> str:
        shared = "" if self.is_complementary() else f", about {self.ids_per_row:.1f} ids a row (not complementary)"
        return f"p_1(x) = x mod {self.modulus}{shared}"

    def rows(self, ids: Int64[Tensor, "*shape"]) -> Int64[Tensor, "k *shape"]:
        return (ids % self.modulus).unsqueeze(0)

    def colliding_ids(self) -> tuple[int, int] | None:
        return (0, self.modulus) if self.modulus < self.num_embeddings else None

    @property
    def ids_per_row(self) -> float:
        return self.num_embeddings / min(self.modulus, self.num_embeddings)

    def grown_settings(self, num_embeddings: int) -> dict[str, Any]:
        """Returns the number of rows, which stays: more ids share each."""
        return {"num_buckets": self.modulus}

    def _candidates(self, rows: Int64[Tensor, "k *shape"]) -> Int64[Tensor, "*shape"]:
        # asked only where m >= n, and there x mod m is x
        return rows[0]

    def digits(self) -> tuple[Digit, ...]:
        return (Digit(1, self.modulus),)

    @classmethod
    def constants(cls, partitions: Sequence[Partition]) -> Int64[Tensor, "constants tables"]:
        """Returns the modulus of each table."""
        return torch.tensor([[p.num_rows[0] for p in partitions]])

    @classmethod
    def rows_by_constants(
        cls, ids: Int64[Tensor, "*shape"], constants: Int64[Tensor, "constants *shape"]
    ) -> Int64[Tensor, "k *shape"]:
        return ids % constants
