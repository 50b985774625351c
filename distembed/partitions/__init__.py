r"""Partitions: total functions from an id to a row, the parts of which a compressed table is made.

A *partition* of the id set ``S = {0, ..., n-1}`` maps every id to one row of a small table (Shi et al., "Compositional
Embeddings Using Complementary Partitions", KDD 2020, section 3). A *scheme* is a family of k partitions of the same
set. It is *complementary* when any two distinct ids differ in at least one of the k rows, so that distinct ids can keep
distinct embeddings.

==================== =============================== ==================== =============
name                 p_1(x), p_2(x), ...             rows for n ids       complementary
==================== =============================== ==================== =============
naive                x                               n                    yes
remainder            x mod m                         m = ceil(n/c)        only if m >= n
quotient_remainder   x mod m, x \ m                  m + c                yes
==================== =============================== ==================== =============

A new scheme is one file and one line in :data:`PARTITIONS`; law tests run over every entry.
"""

from distembed.partitions.base import Partition
from distembed.partitions.naive import Naive
from distembed.partitions.quotient_remainder import QuotientRemainder
from distembed.partitions.remainder import Remainder

PARTITIONS: dict[str, type[Partition]] = {
    "naive": Naive,
    "remainder": Remainder,
    "quotient_remainder": QuotientRemainder,
}
"""Scheme by name. Each class is built as ``cls(num_embeddings=n, **settings)``."""

__all__ = ["PARTITIONS", "Naive", "Partition", "QuotientRemainder", "Remainder"]
