"""The contract of every composition, and the distributions of initial weights."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from jaxtyping import Float, Int64

from distembed.base.lazy import torch
from distembed.partitions.settings import SchemeSettings, setting_names

if TYPE_CHECKING:
    from torch import Tensor


class Distribution(Protocol):
    """A distribution of initial weights."""

    def fill(self, weight: Tensor, generator: torch.Generator) -> Tensor:
        """Fills a weight in place with random numbers of ``generator``, and returns the weight."""


@dataclass(frozen=True)
class Uniform:
    """The uniform distribution U(-b, b) with ``b = sqrt(3 * variance)``."""

    variance: float

    def fill(self, weight: Tensor, generator: torch.Generator) -> Tensor:
        bound = math.sqrt(3.0 * self.variance)
        return weight.uniform_(-bound, bound, generator=generator)


@dataclass(frozen=True)
class NearSigns:
    """Random signs times magnitudes uniform in [0.9, 1.1], scaled to the variance; so no two rows are equal."""

    variance: float = 1.0

    def fill(self, weight: Tensor, generator: torch.Generator) -> Tensor:
        drawn = weight.uniform_(-1.0, 1.0, generator=generator)
        # magnitudes lie in [0.9, 1.1] before scaling: |u| is uniform on [0, 1], and E[(0.9 + 0.2 |u|)^2] = 1 + 0.01 / 3
        scale = math.sqrt(self.variance / (1.0 + 0.01 / 3.0))
        return drawn.copy_(drawn.sign() * (0.9 + 0.2 * drawn.abs()) * scale)


class Composition(ABC):
    """A way to combine an id's k rows, one of each partition's weight, into its embedding.

    A row of a weight is a vector that is looked up or, on a path, the numbers of a function.

    Attributes:
        name: The name in :data:`distembed.composition.COMPOSITIONS`.
        settings: The class of the settings that a table may give in a config. Its fields are keywords of the
            constructor, which have defaults, and attributes of an instance.
        commutes_with_sum: Whether composing the sums over a bag equals summing the composed vectors of its ids. Then a
            bag may be pooled partition by partition; else every id has to be composed before pooling.
    """

    name: ClassVar[str]
    settings: ClassVar[type[SchemeSettings]] = SchemeSettings
    commutes_with_sum: ClassVar[bool]

    def __eq__(self, other: object) -> bool:
        """Returns whether another composition is of this class and has equal settings."""
        if type(self) is not type(other):
            return NotImplemented
        return self.setting_values() == other.setting_values()

    def __hash__(self) -> int:
        return hash(type(self))

    def setting_values(self) -> dict[str, Any]:
        """Returns the constructor's arguments by name, which build an equal instance; lists as tuples."""
        values = {name: getattr(self, name) for name in setting_names(self.settings)}
        return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}

    @abstractmethod
    def partition_dims(self, embedding_dim: int, num_partitions: int) -> tuple[int, ...]:
        """Returns the number of columns of each partition's weight, for composed vectors of ``embedding_dim``."""

    def num_vectors(self, num_partitions: int) -> int:
        """Returns how many vectors of ``embedding_dim`` an id gives, side by side: 1, or k in feature generation."""
        return 1

    def num_lookup_partitions(self, num_partitions: int) -> int:
        """Returns how many partitions hold vectors, from the first on; the others hold functions."""
        return num_partitions

    @abstractmethod
    def columns(self, embedding_dim: int, num_partitions: int) -> tuple[range, ...] | None:
        """Returns a range of output columns for each partition: column i of its vectors contributes to column i of it.

        Shards of columns can then be composed apart, each from its columns of the partitions that have them. None where
        every output column depends on all columns, as on paths.
        """

    @abstractmethod
    def compose(self, vectors: Sequence[Float[Tensor, "*batch dim_j"]]) -> Float[Tensor, "*batch dim"]:
        """Returns composed vectors; ``vectors[j]`` holds each id's row of partition j along its last dimension."""

    def num_saved(self, dims: Sequence[int]) -> int:
        """Returns how many numbers an id's vectors of these ``dims`` leave in memory until their backward pass."""
        return 0

    def embed(
        self, weights: Sequence[Float[Tensor, "rows_j dim_j"]], rows: Int64[Tensor, "k ids"]
    ) -> Float[Tensor, "ids dim"]:
        """Returns the composed vectors of ids, given their rows in the weights of the k partitions."""
        return self.compose([look_up(weight, row) for row, weight in zip(rows, weights, strict=True)])

    @abstractmethod
    def initial_weights(self, variance: float, num_partitions: int, embedding_dim: int) -> tuple[Distribution, ...]:
        """Returns each partition's distribution of initial weights: composed vectors get mean 0 and ``variance``."""


def look_up(weight: Float[Tensor, "rows dim"], row: Int64[Tensor, " ids"]) -> Float[Tensor, "ids dim"]:
    """Returns rows of a weight; a weight stored in half precision gives float32, as in FBGEMM."""
    vectors = torch.nn.functional.embedding(row, weight)
    return vectors.float() if vectors.dtype in (torch.float16, torch.bfloat16) else vectors
