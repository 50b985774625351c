"""Truncated: frequent ids have rows of their own in more partitions than rare ids, which share one row.

Under ``concat``, with dims of its own for each partition, a frequent id has a long vector of its own and a rare id a
short one ("mixed dimensions": Ginart et al., "Mixed Dimension Embeddings with Application to Memory-Efficient
Recommendation Systems", ISIT 2021). With ``bounds: [4000, 200]`` and ``dims: [4, 12]``::

    id            columns 0-3            columns 4-15
    0 ... 199     a row of its own       a row of its own
    200 ... 3999  a row of its own       row 200, shared
    4000 ...      row 4000, shared       row 200, shared

The paper projects each block's short vectors by a matrix; here the columns are used as they are, so that vectors pool,
shard by columns and are looked up in one pass as tables of any ``concat``.

Trade-off: rows go to the ids that have the data to train them; ids from the largest bound on cannot be told apart. Ids
have to be numbered by falling frequency, as ``distembed prepare`` numbers a vocabulary's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Self

import pydantic.dataclasses
from jaxtyping import Int64
from pydantic import Field, PositiveInt

from distembed.base.errors import UserError
from distembed.base.lazy import torch
from distembed.base.names import STRICT
from distembed.partitions.base import Digit, Partition, require_positive
from distembed.partitions.settings import SchemeSettings

if TYPE_CHECKING:
    from torch import Tensor


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class TruncatedSettings(SchemeSettings):
    """The settings of ``truncated``."""

    # for each partition, the number of ids that have rows of their own; the other ids share one further row
    bounds: Annotated[list[PositiveInt], Field(min_length=1)] | None = None


class Truncated(Partition):
    """``p_j(x) = min(x, b_j)``.

    Args:
        num_embeddings: The number of ids, n, which are numbered by falling frequency.
        bounds: ``b_1, ..., b_k``: ids below b_j have rows of their own in partition j, and all others row b_j. Unless
            given, ``ceil(2n/5)`` and ``ceil(n/10)``: half as many rows as ids, so that a concatenation of equal dims
            has a quarter of the numbers of a full table.

    Raises:
        UserError: There are no bounds, or one is no positive integer.
    """

    name = "truncated"
    settings = TruncatedSettings

    def __init__(self, num_embeddings: int, bounds: Sequence[int] | None = None) -> None:
        super().__init__(num_embeddings)
        if bounds is None:
            bounds = (-(-2 * self.num_embeddings // 5), -(-self.num_embeddings // 10))
        if isinstance(bounds, (str, int)) or not bounds:
            raise UserError(f"bounds is {bounds!r}; truncated takes a list of one bound or more, such as [4000, 200].")
        remedy = "It is a number of ids with rows of their own."
        self.bounds = tuple(require_positive(f"bounds[{j}]", bound, remedy) for j, bound in enumerate(bounds))
        self.num_rows = tuple(min(self.num_embeddings, bound + 1) for bound in self.bounds)

    @classmethod
    def from_settings(cls, num_embeddings: int, settings: Any) -> Self:
        """Builds the scheme as a table's settings say; refuses tables whose ids are not numbered by frequency."""
        for field, value in (("features", settings.features), ("hash_seed", settings.hash_seed)):
            if value is not None:
                raise UserError(
                    f"partition is truncated and {field} is {value}, so that ids are not numbered by falling "
                    f"frequency; leave {field} out, or use quotient_remainder or multi_hash."
                )
        return super().from_settings(num_embeddings, settings)

    @property
    def description(self) -> str:
        equations = ", ".join(f"p_{j}(x) = min(x, {bound})" for j, bound in enumerate(self.bounds, start=1))
        if self.is_complementary():
            return equations
        return f"{equations}, ids from {max(self.bounds)} on share all rows (not complementary)"

    @property
    def ids_per_row(self) -> float:
        return self.num_embeddings / max(self.num_rows)

    def rows(self, ids: Int64[Tensor, "*shape"]) -> Int64[Tensor, "k *shape"]:
        return torch.stack([ids.clamp(max=bound) for bound in self.bounds])

    @classmethod
    def constants(cls, partitions: Sequence[Partition]) -> Int64[Tensor, "constants tables"]:
        """Returns the bounds of each table."""
        return torch.tensor([p.bounds for p in partitions if isinstance(p, Truncated)], dtype=torch.int64).t()

    @classmethod
    def rows_by_constants(
        cls, ids: Int64[Tensor, "*shape"], constants: Int64[Tensor, "constants *shape"]
    ) -> Int64[Tensor, "k *shape"]:
        return torch.minimum(ids, constants)

    def colliding_ids(self) -> tuple[int, int] | None:
        # ids from the largest bound on share all rows
        largest = max(self.num_rows)
        return (largest - 1, largest) if largest < self.num_embeddings else None

    def _candidates(self, rows: Int64[Tensor, "k *shape"]) -> Int64[Tensor, "*shape"]:
        # asked only where the largest partition has a row for each id
        return rows[self.num_rows.index(max(self.num_rows))]

    def digits(self) -> tuple[Digit, ...]:
        return tuple(Digit(1, None, last_row=bound) for bound in self.bounds)

    def grown_settings(self, num_embeddings: int) -> dict[str, Any]:
        """Returns the bounds, which stay: new ids have rows of their own below them, and share rows beyond."""
        return {"bounds": list(self.bounds)}
