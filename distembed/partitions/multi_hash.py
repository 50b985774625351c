"""Multi-hash: k independent hashes of an id, each to rows of its own, without a vocabulary.

Sources: the k component vectors of hash embeddings (Svenstrup, Hansen, Winther, "Hash Embeddings for Efficient Word
Representations", NeurIPS 2017, section 3), double hashing (Zhang et al., "Model Size Reduction Using Frequency Based
Double Hashing for Recommender Systems", RecSys 2020), and several lookups of one shared table (Coleman et al., "Unified
Embedding", NeurIPS 2023). Svenstrup's pool of B vectors is divided here: hash j reads rows of weight j alone.

Trade-off: any 64-bit value is an id, and rows are spread evenly however ids are numbered; but distinct ids may agree in
all k rows. Of n ids, about ``n (n-1) / (2 m_1 ... m_k)`` pairs do, where quotient and remainder tell all ids apart.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import pydantic.dataclasses
from jaxtyping import Int64

from distembed.base.errors import UserError
from distembed.base.lazy import torch
from distembed.base.names import STRICT
from distembed.partitions.base import Digit, Partition, require_positive
from distembed.partitions.hashing import KeyedHash, rows_by_keys
from distembed.partitions.moduli import ModuliSettings, choose_moduli
from distembed.partitions.remainder import BucketSettings, rows_for_collisions

if TYPE_CHECKING:
    from torch import Tensor

_MOST_EXAMINED = 2**14
"""The number of ids up to which all rows are compared; a scheme for more ids is never called complementary."""
_MAX_CONSTANT_MODULUS = 2**31
"""The largest modulus for which :func:`rows_by_keys` and the fused lookup are exact."""


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class MultiHashSettings(ModuliSettings, BucketSettings):
    """The settings of ``multi_hash``."""

    alternatives = (("moduli", "collisions"), ("moduli", "num_buckets"))
    # the text from which the seeds of the hashes are made; the table's name unless given
    hash_key: str | None = None


class MultiHash(Partition):
    """``p_j(x) = h_j(x)`` in ``[0, m_j)``, where h_j is a :class:`KeyedHash` with a seed of its own.

    Args:
        num_embeddings: The number of ids, n, up to 2^63-1 for raw values; it decides no row where ``moduli`` or
            ``num_buckets`` are given.
        collisions: The mean number c of ids that share a row of one hash, so that each hash has ``m = ceil(n / c)``
            rows; 4 unless it, ``num_buckets`` or ``moduli`` is given.
        num_buckets: The number m of rows of each hash.
        num_partitions: The number of hashes, k; 2 unless it or ``moduli`` is given.
        moduli: ``m_1, ..., m_k``, the number of rows of each hash.
        hash_key: The text from which the seeds are made, together with j; tables of a config take their names.

    Raises:
        UserError: Several of ``collisions``, ``num_buckets`` and ``moduli`` are given, or a number is not allowed.
    """

    name = "multi_hash"
    settings = MultiHashSettings

    def __init__(
        self,
        num_embeddings: int,
        collisions: int | None = None,
        num_buckets: int | None = None,
        num_partitions: int | None = None,
        moduli: Sequence[int] | None = None,
        hash_key: str | None = None,
    ) -> None:
        super().__init__(num_embeddings)
        sizes = {"collisions": collisions, "num_buckets": num_buckets, "moduli": moduli}
        given = [f"{name}={value}" for name, value in sizes.items() if value is not None]
        if len(given) > 1:
            raise UserError(f"multi_hash was given {' and '.join(given)}; give one of them.")
        if num_buckets is None:
            collisions = require_positive("collisions", 4 if collisions is None else collisions, "1 gives n rows.")
            num_buckets = rows_for_collisions(self.num_embeddings, collisions)
        num_buckets = require_positive("num_buckets", num_buckets, "It is the number of rows of each hash.")
        self.num_rows = choose_moduli(
            self.name, self.num_embeddings, num_partitions, moduli, lambda _, count: (num_buckets,) * count
        )
        self.hash_key = hash_key
        self.hashes = tuple(KeyedHash(_seed(hash_key or "", j)) for j in range(len(self.num_rows)))

    def _identity(self) -> dict[str, Any]:
        return {"num_embeddings": self.num_embeddings, "num_rows": self.num_rows, "hashes": self.hashes}

    def for_table(self, name: str) -> Self:
        """Returns the scheme with seeds made from the table's name, unless it has a ``hash_key``."""
        if self.hash_key is not None:
            return self
        return type(self)(self.num_embeddings, moduli=self.num_rows, hash_key=name)

    @property
    def expected_colliding_pairs(self) -> float:
        """The expected number of pairs of ids with equal rows: ``n (n-1) / 2`` pairs at odds of 1 in all tuples."""
        n = self.num_embeddings
        return n * (n - 1) / (2 * math.prod(self.num_rows))

    @property
    def description(self) -> str:
        equations = ", ".join(f"p_{j}(x) = h_{j}(x) of {bound} rows" for j, bound in enumerate(self.num_rows, start=1))
        equations += f", keyed by {self.hash_key or ''!r}"
        if self.is_complementary():
            return equations
        return f"{equations}, about {self.expected_colliding_pairs:.3g} pairs of ids share all rows (not complementary)"

    def rows(self, ids: Int64[Tensor, "*shape"]) -> Int64[Tensor, "k *shape"]:
        return torch.stack(
            [keyed.ids_of_int64(ids, bound) for keyed, bound in zip(self.hashes, self.num_rows, strict=True)]
        )

    @classmethod
    def constants(cls, partitions: Sequence[Partition]) -> Int64[Tensor, "constants tables"] | None:
        """Returns both keys and the modulus of each hash, hash by hash; None where a modulus is above 2^31."""
        columns = []
        for partition in partitions:
            assert isinstance(partition, MultiHash)
            if max(partition.num_rows) > _MAX_CONSTANT_MODULUS:
                return None
            hashes = zip(partition.hashes, partition.num_rows, strict=True)
            columns.append([number for keyed, bound in hashes for number in (*keyed.keys, bound)])
        return torch.tensor(columns, dtype=torch.int64).t()

    @classmethod
    def rows_by_constants(
        cls, ids: Int64[Tensor, "*shape"], constants: Int64[Tensor, "constants *shape"]
    ) -> Int64[Tensor, "k *shape"]:
        before, after, moduli = constants.unflatten(0, (-1, 3)).unbind(1)
        return rows_by_keys(ids, before, after, moduli)

    def is_complementary(self) -> bool:
        """Returns whether all ids were compared, up to 16,384, and differ; False for more ids, which are not proved."""
        return self.num_embeddings <= _MOST_EXAMINED and self.colliding_ids() is None

    def colliding_ids(self) -> tuple[int, int] | None:
        """Returns two ids with equal rows among the first 16,384; None where these all differ."""
        return self._examined[1]

    @property
    def ids_per_row(self) -> float:
        """The number of ids over that of tuples that occur, which is counted up to 16,384 ids and expected beyond."""
        n = self.num_embeddings
        if n <= _MOST_EXAMINED:
            return n / self._examined[0]
        # of M equally likely tuples, M (1 - (1 - 1/M)^n) are expected to occur, which tends to M (1 - exp(-n/M))
        load = n / math.prod(self.num_rows)
        return load / -math.expm1(-load) if load > 0 else 1.0

    def digits(self) -> tuple[Digit, ...] | None:
        """Returns the modulus and the keys of each hash; None where a modulus is above 2^31."""
        if max(self.num_rows) > _MAX_CONSTANT_MODULUS:
            return None
        hashes = zip(self.hashes, self.num_rows, strict=True)
        return tuple(Digit(1, bound, keyed.keys) for keyed, bound in hashes)

    def grown_settings(self, num_embeddings: int) -> dict[str, Any]:
        """Returns the numbers of rows and the key, which stay: more ids share the rows."""
        return {"moduli": list(self.num_rows), "hash_key": self.hash_key}

    def _candidates(self, rows: Int64[Tensor, "k *shape"]) -> Int64[Tensor, "*shape"]:
        # asked only where all ids were compared: numbers the distinct tuples of all ids and of the wanted ones together
        wanted = rows.reshape(len(self.num_rows), -1)
        ids = torch.arange(self.num_embeddings, device=rows.device)
        numbers = _number_tuples(torch.cat([self.rows(ids), wanted], dim=1))
        id_of_number = torch.full_like(numbers, -1)
        id_of_number[numbers[: len(ids)]] = ids
        return id_of_number[numbers[len(ids) :]].view(rows.shape[1:])

    @cached_property
    def _examined(self) -> tuple[int, tuple[int, int] | None]:
        """The number of distinct tuples of the first ids, at most 16,384, and two of the ids with equal rows."""
        ids = torch.arange(min(self.num_embeddings, _MOST_EXAMINED))
        numbers = _number_tuples(self.rows(ids))
        counts = numbers.bincount()
        if len(counts) == len(ids):
            return len(counts), None
        first, second, *_ = (numbers == int(counts.argmax())).nonzero().flatten().tolist()
        return len(counts), (first, second)


def _number_tuples(rows: Int64[Tensor, "k ids"]) -> Int64[Tensor, " ids"]:
    """Returns a number for each id, without gaps, that two ids share exactly where all their rows are equal."""
    numbers = torch.zeros_like(rows[0])
    for row in rows:  # both numbers are below the number of ids, so that no key overflows
        distinct, place = row.unique(return_inverse=True)
        numbers = (numbers * len(distinct) + place).unique(return_inverse=True)[1]
    return numbers


def _seed(key: str, position: int) -> int:
    """Returns the seed of hash ``position``: 63 bits of a hash of both, so that tables and positions are unrelated."""
    digest = hashlib.blake2b(f"{key}/{position}".encode(), digest_size=8, person=b"multi_hash").digest()
    return int.from_bytes(digest, "little") >> 1
