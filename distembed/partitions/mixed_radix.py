r"""Mixed radix: k complementary partitions, the "generalized quotient-remainder" of Shi et al., KDD 2020, section 3.1.

Each partition looks at one digit of the id: ``p_1(x) = x mod m_1``, ``p_j(x) = (x \ M_j) mod m_j`` with
``M_j = m_1 * ... * m_{j-1}``. Trade-off: O(k n^(1/k)) rows, the fewest that k complementary partitions can have; the
more partitions, the more ids share each row, and the more lookups an id costs.
"""

import math
from collections.abc import Sequence
from typing import Any

from distembed.base.errors import UserError
from distembed.partitions.digits import DigitPartition, colliding_digits
from distembed.partitions.moduli import ModuliSettings, balanced_moduli, choose_moduli, suggest_moduli


class MixedRadix(DigitPartition):
    r"""``p_1(x) = x mod m_1``, ``p_j(x) = (x \ M_j) mod m_j``.

    Args:
        num_embeddings: The number of ids, n.
        num_partitions: The number of partitions, k, whose moduli have the smallest sum; 2 unless it or ``moduli`` is
            given.
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
        self.moduli = choose_moduli(self.name, n, num_partitions, moduli, balanced_moduli)
        _require_complementary(n, self.moduli)
        below = [math.prod(self.moduli[:j]) for j in range(len(self.moduli))]
        self.num_rows = tuple(min(m, -(-n // lower)) for m, lower in zip(self.moduli, below, strict=True))

    @property
    def description(self) -> str:
        first, *further = self.num_rows
        equations = [f"p_1(x) = x mod {first}"]
        for j, modulus in enumerate(further, start=2):
            equations.append(f"p_{j}(x) = (x \\ {math.prod(self.num_rows[: j - 1])}) mod {modulus}")
        return ", ".join(equations)

    def grown_settings(self, num_embeddings: int) -> dict[str, Any]:
        """Returns the moduli; the last one is raised where their product would be too small."""
        *lower, highest = self.moduli
        return {"moduli": [*lower, max(highest, -(-num_embeddings // math.prod(lower)))]}


def _require_complementary(num_embeddings: int, moduli: tuple[int, ...]) -> None:
    pair = colliding_digits(num_embeddings, moduli)
    if pair is not None:
        raise UserError(
            f"mixed_radix: moduli {list(moduli)} have the product {math.prod(moduli)}, below "
            f"num_embeddings={num_embeddings}, so ids {pair[0]} and {pair[1]} have the same rows. Raise them: "
            f"{list(suggest_moduli(moduli, num_embeddings, coprime=False))} do."
        )
