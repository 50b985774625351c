"""The vectors of a trained table as codes: each id keeps the numbers of a few centroids instead of a vector.

============ ========================================= ================================================
scheme       vector of id x                            paper
============ ========================================= ================================================
one          c[z(x)]                                   vector quantisation (Gray, 1984)
product      c_1[z_1(x)], ..., c_m[z_m(x)] in a row    Jegou, Douze and Schmid, TPAMI 2011, section II-B
residual     c_1[z_1(x)] + ... + c_m[z_m(x)]           Chen, Guan and Wang, Sensors 2010
============ ========================================= ================================================

The codes ``z_j`` minimise the distortion ``sum over ids of w_x |v_x - vector of x|^2``, weighted by how often an id
occurs, by k-means in each part: on the columns of a part, or on the remainders of the parts before it.

Rare ids, whose vectors have hardly been trained, are one point, their weighted mean, so that their codes are equal. The
distortion includes the squared distances of rare ids from their mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from distembed.composition import Concat
from distembed.partitions.kmeans import assign, k_means
from distembed.partitions.packed import packed_bytes

Scheme = Literal["one", "product", "residual"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
_MOST_CENTROIDS = {"one": 512, "product": 256, "residual": 256}
_LEAST_PART = 4
"""Fewest columns of a part: shorter parts take more bits than they save, but near the size of the full table."""
PART_BITS = 8
"""Most bits of a code whose scheme is chosen by the bits of an id."""
_IDS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class CodeShape:
    """A scheme with its sizes: ``num_parts`` codes an id, each one of ``num_centroids``."""

    scheme: Scheme
    num_parts: int
    num_centroids: int

    @property
    def composition(self) -> str:
        """The composition of the coded table."""
        return "sum" if self.scheme == "residual" else "concat"

    def __str__(self) -> str:
        return f"{self.scheme} {self.num_parts} x {self.num_centroids}"


@dataclass(frozen=True)
class CodePoints:
    """The points that stand for the ids of tables with common codes: an item table, and its output table if untied.

    Attributes:
        vectors: The points' vectors in each table, on the device that computes.
        weights: The weight of each point: of an id, or of all rare ids together.
        point_of_id: The point of each id.
        bytes_per_number: The bytes of a number of a codebook.
        spread: The weighted squared distance of rare ids from their mean, which no codes of the points change.
    """

    vectors: Sequence[Float[Tensor, "points dim"]]
    weights: Float[Tensor, " points"]
    point_of_id: Int64[Tensor, " ids"]
    bytes_per_number: int
    spread: float = 0.0

    @classmethod
    def of(
        cls,
        tables: Sequence[Float[Tensor, "ids dim"]],
        weights: Float[Tensor, " ids"],
        is_rare: Tensor,
        device: torch.device,
        bytes_per_number: int,
    ) -> CodePoints:
        """Returns a point for each id, and one for all ids that are rare."""
        num_common, has_rare = int((~is_rare).sum()), bool(is_rare.any())
        point_of_id = (~is_rare).cumsum(0).sub_(1).masked_fill_(is_rare, num_common)
        rare_weights = weights.double() * is_rare
        point_weights = torch.cat([weights.double()[~is_rare], rare_weights.sum().view(1)[: int(has_rare)]])
        vectors, spread = list[Tensor](), 0.0
        for table in tables:
            own, filled = torch.empty(len(point_weights), table.shape[1]), 0
            for piece, is_other in zip(table.split(_IDS_AT_ONCE), is_rare.split(_IDS_AT_ONCE), strict=True):
                kept = piece[~is_other]
                own[filled : filled + len(kept)] = kept
                filled += len(kept)
            if has_rare:
                own[num_common:] = mean = _mean(table, rare_weights)
                spread += _spread(table, rare_weights, mean)
            vectors.append(own.to(device))
        return cls(vectors, point_weights.to(device), point_of_id, bytes_per_number, spread)

    @property
    def dim(self) -> int:
        return self.vectors[0].shape[1]

    @cached_property
    def num_codes(self) -> int:
        """The number of stored codes: all ids at the end that have the last id's point share one."""
        differing = (self.point_of_id != self.point_of_id[-1]).nonzero()
        return int(differing[-1]) + 2 if len(differing) else 1

    def codebook_bytes(self, shape: CodeShape) -> int:
        """Returns the bytes of the codebooks of all centroids, in all tables."""
        return len(self.vectors) * shape.num_centroids * sum(_part_dims(shape, self.dim)) * self.bytes_per_number


@dataclass(frozen=True)
class CodedPoints:
    """The code of each point in each part, numbered without gaps.

    Attributes:
        shape: The scheme and its sizes.
        centroids: The centroids of each part, the columns of all tables side by side.
        codes: The codes, on the CPU.
        errors: The weight of each point times its squared distance to the vector of its codes, on the CPU.
        spread: The distortion of ids that are no points of their own.
    """

    shape: CodeShape
    centroids: Sequence[Float[Tensor, "k columns"]]
    codes: Sequence[Int64[Tensor, " points"]]
    errors: Float[Tensor, " points"]
    spread: float

    @classmethod
    def by(
        cls,
        points: CodePoints,
        shape: CodeShape,
        centroids: Sequence[Float[Tensor, "k columns"]],
        balance: float | None = None,
    ) -> CodedPoints:
        """Returns the points in the codes of their nearest centroids, or with ``balance`` of the nearest with room."""
        on_device = [own.to(points.weights.device) for own in centroids]
        codes, squares = _encode(points, shape, on_device, balance)
        return cls(shape, on_device, codes, (points.weights * squares).cpu(), points.spread)

    @property
    def distortion(self) -> float:
        return float(self.errors.sum()) + self.spread

    @property
    def num_rows(self) -> list[int]:
        """The rows of each part's codebook."""
        return [len(part) for part in self.centroids]

    def num_bytes(self, points: CodePoints) -> int:
        """Returns the most bytes of codes and codebooks, in all tables."""
        num_rows, num_codes = self.num_rows, points.num_codes
        dims = _part_dims(self.shape, points.dim)
        books = sum(rows * dim for rows, dim in zip(num_rows, dims, strict=True)) * points.bytes_per_number
        return len(points.vectors) * (books + sum(packed_bytes(num_codes, rows) for rows in num_rows))


def quantise(points: CodePoints, shape: CodeShape, seed: int = 0, balance: float | None = None) -> CodedPoints:
    """Codes the points by a scheme; equal arguments give equal codes on one device.

    The distortion of ``residual`` is that of centroids found one part after another: fitting all parts together
    (:func:`~distembed.serving.convert.tables.fit_table`) lowers it further.

    Args:
        points: The points.
        shape: The scheme and its sizes.
        seed: The seed of the first centroids.
        balance: The most points of a code in each part, in multiples of the mean; None for no bound.
    """
    return CodedPoints.by(points, shape, _centroids(points, shape, seed, balance), balance)


def _centroids(
    points: CodePoints, shape: CodeShape, seed: int, balance: float | None
) -> list[Float[Tensor, "k columns"]]:
    """Returns the centroids of each part that are nearest to a point; memory holds one copy of the points."""
    found: list[Tensor] = []
    rests = _Rests(points.vectors)
    for part, columns in enumerate(_part_columns(shape, points.dim)):
        clusters = k_means(rests.of(columns), points.weights, shape.num_centroids, seed + part, balance=balance)
        used = clusters.codes.bincount(minlength=len(clusters.centroids)) > 0
        found.append(clusters.centroids[used])
        if shape.scheme == "residual" and part + 1 < shape.num_parts:
            rests.subtract(clusters.centroids.float(), clusters.codes)
        del clusters  # whose codes take as much as two columns of the points
    return found


def _encode(
    points: CodePoints, shape: CodeShape, centroids: Sequence[Float[Tensor, "k columns"]], balance: float | None
) -> tuple[list[Int64[Tensor, " points"]], Float[Tensor, " points"]]:
    """Returns the points' codes in each part, on the CPU, and each point's squared distance to the vector of them."""
    rests, squares = _Rests(points.vectors), torch.zeros_like(points.weights)
    codes = list[Tensor]()
    for part, columns in enumerate(_part_columns(shape, points.dim)):
        nearest, distances = assign(rests.of(columns), centroids[part], points.weights, balance)
        codes.append(nearest.cpu())
        squares = distances if shape.scheme == "residual" else squares + distances
        if shape.scheme == "residual" and part + 1 < shape.num_parts:
            rests.subtract(centroids[part].float(), nearest)
    return codes, squares


class _Rests:
    """The vectors of points in several tables, from which centroids are subtracted in a copy."""

    def __init__(self, vectors: Sequence[Float[Tensor, "points dim"]]) -> None:
        self._rests, self._is_copy = vectors, False

    def of(self, columns: range) -> Float[Tensor, "points columns"]:
        """Returns columns of each table side by side: of one table without a copy."""
        own = [rest[:, columns.start : columns.stop] for rest in self._rests]
        return own[0] if len(own) == 1 else torch.cat(own, dim=1)

    def subtract(self, centroids: Float[Tensor, "k columns"], codes: Int64[Tensor, " points"]) -> None:
        """Subtracts each point's centroid, whose columns are all tables' side by side."""
        if not self._is_copy:
            self._rests, self._is_copy = [rest.clone() for rest in self._rests], True
        parts = centroids.split([rest.shape[1] for rest in self._rests], dim=1)
        for rest, own in zip(self._rests, parts, strict=True):
            for chunk, of_chunk in zip(rest.split(_IDS_AT_ONCE), codes.split(_IDS_AT_ONCE), strict=True):
                chunk -= own[of_chunk]


def candidate_shapes(scheme: Scheme | Literal["auto"], dim: int, num_points: int) -> Iterator[CodeShape]:
    """Yields the shapes to try for vectors of ``dim`` numbers, up to as many centroids as there are points.

    A single centroid is the weighted mean in every scheme, so ``auto`` tries it once.
    """
    for name in SCHEMES if scheme == "auto" else (scheme,):
        most = min(num_points, _MOST_CENTROIDS[name])
        sizes = {min(size, most) for size in _sizes(most, with_halves=name == "one")}
        least = 1 if name in ("one", scheme) else 2
        for num_parts in [1] if name == "one" else _part_counts(name, dim):
            yield from (CodeShape(name, num_parts, size) for size in sorted(sizes) if size >= least)
        if name == "product" and dim >= 2 * _LEAST_PART:  # between all other codes and the full table
            yield CodeShape(name, dim // 2, most)


def shape_of_bits(scheme: Scheme | Literal["auto"], bits: int, dim: int) -> CodeShape | None:
    """Returns the shape whose codes take ``bits`` an id, in the fewest parts of up to 8 bits; None where they differ.

    ``auto`` is one codebook up to 8 bits, and parts of the vector above. More bits never give coarser parts, as the
    bits have to divide evenly into the fewest parts.
    """
    if scheme == "auto":
        scheme = "one" if bits <= PART_BITS else "product"
    if scheme == "one":
        return CodeShape("one", 1, 1 << bits) if bits <= PART_BITS + 1 else None
    num_parts = max(2, math.ceil(bits / PART_BITS))
    if bits % num_parts or (scheme == "product" and num_parts > dim):
        return None
    return CodeShape(scheme, num_parts, 1 << (bits // num_parts))


def nearest_bits(scheme: Scheme | Literal["auto"], bits: int, dim: int) -> list[int]:
    """Returns the bits next below and above that :func:`shape_of_bits` has a shape for."""
    good = [own for own in range(1, PART_BITS * max(dim, bits) + 1) if shape_of_bits(scheme, own, dim) is not None]
    return [own for own in good if own < bits][-1:] + [own for own in good if own > bits][:1]


def _sizes(most: int, with_halves: bool) -> list[int]:
    """Returns the powers of 2 up to the first that reaches ``most``, with the numbers half-way between for one part."""
    powers = [1 << bits for bits in range(most.bit_length() + 1)]
    return powers + [3 * power for power in powers if with_halves]


def _part_counts(scheme: Scheme, dim: int) -> list[int]:
    if scheme == "residual":
        return [2]
    counts = [1 << power for power in range(1, dim.bit_length()) if dim >> power >= _LEAST_PART]
    return counts or [min(2, dim)]


def _part_columns(shape: CodeShape, dim: int) -> tuple[range, ...]:
    if shape.scheme == "residual":
        return (range(dim),) * shape.num_parts
    return Concat().columns(dim, shape.num_parts)


def _part_dims(shape: CodeShape, dim: int) -> list[int]:
    return [len(columns) for columns in _part_columns(shape, dim)]


def _mean(vectors: Float[Tensor, "ids dim"], weights: Float[Tensor, " ids"]) -> Float[Tensor, "1 dim"]:
    """Returns the weighted mean of vectors, computed in float64."""
    pieces = zip(weights.split(_IDS_AT_ONCE), vectors.split(_IDS_AT_ONCE), strict=True)
    zero = torch.zeros(vectors.shape[1], dtype=torch.float64, device=vectors.device)
    return (sum((own @ piece.double() for own, piece in pieces), zero) / weights.sum()).float().unsqueeze(0)


def _spread(vectors: Float[Tensor, "ids dim"], weights: Float[Tensor, " ids"], mean: Float[Tensor, "1 dim"]) -> float:
    """Returns the sum over ids of weight times squared distance to the mean."""
    pieces = zip(weights.split(_IDS_AT_ONCE), vectors.split(_IDS_AT_ONCE), strict=True)
    return sum(float(own @ (piece.double() - mean.double()).square().sum(1)) for own, piece in pieces)
