"""The contract that every partition scheme keeps: exact integer maps from ids to rows."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from jaxtyping import Int64
from torch import Tensor

from distembed.errors import UserError

MAX_NUM_EMBEDDINGS = 2**63 - 1
"""Ids are int64, so a set can hold this many and no more."""


def require_positive(field: str, value: object, remedy: str) -> int:
    """Returns ``value`` if it is an integer of at least 1 that int64 can hold, else raises a :class:`UserError`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"{field} is {value!r}, of type {type(value).__name__}; it must be an integer. {remedy}")
    if not 1 <= value <= MAX_NUM_EMBEDDINGS:
        raise UserError(f"{field} is {value}; it must lie between 1 and 2^63-1. {remedy}")
    return value


class Partition(ABC):
    """A family of k partitions of the ids ``0 <= id < num_embeddings``.

    Attributes:
        name: the scheme's name in :data:`distembed.partitions.PARTITIONS`.
        num_embeddings: number of ids, n.
        num_rows: rows of each of the k partitions; every row produced by partition j lies in ``[0, num_rows[j])``.
    """

    name: ClassVar[str]
    num_embeddings: int
    num_rows: tuple[int, ...]

    def __init__(self, num_embeddings: int) -> None:
        self.num_embeddings = require_positive("num_embeddings", num_embeddings, "Give the number of distinct ids.")

    @abstractmethod
    def rows(self, ids: Int64[Tensor, "*shape"]) -> Int64[Tensor, "k *shape"]:
        """Maps ids to their row in each partition; ids must lie in ``[0, num_embeddings)`` (not checked here)."""

    @abstractmethod
    def is_complementary(self) -> bool:
        """Whether any two distinct ids differ in at least one partition, decided by exact integer arithmetic."""

    @classmethod
    def rows_of_tables(
        cls, partitions: Sequence["Partition"], ids: Int64[Tensor, "tables batch"]
    ) -> Int64[Tensor, "k tables batch"]:
        """The same map for many tables of this scheme at once, row t of ``ids`` through ``partitions[t]``.

        Schemes override it where one vectorised operation can serve all tables.
        """
        return torch.stack([partition.rows(row) for partition, row in zip(partitions, ids, strict=True)], dim=1)

    @property
    def total_rows(self) -> int:
        """Rows of all k partition tables together."""
        return sum(self.num_rows)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_embeddings={self.num_embeddings}, num_rows={self.num_rows})"
