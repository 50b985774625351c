"""The contract that every composition keeps."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from distembed.composition.initial import Distribution


class Composition(ABC):
    """Combines the vectors of k partitions into one, id by id.

    Attributes:
        name: the name in :data:`distembed.composition.COMPOSITIONS`.
        commutes_with_sum: whether composing the sums over a bag equals summing the composed vectors of its ids. Then a
            bag may be pooled partition by partition; else every id has to be composed before pooling.
    """

    name: ClassVar[str]
    commutes_with_sum: ClassVar[bool]

    @abstractmethod
    def partition_dims(self, embedding_dim: int, num_partitions: int) -> tuple[int, ...]:
        """Dimension of each partition's table, for a composed vector of ``embedding_dim``."""

    @abstractmethod
    def compose(self, vectors: Sequence[Float[Tensor, "*batch dim_j"]]) -> Float[Tensor, "*batch dim"]:
        """Composes along the last dim; every other dim is a batch dim."""

    @abstractmethod
    def initial_weights(self, variance: float, num_partitions: int) -> tuple[Distribution, ...]:
        """How to draw each partition's weights so that the composed vector has zero mean and this variance."""
