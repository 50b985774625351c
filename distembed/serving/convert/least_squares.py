"""Least squares of a table's partitions: the vectors whose composition comes nearest to given full vectors.

With weight ``w_x`` of id ``x`` and row ``r_j(x)`` of it in partition j, what is minimised for each column is::

    sum over x of  w_x * (v_x - compose(a_1[r_1(x)], ..., a_k[r_k(x)]))^2

Where an id's number is that of one partition (concatenation, or a single partition), the answer is the weighted mean of
the ids that share a row. Products and sums are solved one partition at a time while the others stand still, which has a
closed form for each row, until a sweep over all partitions gains nothing: for sums that ends at the minimum, for
products at a minimum that depends on where it began, which is at the weights that are given.

Ids are taken in chunks. Beside the full vectors, memory holds the factors in float64, and a numerator and a denominator
for each number of one partition: about three times the full table at two partitions and 4 collisions (measured). Time
goes with ``ids x columns x partitions x sweeps``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from distembed.partitions import Partition

_MOST_SWEEPS = 50
_LEAST_GAIN = 1e-3
_CHUNK_NUMBERS = 1 << 21


@dataclass(frozen=True)
class WeightedVectors:
    """The full vectors that a table's partitions are to compose.

    Attributes:
        scheme: The partitions of the ids.
        vectors: The vector of each id.
        weights: How much each id counts, above 0.
    """

    scheme: Partition
    vectors: Float[Tensor, "ids dim"]
    weights: Float[Tensor, " ids"]

    def chunks(self) -> Iterator["Chunk"]:
        """Yields all ids, so many at a time, in float64."""
        size = max(1, _CHUNK_NUMBERS // self.vectors.shape[1])
        for start in range(0, len(self.vectors), size):
            vectors = self.vectors[start : start + size].double()
            weights = self.weights[start : start + size].double().unsqueeze(1)
            rows = self.scheme.rows(torch.arange(start, start + len(vectors)))
            yield Chunk(start, rows, vectors, weights)


@dataclass(frozen=True)
class Chunk:
    """Consecutive ids.

    Attributes:
        first_id: The first of them.
        rows: The row of each id in each partition.
        vectors: The full vector of each id, in float64.
        weights: How much each id counts.
    """

    first_id: int
    rows: Int64[Tensor, "k ids"]
    vectors: Float[Tensor, "ids dim"]
    weights: Float[Tensor, "ids 1"]


def weighted_means(
    full: WeightedVectors, partition: int, columns: range, initial: Float[Tensor, "rows dim_j"]
) -> Float[Tensor, "rows dim_j"]:
    """Returns the weighted mean of the ids of each row, in some columns.

    Args:
        full: The full vectors.
        partition: The number of the partition whose rows are meant.
        columns: The columns of the full vectors that it holds.
        initial: What a row has that no id has.
    """
    sums = torch.zeros(initial.shape, dtype=torch.float64)
    totals = torch.zeros(len(initial), 1, dtype=torch.float64)
    for chunk in full.chunks():
        rows = chunk.rows[partition]
        sums.index_add_(0, rows, chunk.vectors[:, columns.start : columns.stop] * chunk.weights)
        totals.index_add_(0, rows, chunk.weights)
    return torch.where(totals > 0, sums.div_(totals), initial.double())


def alternate(
    full: WeightedVectors, initial: Sequence[Float[Tensor, "rows_j dim"]], is_product: bool
) -> list[Float[Tensor, "rows_j dim"]]:
    """Returns the factors of products, or the terms of sums.

    Args:
        full: The full vectors.
        initial: Where to begin; a row that no id has keeps its numbers.
        is_product: Whether vectors are multiplied, and not added.
    """
    parts = [weight.double() for weight in initial]
    before = float("inf")
    for _ in range(_MOST_SWEEPS):
        for j in range(len(parts)):
            parts[j], error = _solve(full, parts, j, is_product)
        if before - error <= _LEAST_GAIN * error:
            break
        before = error
    return _balanced(parts) if is_product else parts


def _solve(
    full: WeightedVectors, parts: Sequence[Float[Tensor, "rows_j dim"]], j: int, is_product: bool
) -> tuple[Float[Tensor, "rows dim"], float]:
    """Returns the best partition j while the others stand still, and the weighted squared error with it."""
    numerators, denominators = torch.zeros_like(parts[j]), torch.zeros_like(parts[j])
    total = 0.0
    for chunk in full.chunks():
        slopes, rest = _linear(chunk, parts, j, is_product)
        weighted = chunk.weights * slopes
        numerators.index_add_(0, chunk.rows[j], weighted * rest)
        denominators.index_add_(0, chunk.rows[j], weighted * slopes)
        total += float((chunk.weights * rest.square()).sum())
    is_known = denominators > 0
    solved = torch.where(is_known, numerators / denominators, parts[j])
    explained = numerators.mul_(solved).mul_(is_known).sum()
    return solved, max(0.0, total - float(explained))


def _linear(
    chunk: Chunk, parts: Sequence[Float[Tensor, "rows_j dim"]], j: int, is_product: bool
) -> tuple[Float[Tensor, "ids dim"], Float[Tensor, "ids dim"]]:
    """Returns what partition j's number of each id is multiplied by, and what the product of both should be."""
    slopes, rest = torch.ones_like(chunk.vectors), chunk.vectors
    for i, part in enumerate(parts):
        if i == j:
            continue
        others = part[chunk.rows[i]]
        if is_product:
            slopes = slopes.mul_(others)
        else:
            rest = rest - others
    return slopes, rest


def _balanced(parts: Sequence[Float[Tensor, "rows_j dim"]]) -> list[Float[Tensor, "rows_j dim"]]:
    """Returns factors of the same products of which all but the first have a mean square of 1 in each column.

    It is how products are initialised: the first factor has the size of the vectors, and the others are near signs.
    """
    first, *others = parts
    balanced = []
    for part in others:
        sizes = part.square().mean(dim=0).sqrt_()
        sizes = torch.where(sizes > 0, sizes, 1.0)
        balanced.append(part / sizes)
        first = first * sizes
    return [first, *balanced]
