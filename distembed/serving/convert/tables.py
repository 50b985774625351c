"""One table between full and compositional: its partitions fitted to full vectors, and full vectors composed of them.

How near a fit comes depends on the composition and on how much the full table's rows differ. Ids are weighted by how
often they occur: a rare id's vector has hardly been trained, so it may be far off at no loss.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from distembed.base.errors import UserError
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.serving.convert.least_squares import WeightedVectors, alternate, weighted_means

UNSEEN_WEIGHT = 1e-3
"""What an id weighs that never occurred, beside one that occurred once."""
IDS_PER_CHUNK = 1 << 16
"""How many ids are looked at at once."""


@dataclass(frozen=True)
class FitError:
    """How far the composed vectors of a table are from the full ones.

    Attributes:
        table: The table's name.
        num_embeddings: The number of ids.
        full_bytes: The bytes of the full vectors.
        compositional_bytes: The bytes of the partitions.
        variance_left: The weighted mean of squared distances, over that of the full vectors from their own weighted
            mean: 0 where every vector is met, 1 where nothing but their mean is.
        worst_id: The id whose vector is farthest from its full one.
        worst_distance: That Euclidean distance.
    """

    table: str
    num_embeddings: int
    full_bytes: int
    compositional_bytes: int
    variance_left: float
    worst_id: int
    worst_distance: float

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class FittedTable:
    """A table's partitions that compose full vectors as nearly as they can.

    Attributes:
        weights: The weight of each partition, in their order.
        error: How far the composed vectors are from the full ones.
    """

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
    Other tables are fitted by least squares from the table's initial weights
    (:mod:`distembed.serving.convert.least_squares`).

    Args:
        table: The table. Where it hashes its ids (``pre_hash``), row i of the vectors is that of the hashed id i.
        vectors: The full table, on the CPU.
        counts: How often each id occurs; all weigh the same unless given. An id that never occurs weighs a thousandth
            of one that occurs once.

    Raises:
        UserError: The vectors or counts have another shape or are not finite, or the composition has no least squares
            fit: paths, and feature generation, with several partitions.
    """
    require_fit(table)
    _require_full(table, vectors)
    full = WeightedVectors(table.scheme, vectors, _id_weights(table, counts))
    initial = [part.init(torch.empty(part.num_rows, part.dim)) for part in table.partition_tables()]
    fit = _FITS[table.combine.name] if len(initial) > 1 else _fit_single
    weights = [weight.to(table.dtype) for weight in fit(table, full, initial)]
    return FittedTable(weights, _error(table, full, weights))


def require_fit(table: CompositionalEmbeddingConfig) -> None:
    """Makes sure that a table's partitions can be fitted to full vectors.

    Raises:
        UserError: They cannot; the error says why.
    """
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


def _fit_single(table: CompositionalEmbeddingConfig, full: WeightedVectors, initial: list[Tensor]) -> list[Tensor]:
    """Returns the means of the ids of each row, which are the vectors themselves where no two ids share a row."""
    if table.scheme.is_complementary():
        rows = table.scheme.rows(torch.arange(len(full.vectors)))[0]
        return [initial[0].to(full.vectors.dtype).index_copy_(0, rows, full.vectors)]
    return [weighted_means(full, 0, range(table.embedding_dim), initial[0])]


def _fit_concat(table: CompositionalEmbeddingConfig, full: WeightedVectors, initial: list[Tensor]) -> list[Tensor]:
    """Returns for each partition, which has columns of its own, the means of the ids of each row."""
    columns = table.combine.columns(table.embedding_dim, len(initial))
    assert columns is not None
    return [weighted_means(full, j, own, initial[j]) for j, own in enumerate(columns)]


def _fit_product(table: CompositionalEmbeddingConfig, full: WeightedVectors, initial: list[Tensor]) -> list[Tensor]:
    return alternate(full, initial, is_product=True)


def _fit_sum(table: CompositionalEmbeddingConfig, full: WeightedVectors, initial: list[Tensor]) -> list[Tensor]:
    return alternate(full, initial, is_product=False)


_FITS: dict[str, Callable[[CompositionalEmbeddingConfig, WeightedVectors, list[Tensor]], list[Tensor]]] = {
    "product": _fit_product,
    "sum": _fit_sum,
    "concat": _fit_concat,
}
"""How several partitions are fitted, by the name of the composition."""


def _require_full(table: CompositionalEmbeddingConfig, vectors: Tensor) -> None:
    """Raises a :class:`UserError` unless there is a finite vector for each id."""
    wanted = (table.num_embeddings, table.embedding_dim)
    if tuple(vectors.shape) != wanted or not vectors.is_floating_point():
        raise UserError(
            f"table {table.name!r}: the full table is {vectors.dtype} of shape {tuple(vectors.shape)}, and the "
            f"compositional one is for {wanted[0]} ids of {wanted[1]} numbers; give both the same num_embeddings and "
            "embedding_dim."
        )
    if not all(bool(rows.isfinite().all()) for rows in vectors.split(IDS_PER_CHUNK)):
        raise UserError(f"table {table.name!r}: the full table holds numbers that are not finite; it cannot be fitted.")


def _id_weights(table: CompositionalEmbeddingConfig, counts: Tensor | None) -> Float[Tensor, " ids"]:
    """Returns what each id weighs.

    Raises:
        UserError: There is not one count an id, or one is negative or not finite.
    """
    if counts is None:
        return torch.ones(1).expand(table.num_embeddings)
    weights = counts.to(torch.float32)
    if tuple(counts.shape) != (table.num_embeddings,) or not bool((weights.isfinite() & (weights >= 0)).all()):
        raise UserError(
            f"table {table.name!r}: counts has the shape {tuple(counts.shape)}; give a count that is not negative for "
            f"each of {table.num_embeddings} ids."
        )
    return torch.where(weights > 0, weights, UNSEEN_WEIGHT)


def _error(table: CompositionalEmbeddingConfig, full: WeightedVectors, weights: Sequence[Tensor]) -> FitError:
    """Returns how far the composed vectors are from the full ones."""
    left, squares, total = 0.0, 0.0, 0.0
    sums = torch.zeros(table.embedding_dim, dtype=torch.float64)
    worst_id, worst_square = 0, -1.0
    for chunk in full.chunks():
        composed = table.combine.embed(weights, chunk.rows).double()
        distances = (chunk.vectors - composed).square().sum(dim=1)
        own = chunk.weights.squeeze(1)
        left += float(own @ distances)
        squares += float(own @ chunk.vectors.square().sum(dim=1))
        sums += own @ chunk.vectors
        total += float(own.sum())
        if float(distances.max()) > worst_square:
            worst_id, worst_square = chunk.first_id + int(distances.argmax()), float(distances.max())
    variance = squares - float(sums.square().sum()) / total
    return FitError(
        table.name,
        table.num_embeddings,
        full.vectors.nbytes,
        table.memory_bytes,
        left / variance if variance > 1e-12 * squares else float(left > 1e-12 * squares),
        worst_id,
        math.sqrt(worst_square),
    )


@torch.no_grad()
def full_vectors(table: CompositionalEmbeddingConfig, weights: Sequence[Tensor]) -> Float[Tensor, "ids dim"]:
    """Returns the composed vector of every id, as the full table that a stock model has, in the type of the weights.

    Args:
        table: The table. Where it hashes its ids (``pre_hash``), row i is that of the hashed id i.
        weights: The weight of each partition, in their order.

    Raises:
        UserError: Its ids have several vectors each, which no stock table has.
    """
    if table.num_vectors > 1:
        raise UserError(
            f"table {table.name!r} has composition {table.combine.name!r}, which gives an id {table.num_vectors} "
            "vectors, so that no full table can take its place; product, sum, concat and paths give one."
        )
    full = torch.empty(table.num_embeddings, table.embedding_dim, dtype=weights[0].dtype)
    for start in range(0, len(full), IDS_PER_CHUNK):
        ids = torch.arange(start, min(start + IDS_PER_CHUNK, len(full)))
        full[start : start + len(ids)] = table.combine.embed(weights, table.scheme.rows(ids))
    return full


@torch.no_grad()
def carried_sums(
    table: CompositionalEmbeddingConfig, weights: Sequence[Tensor], sums: Float[Tensor, "ids dim"]
) -> list[Float[Tensor, "rows_j dim_j"]]:
    """Returns the sums of squared gradients that Adagrad would have for fitted partitions, from those of a full table.

    A row has had the gradients of all of its ids: as they are where its numbers are added or stand side by side, and
    times the other factors where they are multiplied. Cross terms of ids in one batch are left out.

    Args:
        table: The table.
        weights: The weight of each partition, in their order.
        sums: The sum of squared gradients of each number of the full table.
    """
    parts = [weight.double() for weight in weights]
    is_product = table.combine.name == "product"
    columns = table.combine.columns(table.embedding_dim, len(parts))
    assert columns is not None
    found = [torch.zeros_like(part) for part in parts]
    for chunk in WeightedVectors(table.scheme, sums, torch.ones(1).expand(len(sums))).chunks():
        for j, own in enumerate(columns):
            squares = chunk.vectors[:, own.start : own.stop]
            if is_product:
                for i in range(len(parts)):
                    squares = squares if i == j else squares * parts[i][chunk.rows[i]].square()
            found[j].index_add_(0, chunk.rows[j], squares)
    return [values.float() for values in found]
