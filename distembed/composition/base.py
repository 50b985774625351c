"""The contract that every composition keeps."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from distembed.composition.initial import Distribution


class Composition(ABC):
    """Combines what k partitions hold for an id into its embedding.

    A partition's weight holds a row a bucket: a vector that is looked up or, on a path, the numbers of a function.

    Attributes:
        name: the name in :data:`distembed.composition.COMPOSITIONS`.
        settings: keywords of the constructor; all have defaults.
        commutes_with_sum: whether composing the sums over a bag equals summing the composed vectors of its ids. Then a
            bag may be pooled partition by partition; else every id has to be composed before pooling.
    """

    name: ClassVar[str]
    settings: ClassVar[tuple[str, ...]] = ()
    commutes_with_sum: ClassVar[bool]

    @abstractmethod
    def partition_dims(self, embedding_dim: int, num_partitions: int) -> tuple[int, ...]:
        """Columns of each partition's weight, for composed vectors of ``embedding_dim``."""

    def num_vectors(self, num_partitions: int) -> int:
        """How many vectors of ``embedding_dim`` an id is composed to, one after another."""
        return 1

    def num_looked_up(self, num_partitions: int) -> int:
        """How many partitions hold vectors, from the first on; the others hold functions."""
        return num_partitions

    @abstractmethod
    def columns(self, embedding_dim: int, num_partitions: int) -> tuple[range, ...] | None:
        """Columns of the output that each partition's columns, one to one, take part in.

        Composing a range of columns of the output then needs only these columns of the partitions that have them. None
        where every column of the output depends on all columns.
        """

    @abstractmethod
    def compose(self, vectors: Sequence[Float[Tensor, "*batch dim_j"]]) -> Float[Tensor, "*batch dim"]:
        """Composes each id's own rows, along the last dim; every other dim is a batch dim."""

    def embed(
        self, weights: Sequence[Float[Tensor, "rows_j dim_j"]], rows: Int64[Tensor, "k ids"]
    ) -> Float[Tensor, "ids dim"]:
        """Composed vectors of ids with these rows in the k partitions' weights."""
        return self.compose([look_up(weight, row) for row, weight in zip(rows, weights, strict=True)])

    @abstractmethod
    def initial_weights(self, variance: float, num_partitions: int, embedding_dim: int) -> tuple[Distribution, ...]:
        """How to draw each partition's weight so that the composed vectors have zero mean and this variance."""


def look_up(weight: Float[Tensor, "rows dim"], row: Int64[Tensor, " ids"]) -> Float[Tensor, "ids dim"]:
    """The rows of a weight; half precision is one of storage, and gives float32, as FBGEMM has it."""
    vectors = F.embedding(row, weight)
    return vectors.float() if vectors.dtype in (torch.float16, torch.bfloat16) else vectors
