r"""Mixed radix: k complementary partitions, the "generalized quotient-remainder" of Shi et al., KDD 2020, section 3.1.

Each partition looks at one digit of the id: ``p_1(x) = x mod m_1``, ``p_j(x) = (x \ M_j) mod m_j`` with
``M_j = m_1 * ... * m_{j-1}``. Trade-off: O(k n^(1/k)) rows, the fewest that k complementary partitions can have; the
more partitions, the more ids share each row, and the more lookups an id costs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from jaxtyping import Int64

from distembed.base.errors import UserError
from distembed.base.lazy import torch
from distembed.partitions.base import Digit, Partition
from distembed.partitions.digits import colliding_digits, from_digits, to_digits
from distembed.partitions.moduli import (
    DEFAULT_NUM_PARTITIONS,
    balanced_moduli,
    require_moduli,
    require_num_partitions,
    suggest_moduli,
)
from distembed.partitions.settings import ModuliSettings

if TYPE_CHECKING:
    from torch import Tensor


class MixedRadix(Partition):
    r"""``p_1(x) = x mod m_1``, ``p_j(x) = (x \ M_j) mod m_j``.

    Args:
        num_embeddings: The number of ids, n.
        num_partitions: The number of partitions, k; 2 where ``moduli`` are not given either. The moduli are then those
            of the smallest sum.
        moduli: ``m_1, ..., m_k``, whose product must reach n.

    Partition j never has more than ``ceil(n / M_j)`` rows, also where its modulus is larger: no id has the others.

    Raises:
        UserError: The product of the moduli is below n. The error names two ids with the same rows, and moduli that are
            valid.
    """

    name = "mixed_radix"
    settings = ModuliSettings

    def __init__(
        self, num_embeddings: int, num_partitions: int | None = None, moduli: Sequence[int] | None = None
    ) -> None:
        super().__init__(num_embeddings)
        n = self.num_embeddings
        if num_partitions is not None:
            num_partitions = require_num_partitions(self.name, num_partitions)
        if moduli is None:
            given = balanced_moduli(n, num_partitions or DEFAULT_NUM_PARTITIONS)
        else:
            given = require_moduli(self.name, moduli, num_partitions)
            _require_complementary(n, given)
        self.moduli = given
        below = [math.prod(given[:j]) for j in range(len(given))]
        self.num_rows = tuple(min(m, -(-n // lower)) for m, lower in zip(given, below, strict=True))

    @property
    def description(self) -> str:
        first, *others = self.num_rows
        equations = [f"p_1(x) = x mod {first}"]
        for j, modulus in enumerate(others, start=2):
            equations.append(f"p_{j}(x) = (x \\ {math.prod(self.num_rows[: j - 1])}) mod {modulus}")
        return ", ".join(equations)

    def rows(self, ids: Int64[Tensor, "*shape"]) -> Int64[Tensor, "k *shape"]:
        return to_digits(ids, self.num_rows[:-1])

    def colliding_ids(self) -> tuple[int, int] | None:
        return colliding_digits(self.num_embeddings, self.num_rows)

    def grown_settings(self, num_embeddings: int) -> dict[str, Any]:
        """Returns the moduli, of which only the last is raised, and only where their product would be too small."""
        *lower, last = self.moduli
        return {"moduli": [*lower, max(last, -(-num_embeddings // math.prod(lower)))]}

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


def _require_complementary(num_embeddings: int, moduli: tuple[int, ...]) -> None:
    """Raises a :class:`UserError` where the product of the moduli is below the number of ids."""
    pair = colliding_digits(num_embeddings, moduli)
    if pair is not None:
        raise UserError(
            f"mixed_radix: moduli {list(moduli)} have the product {math.prod(moduli)}, below "
            f"num_embeddings={num_embeddings}, so ids {pair[0]} and {pair[1]} have the same rows. Raise them: "
            f"{list(suggest_moduli(moduli, num_embeddings, coprime=False))} do."
        )
