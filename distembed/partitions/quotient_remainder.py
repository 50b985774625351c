"""Quotient-remainder: two complementary partitions (Shi et al., KDD 2020, section 2, algorithm 2).

An id is split as ``x = q * m + r``; ``r`` picks a row of a table with m rows and ``q`` a row of a table with c rows.
Trade-off: m + c rows in place of n, least near ``m = c = sqrt(n)``; every id keeps an embedding of its own, at the
price of a second lookup and of ids that share half of their parameters.
"""

import math
from typing import Any, Self

from distembed.base.errors import UserError
from distembed.partitions.base import require_positive
from distembed.partitions.digits import DigitPartition
from distembed.partitions.remainder import BucketSettings, rows_for_collisions

_DEFAULT_COLLISIONS = 4


class QuotientRemainder(DigitPartition):
    r"""``p_1(x) = x mod m``, ``p_2(x) = x \ m``.

    Args:
        num_embeddings: The number of ids, n.
        collisions: The number c of the paper's experiments: ``m = ceil(n / c)`` remainder rows and c quotient rows.
        num_buckets: The number m of remainder rows; there are ``ceil(n / m)`` quotient rows.

    With neither, ``m = ceil(sqrt(n))``, which needs the fewest rows.

    Raises:
        UserError: Both are given, or one is no positive integer.
    """

    name = "quotient_remainder"
    settings = BucketSettings

    def __init__(self, num_embeddings: int, collisions: int | None = None, num_buckets: int | None = None) -> None:
        super().__init__(num_embeddings)
        if collisions is not None and num_buckets is not None:
            raise UserError(
                f"quotient_remainder was given collisions={collisions} and num_buckets={num_buckets}; "
                "give one of the two."
            )
        n = self.num_embeddings
        if collisions is not None:
            quotients = require_positive("collisions", collisions, "1 keeps every id.")
            self.modulus = rows_for_collisions(n, quotients)
        else:
            balanced = math.isqrt(n - 1) + 1
            self.modulus = require_positive(
                "num_buckets", balanced if num_buckets is None else num_buckets, "It is the number of remainder rows."
            )
            quotients = rows_for_collisions(n, self.modulus)
        self.num_rows = (self.modulus, quotients)

    @classmethod
    def from_settings(cls, num_embeddings: int, settings: Any) -> Self:
        """Builds the scheme as a table's settings say, at 4 collisions where they say nothing."""
        if settings.collisions is None and settings.num_buckets is None:
            return cls(num_embeddings, collisions=_DEFAULT_COLLISIONS)
        return super().from_settings(num_embeddings, settings)

    @property
    def description(self) -> str:
        return f"p_1(x) = x mod {self.modulus}, p_2(x) = x \\ {self.modulus}"

    def grown_settings(self, num_embeddings: int) -> dict[str, Any]:
        """Returns the number of remainder rows, which stays: new quotient rows follow the old ones."""
        return {"num_buckets": self.modulus}
