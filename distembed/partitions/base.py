"""The contract of every partition scheme: exact integer maps from ids to rows, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np
from jaxtyping import Int64

from distembed.base.errors import UserError
from distembed.base.lazy import torch
from distembed.partitions.settings import SchemeSettings, setting_names

if TYPE_CHECKING:
    from torch import Tensor

MAX_NUM_EMBEDDINGS = 2**63 - 1
"""The largest number of ids that a table can have, as ids are int64."""


def require_positive(field: str, value: object, remedy: str) -> int:
    """Returns ``value`` as an int from 1 to 2^63-1; else a UserError names ``field`` and ends with ``remedy``."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise UserError(f"{field} is {value!r}, of type {type(value).__name__}; it must be an integer. {remedy}")
    if not 1 <= value <= MAX_NUM_EMBEDDINGS:
        raise UserError(f"{field} is {value}; it must lie between 1 and 2^63-1. {remedy}")
    return int(value)


def num_first_half(num_partitions: int) -> int:
    """Returns ``ceil(k / 2)``: the stored partitions of ``clustered``, and the parts of ``concat_sum``."""
    return -(-num_partitions // 2)


class Digit(NamedTuple):
    r"""The rule ``min((x \ divisor) mod modulus, last_row)``, of an id x or of its hash."""

    divisor: int
    modulus: int | None
    keys: tuple[int, int] | None = None  # of the :class:`KeyedHash` that is applied to the id first
    last_row: int | None = None  # the row in place of larger ones


class Partition(ABC):
    """A family of k partitions of the ids ``0 <= id < num_embeddings``.

    Attributes:
        name: The scheme's name in :data:`distembed.partitions.PARTITIONS`.
        settings: The class of the settings that a table may give in a config, whose fields are keywords of the
            constructor.
        num_embeddings: The number of ids, n.
        num_rows: The number of rows of each of the k partitions; partition j gives rows in ``[0, num_rows[j])``.
    """

    name: ClassVar[str]
    settings: ClassVar[type[SchemeSettings]] = SchemeSettings
    num_embeddings: int
    num_rows: tuple[int, ...]

    def __init__(self, num_embeddings: int) -> None:
        self.num_embeddings = require_positive("num_embeddings", num_embeddings, "Give the number of distinct ids.")

    @classmethod
    def from_settings(cls, num_embeddings: int, settings: Any) -> Self:
        """Builds the scheme from a table's settings; the constructor's defaults replace None."""
        values = {name: getattr(settings, name) for name in setting_names(cls.settings)}
        return cls(num_embeddings, **{name: value for name, value in values.items() if value is not None})

    def for_table(self, name: str) -> Self:
        """Returns the scheme of the table of this name: the scheme itself, unless rows depend on the name."""
        return self

    def unshared(self) -> Self:
        """Returns an equal scheme for another table: a copy if training changes the scheme, else the scheme itself."""
        return self

    def __eq__(self, other: object) -> bool:
        """Returns whether another scheme is of the same class and was made with the same numbers."""
        if type(self) is not type(other):
            return NotImplemented
        values, other_values = self._identity(), other._identity()
        return values.keys() == other_values.keys() and all(_equal(values[key], other_values[key]) for key in values)

    def __hash__(self) -> int:
        return hash((type(self), self.num_embeddings, self.num_rows))

    def _identity(self) -> dict[str, Any]:
        """Returns the attributes that equality compares; a scheme overrides it to leave out its caches."""
        return vars(self)

    @property
    @abstractmethod
    def description(self) -> str:
        r"""The equation of each partition with this instance's numbers: ``p_1(x) = x mod 7, p_2(x) = x \ 7``."""

    @abstractmethod
    def rows(self, ids: Int64[Tensor, "*shape"]) -> Int64[Tensor, "k *shape"]:
        """Returns the row of each id in each partition; unchecked: ids outside ``[0, num_embeddings)`` get any row."""

    @abstractmethod
    def colliding_ids(self) -> tuple[int, int] | None:
        """Returns two distinct ids with equal rows in every partition; None if none are known.

        None is a proof that there are none, except in a scheme that overrides :meth:`is_complementary`.
        """

    def is_complementary(self) -> bool:
        """Returns whether any two distinct ids are proved to differ in at least one partition (definition 1)."""
        return self.colliding_ids() is None

    @property
    def ids_per_row(self) -> float:
        """The mean number of ids that share a tuple of rows: n over the number of tuples that occur."""
        return 1.0

    def inverse(self, rows: Int64[Tensor, "k *shape"]) -> Int64[Tensor, "*shape"]:
        """Returns the id of each tuple of rows ``rows[:, i]``, and -1 for a tuple that no id has.

        Raises:
            UserError: The partitions are not complementary.
        """
        if not self.is_complementary():
            pair = self.colliding_ids()
            shared = "some may have" if pair is None else f"{pair[0]} and {pair[1]} have"
            raise UserError(
                f"{self.name} with num_rows={self.num_rows} has no inverse: of num_embeddings={self.num_embeddings} "
                f"ids, {shared} the same rows. Use a complementary scheme."
            )
        candidates = self._candidates(rows)
        inside = (candidates >= 0) & (candidates < self.num_embeddings)
        # A candidate may be any number where no id has the rows: it is the answer only if it maps to these rows again.
        maps_back = (self.rows(torch.where(inside, candidates, 0)) == rows).all(dim=0)
        return torch.where(inside & maps_back, candidates, -1)

    @abstractmethod
    def _candidates(self, rows: Int64[Tensor, "k *shape"]) -> Int64[Tensor, "*shape"]:
        """Returns the id of each tuple of rows, and any number for a tuple that no id has."""

    @classmethod
    def rows_of_tables(
        cls, partitions: Sequence["Partition"], ids: Int64[Tensor, "tables batch"]
    ) -> Int64[Tensor, "k tables batch"]:
        """Returns the rows of the ids of many tables of this scheme at once; ``partitions[t]`` maps ``ids[t]``."""
        constants = cls.constants(partitions)
        if constants is not None:
            return cls.rows_by_constants(ids, constants.to(ids.device).unsqueeze(2))
        return torch.stack([partition.rows(row) for partition, row in zip(partitions, ids, strict=True)], dim=1)

    @classmethod
    def constants(cls, partitions: Sequence["Partition"]) -> Int64[Tensor, "constants tables"] | None:
        """Returns the numbers in which the maps of many tables differ, like moduli, on the CPU: a column a table.

        A scheme overrides it together with :meth:`rows_by_constants` if one vectorised operation can map the ids of all
        tables; None if not. Callers that map ids on a GPU keep a copy there, so that no step waits for one.
        """
        return None

    @classmethod
    def rows_by_constants(
        cls, ids: Int64[Tensor, "*shape"], constants: Int64[Tensor, "constants *shape"]
    ) -> Int64[Tensor, "k *shape"]:
        """Returns the rows of ids of many tables; the constants of each id's table broadcast against the ids."""
        raise NotImplementedError(f"{cls.__name__} has constants, but no rows_by_constants; define both or neither.")

    def digits(self) -> "tuple[Digit, ...] | None":
        """Returns each partition's divisor and modulus, for the fused lookup's kernels; None if its rule is another."""
        return None

    def grown_settings(self, num_embeddings: int) -> dict[str, Any]:
        """Returns the settings with which this scheme, built for ``num_embeddings`` ids, keeps the rows of its old ids.

        A model whose vocabulary has grown is built with these settings, and continues with its trained rows.

        Raises:
            UserError: The scheme cannot grow, or cannot have so many ids; the error says which scheme can.
        """
        raise UserError(
            f"{self.name} has no rule by which it grows from {self.num_embeddings} to {num_embeddings} ids; define "
            f"{type(self).__name__}.grown_settings, or use quotient_remainder, mixed_radix or naive, which have one."
        )

    def grown(self, num_embeddings: int) -> Self:
        """Returns the scheme for more ids, in which each id of this one keeps its rows; see :meth:`grown_settings`."""
        return type(self)(num_embeddings, **self.grown_settings(num_embeddings))

    @property
    def assignment_bytes(self) -> int:
        """The bytes of stored rows of ids; 0 for a scheme that computes them."""
        return 0

    @property
    def state(self) -> "dict[str, Tensor]":
        """Tensors, on the CPU, that decide rows and that training changes; checkpoints have them beside the weights."""
        return {}

    def state_changed(self) -> None:  # noqa: B027
        """Drops everything that follows from :attr:`state`, whose tensors were overwritten."""

    def load_state(self, saved: "Mapping[str, Tensor]") -> None:
        """Copies saved tensors of the same names into :attr:`state`."""
        for name, live in self.state.items():
            live.copy_(saved[name])
        self.state_changed()

    @property
    def total_rows(self) -> int:
        """The number of rows of all k partitions together."""
        return sum(self.num_rows)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_embeddings={self.num_embeddings}, num_rows={self.num_rows})"


def _equal(first: Any, second: Any) -> bool:
    """Returns whether two attributes are equal; tensors, arrays and sequences of them are so element by element."""
    if isinstance(first, (torch.Tensor, np.ndarray)) or isinstance(second, (torch.Tensor, np.ndarray)):
        return type(first) is type(second) and first.shape == second.shape and bool((first == second).all())
    if isinstance(first, (tuple, list)) and type(first) is type(second):
        return len(first) == len(second) and all(_equal(*pair) for pair in zip(first, second, strict=True))
    return bool(first == second)
