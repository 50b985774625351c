"""Chinese remainder: k complementary partitions by pairwise coprime moduli (Shi et al., KDD 2020, section 3.1).

``p_j(x) = x mod m_j``; by the Chinese remainder theorem two ids with the same remainders differ by a multiple of the
product of the moduli, which reaches n. Trade-off: as few rows as mixed radix, but for a handful. Every partition mixes
ids from the whole range, where the last digits of mixed radix give neighbouring ids the same rows; finding the id of
given rows takes more arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxtyping import Int64

from distembed.base.errors import UserError
from distembed.base.lazy import torch
from distembed.partitions.base import MAX_NUM_EMBEDDINGS, Digit, Partition
from distembed.partitions.digits import from_digits
from distembed.partitions.moduli import (
    DEFAULT_NUM_PARTITIONS,
    coprime_moduli,
    first_shared_factor,
    require_moduli,
    require_num_partitions,
    suggest_moduli,
)
from distembed.partitions.settings import ModuliSettings

if TYPE_CHECKING:
    from torch import Tensor


class ChineseRemainder(Partition):
    """``p_j(x) = x mod m_j`` with pairwise coprime ``m_1, ..., m_k``.

    Args:
        num_embeddings: The number of ids, n.
        num_partitions: The number of partitions, k; 2 where ``moduli`` are not given either. The moduli are then the
            pairwise coprime ones near n^(1/k) whose product reaches n with the smallest sum.
        moduli: ``m_1, ..., m_k``, pairwise coprime, whose product must reach n.

    Raises:
        UserError: Two moduli share a factor, or their product is below n. The error names two ids with the same rows
            where there are some, and moduli that are valid.
    """

    name = "chinese_remainder"
    settings = ModuliSettings

    def __init__(
        self, num_embeddings: int, num_partitions: int | None = None, moduli: Sequence[int] | None = None
    ) -> None:
        super().__init__(num_embeddings)
        if num_partitions is not None:
            num_partitions = require_num_partitions(self.name, num_partitions)
        if moduli is None:
            self.num_rows = coprime_moduli(self.num_embeddings, num_partitions or DEFAULT_NUM_PARTITIONS)
        else:
            self.num_rows = require_moduli(self.name, moduli, num_partitions)
            self._require_coprime_and_complementary()

    @property
    def description(self) -> str:
        return ", ".join(f"p_{j}(x) = x mod {modulus}" for j, modulus in enumerate(self.num_rows, start=1))

    def rows(self, ids: Int64[Tensor, "*shape"]) -> Int64[Tensor, "k *shape"]:
        return torch.stack([ids % modulus for modulus in self.num_rows])

    def colliding_ids(self) -> tuple[int, int] | None:
        repeats_after = math.lcm(*self.num_rows)
        return (0, repeats_after) if repeats_after < self.num_embeddings else None

    def grown_settings(self, num_embeddings: int) -> dict[str, Any]:
        """Returns the moduli, as they are as long as their product reaches the number of ids.

        Raises:
            UserError: It does not; any other moduli would give known ids other rows.
        """
        most = math.prod(self.num_rows)
        if num_embeddings > most:
            with_room = list(suggest_moduli(self.num_rows, num_embeddings, coprime=True))
            raise UserError(
                f"{self.name} with moduli {list(self.num_rows)} has at most {most} ids and cannot grow to "
                f"{num_embeddings}: with other moduli known ids would have other rows. Train anew with moduli that "
                f"leave room, such as {with_room}, or with quotient_remainder or mixed_radix, which grow without end."
            )
        return {"moduli": list(self.num_rows)}

    def _candidates(self, rows: Int64[Tensor, "k *shape"]) -> Int64[Tensor, "*shape"]:
        # Garner: the digits of the id in the mixed radix of the moduli, each from those before it
        digits: list[Tensor] = []
        for j, modulus in enumerate(self.num_rows):
            digit = rows[j]
            for lower, lower_modulus in zip(digits, self.num_rows, strict=False):
                digit = _multiply((digit - lower) % modulus, pow(lower_modulus, -1, modulus), modulus)
            digits.append(digit)
        return from_digits(torch.stack(digits), self.num_rows[:-1])

    def digits(self) -> tuple[Digit, ...]:
        return tuple(Digit(1, modulus) for modulus in self.num_rows)

    @classmethod
    def constants(cls, partitions: Sequence[Partition]) -> Int64[Tensor, "constants tables"]:
        """Returns the moduli of each table."""
        return torch.tensor([p.num_rows for p in partitions]).t()

    @classmethod
    def rows_by_constants(
        cls, ids: Int64[Tensor, "*shape"], constants: Int64[Tensor, "constants *shape"]
    ) -> Int64[Tensor, "k *shape"]:
        return ids % constants

    def _require_coprime_and_complementary(self) -> None:
        shared, pair = first_shared_factor(self.num_rows), self.colliding_ids()
        if shared is None and pair is None:
            return
        found = f"{self.name}: moduli {list(self.num_rows)}"
        if shared is not None:
            found += f" are not pairwise coprime: {shared[0]} and {shared[1]} share the factor {shared[2]}"
        else:
            found += f" have the product {math.prod(self.num_rows)}, below num_embeddings={self.num_embeddings}"
        if pair is not None:
            found += f", so ids {pair[0]} and {pair[1]} have the same rows"
        remedy = list(suggest_moduli(self.num_rows, self.num_embeddings, coprime=True))
        raise UserError(f"{found}. The scheme takes pairwise coprime moduli: {remedy} do.")


def _multiply(values: Tensor, factor: int, modulus: int) -> Tensor:
    """Returns ``values * factor mod modulus`` for values in ``[0, modulus)``, exactly also where int64 overflows."""
    if (modulus - 1) * factor <= MAX_NUM_EMBEDDINGS:
        return values * factor % modulus
    product = torch.zeros_like(values)
    for bit in bin(factor)[2:]:  # Horner's scheme in base 2
        product = _add(product, product, modulus)
        if bit == "1":
            product = _add(product, values, modulus)
    return product


def _add(left: Tensor, right: Tensor, modulus: int) -> Tensor:
    """Returns ``left + right mod modulus`` for values in ``[0, modulus)``, exactly also where int64 overflows."""
    room = modulus - right
    return torch.where(left >= room, left - room, left + right)
