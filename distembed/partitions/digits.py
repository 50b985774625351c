r"""Digits of ids in a mixed radix: the arithmetic that quotient-remainder and mixed radix share.

With radices ``m_1, ..., m_k`` and ``M_j = m_1 * ... * m_{j-1}``, an id is ``x = sum_j d_j * M_j``, where
``d_j = (x \ M_j) mod m_j`` (Shi et al., KDD 2020, section 3.1, example 3, "generalized quotient-remainder"). The digits
tell any two ids below ``m_1 * ... * m_k`` apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distembed.base.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def to_digits(ids: Tensor, lower_moduli: Sequence[int] | Tensor) -> Tensor:
    r"""Returns the k digits of ids as int64 of shape ``[k, *ids.shape]``.

    The last digit is all that is left, ``x \ M_k``.

    Args:
        ids: Tensor of int64 of any shape.
        lower_moduli: ``m_1, ..., m_{k-1}``, as integers or as a tensor whose entries broadcast against ``ids``.
    """
    digits = []
    for modulus in lower_moduli:
        # one division, then a multiplication: an int64 division costs as much as all else here together
        quotient = torch.div(ids, modulus, rounding_mode="floor")
        digits.append(ids - quotient * modulus)
        ids = quotient
    return torch.stack([*digits, ids])


def from_digits(digits: Tensor, lower_moduli: Sequence[int]) -> Tensor:
    """Returns the ids with these digits, ``[k, *shape]`` to ``[*shape]``; a sum past int64 wraps around."""
    ids = digits[-1]
    for digit, modulus in zip(reversed(digits[:-1].unbind()), reversed(lower_moduli), strict=True):
        ids = ids * modulus + digit
    return ids


def colliding_digits(num_embeddings: int, moduli: Sequence[int]) -> tuple[int, int] | None:
    """Returns two ids below ``num_embeddings`` with the same digits, or None where all ids differ.

    They are 0 and the product of the moduli, where that is an id.
    """
    product = math.prod(moduli)
    return (0, product) if product < num_embeddings else None
