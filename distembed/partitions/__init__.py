r"""Partitions: total functions from an id to a row, from which compressed tables are built.

A *partition* of the id set ``S = {0, ..., n-1}`` maps every id to one row of a small table (Shi et al., "Compositional
Embeddings Using Complementary Partitions", KDD 2020, section 3). A *scheme* is a family of k partitions of the same
set. It is *complementary* when any two distinct ids differ in at least one of the k rows (definition 1), so that
distinct ids can keep distinct embeddings (theorem 1).

==================== ================================ ========================= =============
name                 p_1(x), p_2(x), ...              rows for n ids            complementary
==================== ================================ ========================= =============
naive                x                                n                         yes
remainder            x mod m                          m = ceil(n/c)             only if m >= n
quotient_remainder   x mod m, x \ m                   m + c, or m + ceil(n/m)   yes
mixed_radix          x mod m_1, (x \ M_j) mod m_j     O(k n^(1/k)), the fewest  yes
chinese_remainder    x mod m_j, coprime m_j           O(k n^(1/k))              yes
explicit             a_j[x]                           as given                  if they are
multi_hash           h_j(x), k independent hashes     k m, m = ceil(n/c)        not proved
clustered            a_j[x], then h_j(x), half each   k m, m = ceil(n/c)        not proved
truncated            min(x, b_j)                      sum of b_j + 1            only if a b_j >= n-1
==================== ================================ ========================= =============

``M_j = m_1 * ... * m_{j-1}``. Each scheme maps ids to rows, and rows back to the id where it is complementary, for any
n up to 2^63-1, without a float. Complementarity is decided, not assumed: by Python's integers for the arithmetic
schemes, by looking at every id for explicit ones. ``multi_hash`` looks at up to 16,384 ids; for more, it says how many
pairs are expected to collide, ``n (n-1) / (2 m^k)``.

When a vocabulary grows at its end, known ids keep their rows (``Partition.grown``): ``naive`` appends rows and
``quotient_remainder`` quotient rows; ``mixed_radix`` raises its last modulus; ``remainder`` and ``multi_hash`` keep
their rows, which more ids share; ``truncated`` keeps its bounds; ``chinese_remainder`` keeps its moduli while their
product reaches n; ``explicit`` takes longer assignments that begin with the old ones, and ``clustered`` does not grow.

For ids that arrive as strings or as unbounded integers, :func:`hash_strings` and :class:`KeyedHash` come first.

A new scheme is one file, with its settings, and one line in :data:`PARTITIONS`; law tests run over every entry.
"""

from typing import TYPE_CHECKING

from distembed.base.lazy import NameTable, imports_on_demand
from distembed.partitions.settings import SchemeSettings

if TYPE_CHECKING:
    from distembed.partitions.base import Partition
    from distembed.partitions.chinese_remainder import ChineseRemainder
    from distembed.partitions.clustered import Clustered
    from distembed.partitions.explicit import Explicit
    from distembed.partitions.hashing import KeyedHash, hash_strings
    from distembed.partitions.mixed_radix import MixedRadix
    from distembed.partitions.multi_hash import MultiHash
    from distembed.partitions.naive import Naive
    from distembed.partitions.quotient_remainder import QuotientRemainder
    from distembed.partitions.remainder import Remainder
    from distembed.partitions.truncated import Truncated

PARTITIONS: "NameTable[type[Partition]]" = NameTable(
    {
        "naive": "distembed.partitions.naive:Naive",
        "remainder": "distembed.partitions.remainder:Remainder",
        "quotient_remainder": "distembed.partitions.quotient_remainder:QuotientRemainder",
        "mixed_radix": "distembed.partitions.mixed_radix:MixedRadix",
        "chinese_remainder": "distembed.partitions.chinese_remainder:ChineseRemainder",
        "explicit": "distembed.partitions.explicit:Explicit",
        "multi_hash": "distembed.partitions.multi_hash:MultiHash",
        "clustered": "distembed.partitions.clustered:Clustered",
        "truncated": "distembed.partitions.truncated:Truncated",
    }
)
"""The scheme of each name. Each class is built as ``cls(num_embeddings=n, **settings)``."""

__all__ = [
    "PARTITIONS",
    "ChineseRemainder",
    "Clustered",
    "Explicit",
    "KeyedHash",
    "MixedRadix",
    "MultiHash",
    "Naive",
    "Partition",
    "QuotientRemainder",
    "Remainder",
    "SchemeSettings",
    "Truncated",
    "hash_strings",
]
__getattr__ = imports_on_demand(__name__)
