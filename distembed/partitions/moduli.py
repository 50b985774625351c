"""Moduli for n ids: moduli with the smallest sum, or given ones, which are checked.

The sum of the moduli is the number of rows of the tables, so the smallest sum is the smallest memory. All arithmetic is
on Python's integers, which do not overflow.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar

import pydantic.dataclasses
from pydantic import Field, PositiveInt

from distembed.base.errors import UserError
from distembed.base.names import STRICT
from distembed.partitions.base import require_positive
from distembed.partitions.settings import SchemeSettings

MAX_NUM_PARTITIONS = 63
"""The largest number of partitions: 2^63 is a product of 63 twos, so that one more would have a single row."""

_MOST_COPRIMES = 16
"""The 16 smallest primes multiply to more than 2^63, so that a smallest sum never has more moduli above 1."""


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class ModuliSettings(SchemeSettings):
    """The settings of ``mixed_radix`` and ``chinese_remainder``."""

    alternatives: ClassVar[tuple[tuple[str, str], ...]] = (("num_partitions", "moduli"),)
    # the number of partitions, whose moduli are then computed
    num_partitions: Annotated[int, Field(ge=2)] | None = None
    # the moduli themselves, in place of ``num_partitions``
    moduli: Annotated[list[PositiveInt], Field(min_length=1)] | None = None


def balanced_moduli(num_embeddings: int, num_partitions: int) -> tuple[int, ...]:
    """Returns the k moduli whose product reaches n with the smallest sum, largest first.

    Among k integers with a given sum, the product is largest where no two differ by more than 1. So the moduli are a
    and a+1 with ``a = floor(n^(1/k))``, and as few a+1 as reach n.
    """
    root = _integer_root(num_embeddings, num_partitions)
    raised = next(
        r for r in range(num_partitions + 1) if root ** (num_partitions - r) * (root + 1) ** r >= num_embeddings
    )
    return (root + 1,) * raised + (root,) * (num_partitions - raised)


@functools.lru_cache(maxsize=256)
def coprime_moduli(num_embeddings: int, num_partitions: int) -> tuple[int, ...]:
    """Returns the k pairwise coprime moduli whose product reaches n with the smallest sum, largest first.

    Branch and bound searches each sum completely, from the sum of :func:`balanced_moduli` upwards. Moduli of 1 fill up
    where k is large for n. The search takes milliseconds up to k = 10, and a few seconds at worst from k = 16 on.
    """
    searched = min(num_partitions, _MOST_COPRIMES)
    for total in itertools.count(sum(balanced_moduli(num_embeddings, searched))):
        moduli = _coprimes_with_sum(total, searched, num_embeddings, ())
        if moduli is not None:
            return tuple(reversed(moduli)) + (1,) * (num_partitions - searched)
    raise AssertionError("large enough sums hold coprime moduli")


def _coprimes_with_sum(total: int, count: int, product: int, chosen: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns ``chosen`` and ``count`` more moduli, ascending, all coprime; None where there are none.

    The further moduli sum to ``total``, and their product is at least ``product``.
    """
    if count == 1:
        return (*chosen, total) if total >= product and _is_coprime(total, chosen) else None
    # the smallest of the remaining moduli is at most their mean; the further below, the smaller the largest product:
    # once the rest cannot reach `needed`, smaller moduli cannot either
    for modulus in range(total // count, max(chosen, default=1) - 1, -1):
        least_product = -(-product // modulus)
        if _largest_product(total - modulus, count - 1) < least_product:
            return None
        if _is_coprime(modulus, chosen):
            moduli = _coprimes_with_sum(total - modulus, count - 1, least_product, (*chosen, modulus))
            if moduli is not None:
                return moduli
    return None


def _largest_product(total: int, count: int) -> int:
    """Returns the largest product of ``count`` integers that sum to ``total``: no two of them differ by more than 1."""
    smaller, num_larger = divmod(total, count)
    return (smaller + 1) ** num_larger * smaller ** (count - num_larger)


def _is_coprime(modulus: int, others: Sequence[int]) -> bool:
    return all(math.gcd(modulus, other) == 1 for other in others)


def _integer_root(number: int, degree: int) -> int:
    """Returns ``floor(number^(1/degree))``, by bisection."""
    low, high = 1, 1 << -(-number.bit_length() // degree)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**degree <= number else (low, middle - 1)
    return low


def choose_moduli(
    scheme: str,
    num_embeddings: int,
    num_partitions: object,
    moduli: object,
    smallest: Callable[[int, int], tuple[int, ...]],
) -> tuple[int, ...]:
    """Returns the given moduli, checked, or moduli for a number of partitions, 2 unless given.

    Args:
        scheme: Name of the scheme, for errors.
        num_embeddings: The number of ids.
        num_partitions: The number of partitions, or None.
        moduli: The moduli, or None.
        smallest: Computes the moduli from the number of ids and of partitions, if none are given.

    Raises:
        UserError: A value has a wrong type or range, or ``num_partitions`` is not the number of moduli. That their
            product reaches the number of ids is left to the scheme.
    """
    if num_partitions is not None:
        remedy = f"{scheme} takes 2 to {MAX_NUM_PARTITIONS} partitions."
        num_partitions = require_positive("num_partitions", num_partitions, remedy)
        if not 2 <= num_partitions <= MAX_NUM_PARTITIONS:
            raise UserError(f"num_partitions is {num_partitions}. {remedy}")
    if moduli is None:
        return smallest(num_embeddings, num_partitions or 2)
    if isinstance(moduli, str) or not isinstance(moduli, Sequence):
        raise UserError(f"moduli is {moduli!r}; {scheme} takes a list of integers, such as [1000, 1001].")
    numbers = tuple(require_positive(f"moduli[{i}]", m, "It is a number of rows.") for i, m in enumerate(moduli))
    if not 2 <= len(numbers) <= MAX_NUM_PARTITIONS:
        raise UserError(f"moduli holds {len(numbers)} numbers; {scheme} takes 2 to {MAX_NUM_PARTITIONS}.")
    if num_partitions is not None and num_partitions != len(numbers):
        raise UserError(
            f"{scheme} was given num_partitions={num_partitions} and {len(numbers)} moduli, {list(numbers)}; "
            "give one of the two, or as many moduli as partitions."
        )
    return numbers


def first_shared_factor(moduli: Sequence[int]) -> tuple[int, int, int] | None:
    """Returns the first two moduli that are not coprime and their greatest common divisor, or None."""
    for first, second in itertools.combinations(moduli, 2):
        if math.gcd(first, second) > 1:
            return first, second, math.gcd(first, second)
    return None


def suggest_moduli(moduli: Sequence[int], num_embeddings: int, coprime: bool) -> tuple[int, ...]:
    """Returns moduli near the given ones that are valid for n ids, as an error's remedy.

    First each modulus becomes coprime to the ones before it, if ``coprime``. If their product is still below n, one
    modulus is increased until it reaches n: the modulus whose increase adds the fewest rows.
    """
    suggested: list[int] = []
    for modulus in moduli:
        suggested.append(_nearest_coprime(modulus, suggested) if coprime else modulus)
    product = math.prod(suggested)
    if product >= num_embeddings:
        return tuple(suggested)
    candidates = []
    for j, modulus in enumerate(suggested):
        before, after = suggested[:j], suggested[j + 1 :]
        least = -(-num_embeddings * modulus // product)
        increased = _next_coprime(least, before + after) if coprime else least
        candidates.append((*before, increased, *after))
    return min(candidates, key=sum)


def _nearest_coprime(modulus: int, others: Sequence[int]) -> int:
    """Returns the positive integer nearest to a modulus that is coprime to the others."""
    return next(
        candidate
        for distance in itertools.count()
        for candidate in (modulus + distance, modulus - distance)
        if candidate >= 1 and _is_coprime(candidate, others)
    )


def _next_coprime(modulus: int, others: Sequence[int]) -> int:
    """Returns the smallest integer of at least ``modulus`` that is coprime to the others."""
    return next(candidate for candidate in itertools.count(modulus) if _is_coprime(candidate, others))
