r"""The arithmetic that schemes share: digits of ids in a mixed radix, and remainders of ids.

With radices ``m_1, ..., m_k`` and ``M_j = m_1 * ... * m_{j-1}``, an id is ``x = sum_j d_j * M_j``, where
``d_j = (x \ M_j) mod m_j`` (Shi et al., KDD 2020, section 3.1, example 3, "generalized quotient-remainder"). The digits
tell any two ids below ``m_1 * ... * m_k`` apart.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from jaxtyping import Int64

from distembed.base.lazy import torch
from distembed.partitions.base import Digit, Partition

if TYPE_CHECKING:
    from torch import Tensor


def to_digits(ids: Tensor, lower_moduli: Sequence[int] | Tensor) -> Tensor:
    r"""Returns the k digits of int64 ids ``[k, *ids.shape]``; the last one is the rest, ``x \ M_k``.

    Args:
        ids: Ids of any shape.
        lower_moduli: ``m_1, ..., m_{k-1}``, as integers or as a tensor whose entries broadcast against ``ids``.
    """
    digits = []
    for modulus in lower_moduli:
        # one division, then a multiplication: an int64 division costs as much as all else here together
        quotient = torch.div(ids, modulus, rounding_mode="floor")
        digits.append(ids - quotient * modulus)
        ids = quotient
    return torch.stack([*digits, ids]) if digits else ids.unsqueeze(0)


def from_digits(digits: Tensor, lower_moduli: Sequence[int]) -> Tensor:
    """Returns the ids with these digits, ``[k, *shape]`` to ``[*shape]``; a sum past int64 wraps around."""
    ids = digits[-1]
    for digit, modulus in zip(reversed(digits[:-1].unbind()), reversed(lower_moduli), strict=True):
        ids = ids * modulus + digit
    return ids


def colliding_digits(num_embeddings: int, moduli: Sequence[int]) -> tuple[int, int] | None:
    """Returns two ids with equal digits, 0 and the product of the moduli; None where the product is not below n."""
    product = math.prod(moduli)
    return (0, product) if product < num_embeddings else None


class DigitPartition(Partition):
    r"""Partition j is digit j of the id, ``p_j(x) = (x \ M_j) mod m_j`` with ``m_j = num_rows[j]``."""

    def rows(self, ids: Int64[Tensor, "*shape"]) -> Int64[Tensor, "k *shape"]:
        return to_digits(ids, self.num_rows[:-1])

    def colliding_ids(self) -> tuple[int, int] | None:
        return colliding_digits(self.num_embeddings, self.num_rows)

    def _candidates(self, rows: Int64[Tensor, "k *shape"]) -> Int64[Tensor, "*shape"]:
        return from_digits(rows, self.num_rows[:-1])

    def digits(self) -> tuple[Digit, ...]:
        divisors = list(accumulate(self.num_rows[:-1], operator.mul, initial=1))
        moduli = [*self.num_rows[:-1], None]
        return tuple(Digit(divisor, modulus) for divisor, modulus in zip(divisors, moduli, strict=True))

    @classmethod
    def constants(cls, partitions: Sequence[Partition]) -> Int64[Tensor, "constants tables"]:
        """Returns all moduli of each table but the last."""
        return torch.tensor([p.num_rows[:-1] for p in partitions], dtype=torch.int64).t()

    @classmethod
    def rows_by_constants(
        cls, ids: Int64[Tensor, "*shape"], constants: Int64[Tensor, "constants *shape"]
    ) -> Int64[Tensor, "k *shape"]:
        return to_digits(ids, constants)


class RemainderPartition(Partition):
    """Partition j is a remainder of the id, ``p_j(x) = x mod m_j`` with ``m_j = num_rows[j]``."""

    def rows(self, ids: Int64[Tensor, "*shape"]) -> Int64[Tensor, "k *shape"]:
        return torch.stack([ids % modulus for modulus in self.num_rows])

    def colliding_ids(self) -> tuple[int, int] | None:
        repeats_after = math.lcm(*self.num_rows)
        return (0, repeats_after) if repeats_after < self.num_embeddings else None

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
