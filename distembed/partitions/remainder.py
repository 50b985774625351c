"""Remainder: the hashing trick (Weinberger et al., ICML 2009; Shi et al., KDD 2020, algorithm 1).

Trade-off: the smallest and the fastest table, but not complementary: about c ids share each row and cannot be told
apart, however long the training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pydantic.dataclasses
from jaxtyping import Int64
from pydantic import PositiveInt

from distembed.base.errors import UserError
from distembed.base.names import STRICT
from distembed.partitions.base import require_positive
from distembed.partitions.digits import RemainderPartition
from distembed.partitions.settings import SchemeSettings

if TYPE_CHECKING:
    from torch import Tensor


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class BucketSettings(SchemeSettings):
    """The settings of ``remainder`` and ``quotient_remainder``."""

    alternatives: ClassVar[tuple[tuple[str, str], ...]] = (("collisions", "num_buckets"),)
    # how many ids share a row of the first partition; 4 unless it or ``num_buckets`` is given
    collisions: PositiveInt | None = None
    num_buckets: PositiveInt | None = None  # the rows of the first partition, in place of ``collisions``


def rows_for_collisions(num_embeddings: int, collisions: int) -> int:
    """Returns ``m = ceil(n / c)``, the fewest rows with which at most c ids share one."""
    return -(-num_embeddings // collisions)


class Remainder(RemainderPartition):
    """``p_1(x) = x mod m``, which is not complementary unless m reaches n; :attr:`description` says so.

    Args:
        num_embeddings: The number of ids, n.
        collisions: The number c of ids that share a row, so that ``m = ceil(n / c)``; 4 unless it or ``num_buckets`` is
            given.
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

    @property
    def ids_per_row(self) -> float:
        return self.num_embeddings / min(self.modulus, self.num_embeddings)

    def grown_settings(self, num_embeddings: int) -> dict[str, Any]:
        """Returns the number of rows, which stays: more ids share each."""
        return {"num_buckets": self.modulus}

    def _candidates(self, rows: Int64[Tensor, "k *shape"]) -> Int64[Tensor, "*shape"]:
        # asked only where m >= n, and there x mod m is x
        return rows[0]
