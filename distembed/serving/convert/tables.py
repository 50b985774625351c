"""One table between full and compositional: its partitions fitted to full vectors, and full vectors composed of them.

How near a fit comes depends on the composition and on how much the full table's rows differ. Ids are weighted by how
often they occur: a rare id's vector has hardly been trained, so it may be far off at no loss.

With weight ``w_x`` of id ``x`` and row ``r_j(x)`` of it in partition j, the fit minimises for each column::

    sum over x of  w_x * (v_x - compose(a_1[r_1(x)], ..., a_k[r_k(x)]))^2

Where one partition alone gives an id's number (concatenation, or a single partition), the answer is the weighted mean
of the ids that share a row. Products and sums are solved for one partition at a time while the rest is fixed, which has
a closed form for each row, until a sweep over all partitions gains nothing; so are the cores of tensor trains
(:mod:`.core_fit`). Sums end at the minimum, products and tensor trains at one that depends on the initial weights.

Ids are taken in chunks. Besides the full vectors, memory holds the factors in float64, and a numerator and a
denominator for each number of one partition: about three times the full table at two partitions and 4 collisions
(measured). Time grows with ``ids x columns x partitions x sweeps``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from distembed.base.errors import UserError
from distembed.composition import TensorTrain
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.occurrences import id_weights
from distembed.partitions import Partition
from distembed.serving.convert.core_fit import balanced_cores, solve_core

_IDS_PER_CHUNK = 1 << 16
_MOST_SWEEPS = 50
_LEAST_GAIN = 1e-3
_CHUNK_NUMBERS = 1 << 21


@dataclass(frozen=True)
class FitError:
    """The distance of a table's composed vectors from the full ones.

    Attributes:
        table: The table's name.
        num_embeddings: The number of ids.
        full_bytes: The bytes of the full vectors.
        compositional_bytes: The bytes of the partitions.
        variance_left: The weighted mean of squared distances, divided by the variance of the full vectors: 0 for an
            exact fit, 1 where all composed vectors are the mean.
        worst_id: The id whose vector is farthest from its full one.
        worst_distance: The Euclidean distance of the worst id.
    """

    table: str
    num_embeddings: int
    full_bytes: int
    compositional_bytes: int
    variance_left: float
    worst_id: int
    worst_distance: float

    @classmethod
    def of_kept(cls, table: CompositionalEmbeddingConfig) -> FitError:
        """Returns the error of a table whose weights stay as they are."""
        return cls(table.name, table.num_embeddings, table.full_bytes, table.memory_bytes, 0.0, 0, 0.0)

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class FittedTable:
    """The weight of each partition of a fitted table, in their order, and the error of the fit."""

    weights: list[Tensor]
    error: FitError


@torch.no_grad()
def fit_table(
    table: CompositionalEmbeddingConfig,
    vectors: Float[Tensor, "ids dim"],
    counts: Int[Tensor, " ids"] | Float[Tensor, " ids"] | None = None,
) -> FittedTable:
    """Fits the partitions of a table to full vectors.

    A single partition that gives each id a row of its own (``naive``) takes the vectors as they are, bit for bit.
    Other tables are fitted by least squares from the table's initial weights.

    Args:
        table: The table. Where it hashes its ids (``pre_hash``), row i of the vectors belongs to the hashed id i.
        vectors: The full table, on the CPU.
        counts: How often each id occurs; all weights are equal unless given. An id that never occurs weighs a
            thousandth of one that occurs once.

    Raises:
        UserError: The vectors or counts have another shape or are not finite, or the composition has no least squares
            fit: paths, and feature generation, with several partitions.
    """
    require_fit(table)
    _require_full(table, vectors)
    full = WeightedVectors(table.scheme, vectors, id_weights(table, counts))
    initial = [part.init(torch.empty(part.num_rows, part.dim)) for part in table.partition_tables()]
    fit = _FITS[table.combine.name] if len(initial) > 1 else _fit_single
    weights = [weight.to(table.dtype) for weight in fit(table, full, initial)]
    return FittedTable(weights, _error(table, full, weights))


def require_fit(table: CompositionalEmbeddingConfig) -> None:
    """Raises a :class:`UserError` where a table's partitions cannot be fitted to full vectors."""
    _require_fixed_ids(table)
    name, num_partitions = table.combine.name, len(table.scheme.num_rows)
    if num_partitions > 1 and name not in _FITS:
        why = (
            f"gives the model {num_partitions} vectors an id, where a full table gives one"
            if table.num_vectors > 1
            else "has no least squares fit"
        )
        raise UserError(
            f"table {table.name!r} has composition {name!r}, which {why}; convert to {', '.join(_FITS)}, or train it "
            "from initial weights."
        )


def _require_fixed_ids(table: CompositionalEmbeddingConfig) -> None:
    """Raises a :class:`UserError` where a table gives slots to its ids in training."""
    if table.managed is not None:
        raise UserError(
            f"table {table.name!r} has managed ids, whose slots no full table gives; leave embedding.tables."
            f"{table.name}.ids out, or train it from initial weights."
        )


def _fit_single(table: CompositionalEmbeddingConfig, full: WeightedVectors, initial: list[Tensor]) -> list[Tensor]:
    """Returns the only partition: each row is the weighted mean of its ids' vectors, or its one id's exact vector."""
    if table.scheme.is_complementary():
        rows = table.scheme.rows(torch.arange(len(full.vectors)))[0]
        return [initial[0].to(full.vectors.dtype).index_copy_(0, rows, full.vectors)]
    return [_weighted_means(full, 0, range(table.embedding_dim), initial[0])]


def _fit_concat(table: CompositionalEmbeddingConfig, full: WeightedVectors, initial: list[Tensor]) -> list[Tensor]:
    """Returns the rows of partitions that each give some columns: a row is the weighted mean of its ids' columns."""
    columns = table.combine.columns(table.embedding_dim, len(initial))
    assert columns is not None
    return [_weighted_means(full, j, partition_columns, initial[j]) for j, partition_columns in enumerate(columns)]


def _fit_tensor_train(
    table: CompositionalEmbeddingConfig, full: WeightedVectors, initial: list[Tensor]
) -> list[Tensor]:
    """Returns the cores of a tensor train, each fitted in turn while the others are fixed."""
    assert isinstance(table.combine, TensorTrain)
    return balanced_cores(table.combine, _alternate(initial, partial(solve_core, full, table.combine)))


_FITS: dict[str, Callable[[CompositionalEmbeddingConfig, WeightedVectors, list[Tensor]], list[Tensor]]] = {
    "product": lambda _, full, initial: _balanced(_alternate(initial, partial(_solve, full, is_product=True))),
    "sum": lambda _, full, initial: _alternate(initial, partial(_solve, full, is_product=False)),
    "concat": _fit_concat,
    "tensor_train": _fit_tensor_train,
}
"""The fit of several partitions, by the name of the composition."""


def _require_full(table: CompositionalEmbeddingConfig, vectors: Tensor) -> None:
    """Raises a :class:`UserError` unless ``vectors`` has a finite floating point vector for each id of the table."""
    full_shape = (table.num_embeddings, table.embedding_dim)
    if tuple(vectors.shape) != full_shape or not vectors.is_floating_point():
        raise UserError(
            f"table {table.name!r}: the full table is {vectors.dtype} of shape {tuple(vectors.shape)}, and the "
            f"compositional one is for {full_shape[0]} ids of {full_shape[1]} numbers; give both the same "
            "num_embeddings and embedding_dim."
        )
    if not all(bool(rows.isfinite().all()) for rows in vectors.split(_IDS_PER_CHUNK)):
        raise UserError(f"table {table.name!r}: the full table holds numbers that are not finite; it cannot be fitted.")


def _error(table: CompositionalEmbeddingConfig, full: WeightedVectors, weights: Sequence[Tensor]) -> FitError:
    """Returns the distance of the composed vectors from the full ones, reading the ids once."""
    # variance = sum(w |v|^2) - |sum(w v)|^2 / sum(w), so that the mean need not be known beforehand
    residual, squares, total = 0.0, 0.0, 0.0
    sums = torch.zeros(table.embedding_dim, dtype=torch.float64)
    worst_id, worst_square = 0, -1.0
    for chunk in full.chunks():
        composed = table.combine.embed(weights, chunk.rows).double()
        distances = (chunk.vectors - composed).square().sum(dim=1)
        id_weights = chunk.weights.squeeze(1)
        residual += float(id_weights @ distances)
        squares += float(id_weights @ chunk.vectors.square().sum(dim=1))
        sums += id_weights @ chunk.vectors
        total += float(id_weights.sum())
        if float(distances.max()) > worst_square:
            worst_id, worst_square = chunk.first_id + int(distances.argmax()), float(distances.max())
    variance = squares - float(sums.square().sum()) / total
    return FitError(
        table.name,
        table.num_embeddings,
        full.vectors.nbytes,
        table.memory_bytes,
        residual / variance if variance > 1e-12 * squares else float(residual > 1e-12 * squares),
        worst_id,
        math.sqrt(worst_square),
    )


@torch.no_grad()
def full_vectors(table: CompositionalEmbeddingConfig, weights: Sequence[Tensor]) -> Float[Tensor, "ids dim"]:
    """Returns the composed vector of every id, as a stock model's full table, in the type of the partitions' weights.

    Where the table hashes its ids (``pre_hash``), row i has the vector of the hashed id i.

    Raises:
        UserError: Its ids have several vectors each, which no stock table has, or it has managed ids.
    """
    _require_fixed_ids(table)
    if table.num_vectors > 1:
        raise UserError(
            f"table {table.name!r} has composition {table.combine.name!r}, which gives an id {table.num_vectors} "
            "vectors, so that no full table can take its place; product, sum, concat and paths give one."
        )
    full = torch.empty(table.num_embeddings, table.embedding_dim, dtype=weights[0].dtype)
    for start in range(0, len(full), _IDS_PER_CHUNK):
        ids = torch.arange(start, min(start + _IDS_PER_CHUNK, len(full)))
        full[start : start + len(ids)] = table.combine.embed(weights, table.scheme.rows(ids))
    return full


@torch.no_grad()
def carried_sums(
    table: CompositionalEmbeddingConfig, weights: Sequence[Tensor], sums: Float[Tensor, "ids dim"]
) -> list[Float[Tensor, "rows_j dim_j"]]:
    """Returns Adagrad's sums of squared gradients for each fitted partition, from the sums of a full table.

    Row r of partition j has ``sum over ids x of row r: sums[x] * f(x)^2``, where f is the derivative of x's vector by
    the row: 1 for sums and concatenations, the product of the other factors for products. A batch with several ids of
    a row squares the sum of their gradients; the cross terms are left out. For tensor trains, so are the cross terms
    between the columns of a vector that depend on one number of a core.
    """
    row_sums = [torch.zeros(weight.shape, dtype=torch.float64) for weight in weights]
    for chunk in WeightedVectors(table.scheme, sums, torch.ones(1).expand(len(sums))).chunks():
        # a vector is linear in each partition: the derivative of the composed squares is the square of its derivative
        with torch.enable_grad():
            squares = [
                weight[rows].double().square().requires_grad_()
                for weight, rows in zip(weights, chunk.rows, strict=True)
            ]
            gradients = torch.autograd.grad(table.combine.compose(squares), squares, chunk.vectors)
        for j, gradient in enumerate(gradients):
            row_sums[j].index_add_(0, chunk.rows[j], gradient)
    return [values.float() for values in row_sums]


@dataclass(frozen=True)
class WeightedVectors:
    """The full vectors that the partitions of a table are fitted to, with a positive weight of each id."""

    scheme: Partition
    vectors: Float[Tensor, "ids dim"]
    weights: Float[Tensor, " ids"]

    def chunks(self) -> Iterator[_Chunk]:
        """Yields all ids in chunks, in float64."""
        size = max(1, _CHUNK_NUMBERS // self.vectors.shape[1])
        for start in range(0, len(self.vectors), size):
            vectors = self.vectors[start : start + size].double()
            weights = self.weights[start : start + size].double().unsqueeze(1)
            rows = self.scheme.rows(torch.arange(start, start + len(vectors)))
            yield _Chunk(start, rows, vectors, weights)


@dataclass(frozen=True)
class _Chunk:
    """Consecutive ids from ``first_id``: their rows in each partition, full vectors in float64 and weights."""

    first_id: int
    rows: Int64[Tensor, "k ids"]
    vectors: Float[Tensor, "ids dim"]
    weights: Float[Tensor, "ids 1"]


def _weighted_means(
    full: WeightedVectors, partition: int, columns: range, initial: Float[Tensor, "rows dim_j"]
) -> Float[Tensor, "rows dim_j"]:
    """Returns each row as the weighted mean of its ids' vectors in ``columns``; rows without ids stay initial."""
    sums = torch.zeros(initial.shape, dtype=torch.float64)
    totals = torch.zeros(len(initial), 1, dtype=torch.float64)
    for chunk in full.chunks():
        rows = chunk.rows[partition]
        sums.index_add_(0, rows, chunk.vectors[:, columns.start : columns.stop] * chunk.weights)
        totals.index_add_(0, rows, chunk.weights)
    return torch.where(totals > 0, sums.div_(totals), initial.double())


def _alternate(
    initial: Sequence[Float[Tensor, "rows_j dim_j"]],
    solve: Callable[[list[Float[Tensor, "rows_j dim_j"]], int], tuple[Tensor, float]],
) -> list[Float[Tensor, "rows_j dim_j"]]:
    """Returns the partitions nearest to the full vectors: ``solve`` gives the best one for fixed others, and the error.

    Rows without ids keep their initial numbers. Ends when a sweep lessens the error by at most a thousandth.
    """
    partitions = [weight.double() for weight in initial]
    before = float("inf")
    for _ in range(_MOST_SWEEPS):
        for j in range(len(partitions)):
            partitions[j], error = solve(partitions, j)
        if before - error <= _LEAST_GAIN * error:
            break
        before = error
    return partitions


def _solve(
    full: WeightedVectors, partitions: Sequence[Float[Tensor, "rows_j dim"]], j: int, *, is_product: bool
) -> tuple[Float[Tensor, "rows dim"], float]:
    """Returns the best partition j for fixed other partitions, and the weighted squared error with it."""
    # an id's number is slope * a, with a in its row, and should be the remainder r. Over the row's ids, the minimum is
    # at a = sum(w * slope * r) / sum(w * slope^2), and the error there is sum(w * r^2) - a * sum(w * slope * r)
    numerators, denominators = torch.zeros_like(partitions[j]), torch.zeros_like(partitions[j])
    total = 0.0
    for chunk in full.chunks():
        slopes, remainders = _linear(chunk, partitions, j, is_product)
        weighted = chunk.weights * slopes
        numerators.index_add_(0, chunk.rows[j], weighted * remainders)
        denominators.index_add_(0, chunk.rows[j], weighted * slopes)
        total += float((chunk.weights * remainders.square()).sum())
    is_known = denominators > 0
    solved = torch.where(is_known, numerators / denominators, partitions[j])
    explained = numerators.mul_(solved).mul_(is_known).sum()
    return solved, max(0.0, total - float(explained))


def _linear(
    chunk: _Chunk, partitions: Sequence[Float[Tensor, "rows_j dim"]], j: int, is_product: bool
) -> tuple[Float[Tensor, "ids dim"], Float[Tensor, "ids dim"]]:
    """Returns slopes and remainders: for a number a of partition j, an id's error is ``remainder - slope * a``.

    In products the slope is the product of the other partitions' numbers, and the remainder is v. In sums the slope is
    1, and the remainder is v minus the other partitions' numbers.
    """
    slopes, remainders = torch.ones_like(chunk.vectors), chunk.vectors
    for number, partition in enumerate(partitions):
        if number == j:
            continue
        other_rows = partition[chunk.rows[number]]
        if is_product:
            slopes = slopes.mul_(other_rows)
        else:
            remainders = remainders - other_rows
    return slopes, remainders


def _balanced(factors: Sequence[Float[Tensor, "rows_j dim"]]) -> list[Float[Tensor, "rows_j dim"]]:
    """Rescales the factors of products, without changing the products, to mean squares of 1 in all but the first.

    The initial weights of products are like this: the first factor has the size of the vectors, further ones are +-1.
    """
    first, *further = factors
    balanced = []
    for factor in further:
        sizes = factor.square().mean(dim=0).sqrt_()
        sizes = torch.where(sizes > 0, sizes, 1.0)
        balanced.append(factor / sizes)
        first = first * sizes
    return [first, *balanced]
