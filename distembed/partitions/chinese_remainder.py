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
from distembed.partitions.base import MAX_NUM_EMBEDDINGS
from distembed.partitions.digits import RemainderPartition, from_digits
from distembed.partitions.moduli import (
    ModuliSettings,
    choose_moduli,
    coprime_moduli,
    first_shared_factor,
    suggest_moduli,
)

if TYPE_CHECKING:
    from torch import Tensor


class ChineseRemainder(RemainderPartition):
    """``p_j(x) = x mod m_j`` with pairwise coprime ``m_1, ..., m_k``.

    Args:
        num_embeddings: The number of ids, n.
        num_partitions: The number of partitions, k, whose moduli are the pairwise coprime ones with a product of at
            least n and the smallest sum; 2 unless it or ``moduli`` is given.
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
        self.num_rows = choose_moduli(self.name, self.num_embeddings, num_partitions, moduli, coprime_moduli)
        self._require_coprime_and_complementary()

    @property
    def description(self) -> str:
        return ", ".join(f"p_{j}(x) = x mod {modulus}" for j, modulus in enumerate(self.num_rows, start=1))

    def grown_settings(self, num_embeddings: int) -> dict[str, Any]:
        """Returns the moduli; raises a :class:`UserError` where their product is below the number of ids."""
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
        # Garner: with x = d_1 + d_2 m_1 + d_3 m_1 m_2 + ..., all terms after d_j vanish modulo m_j, so that
        #   d_j = (...((x_j - d_1) / m_1 - d_2) / m_2 - ...) mod m_j      where x_j is the given row, x mod m_j
        # A division by m_i modulo m_j is a multiplication by the inverse of m_i, which coprime moduli have.
        digits: list[Tensor] = []
        for j, modulus in enumerate(self.num_rows):
            digit = rows[j]
            for lower, lower_modulus in zip(digits, self.num_rows, strict=False):
                digit = _multiply((digit - lower) % modulus, pow(lower_modulus, -1, modulus), modulus)
            digits.append(digit)
        return from_digits(torch.stack(digits), self.num_rows[:-1])

    def _require_coprime_and_complementary(self) -> None:
        """Refuses moduli that share a factor, even if all ids differ: Garner's inverse needs coprime moduli."""
        shared, pair = first_shared_factor(self.num_rows), self.colliding_ids()
        if shared is None and pair is None:
            return
        fault = f"{self.name}: moduli {list(self.num_rows)}"
        if shared is not None:
            fault += f" are not pairwise coprime: {shared[0]} and {shared[1]} share the factor {shared[2]}"
        else:
            fault += f" have the product {math.prod(self.num_rows)}, below num_embeddings={self.num_embeddings}"
        if pair is not None:
            fault += f", so ids {pair[0]} and {pair[1]} have the same rows"
        remedy = list(suggest_moduli(self.num_rows, self.num_embeddings, coprime=True))
        raise UserError(f"{fault}. The scheme takes pairwise coprime moduli: {remedy} do.")


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
    room = modulus - right  # left + right >= modulus exactly where left >= room; the chosen branch cannot overflow
    return torch.where(left >= room, left - room, left + right)
