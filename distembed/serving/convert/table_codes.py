"""The vectors of a trained table as codes: each id keeps the numbers of a few centroids instead of a vector.

============ ========================================= ================================================
scheme       vector of id x                            paper
============ ========================================= ================================================
one          c[z(x)]                                   vector quantisation (Gray, 1984)
product      c_1[z_1(x)], ..., c_m[z_m(x)] in a row    Jegou, Douze and Schmid, TPAMI 2011, section II-B
residual     c_1[z_1(x)] + ... + c_m[z_m(x)]           Chen, Guan and Wang, Sensors 2010
============ ========================================= ================================================

The codes ``z_j`` minimise the distortion ``sum over ids of w_x |v_x - vector of x|^2``, weighted by how often an id
occurs, by k-means in each part: on the columns of a part, or on what the parts before have left over. Rare ids, whose
vectors have hardly been trained, are one point, their weighted mean, so that their codes are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from distembed.composition import Concat
from distembed.partitions.kmeans import k_means
from distembed.partitions.packed import packed_bytes

Scheme = Literal["one", "product", "residual"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
_MOST_CENTROIDS = {"one": 512, "product": 256, "residual": 256}
_LEAST_PART = 4
"""Fewest columns of a part: shorter parts take more bits than they save."""
_MOST_PARTS = 8
_PART_BITS = 8
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
    """

    vectors: Sequence[Float[Tensor, "points dim"]]
    weights: Float[Tensor, " points"]
    point_of_id: Int64[Tensor, " ids"]
    bytes_per_number: int

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
        common = (~is_rare).nonzero().squeeze(1)
        point_of_id = torch.full((len(is_rare),), len(common))
        point_of_id[common] = torch.arange(len(common))
        weights = weights.double()
        rare_weights = weights * is_rare
        total = rare_weights.sum()
        vectors = [table[common].float() for table in tables]
        weights = weights[common]
        if float(total):
            vectors = [torch.cat([own, _mean(full, rare_weights)]) for own, full in zip(vectors, tables, strict=True)]
            weights = torch.cat([weights, total.view(1)])
        return cls([own.to(device) for own in vectors], weights.to(device), point_of_id, bytes_per_number)

    @property
    def num_codes(self) -> int:
        """The number of stored codes: all ids at the end that have the last id's point share one."""
        differing = (self.point_of_id != self.point_of_id[-1]).nonzero()
        return int(differing[-1]) + 2 if len(differing) else 1

    @property
    def dim(self) -> int:
        return self.vectors[0].shape[1]

    def codebook_bytes(self, shape: CodeShape) -> int:
        """Returns the bytes of the codebooks of all centroids, in all tables."""
        return len(self.vectors) * shape.num_centroids * sum(_part_dims(shape, self.dim)) * self.bytes_per_number


@dataclass(frozen=True)
class CodedPoints:
    """The code of each point in each part, numbered without gaps, and the distortion."""

    shape: CodeShape
    codes: Sequence[Int64[Tensor, " points"]]
    distortion: float

    @property
    def num_rows(self) -> list[int]:
        """The rows of each part's codebook."""
        return [int(part.max()) + 1 for part in self.codes]

    def num_bytes(self, points: CodePoints) -> int:
        """Returns the most bytes of codes and codebooks, in all tables."""
        num_rows, num_codes = self.num_rows, points.num_codes
        dims = _part_dims(self.shape, points.dim)
        books = sum(rows * dim for rows, dim in zip(num_rows, dims, strict=True)) * points.bytes_per_number
        return len(points.vectors) * (books + sum(packed_bytes(num_codes, rows) for rows in num_rows))


def quantise(points: CodePoints, shape: CodeShape, seed: int = 0) -> CodedPoints:
    """Codes the points by a scheme; equal arguments give equal codes.

    The distortion of ``residual`` is that of centroids found one part after another: fitting all parts together
    (:func:`~distembed.serving.convert.tables.fit_table`) lowers it further.
    """
    codes: list[Tensor] = []
    distortion = 0.0
    rests = [own.double() for own in points.vectors] if shape.scheme == "residual" else list(points.vectors)
    for part, columns in enumerate(_part_columns(shape, points.dim)):
        own = torch.cat([rest[:, columns.start : columns.stop] for rest in rests], dim=1)
        clusters = k_means(own, points.weights, shape.num_centroids, seed + part)
        _, numbered = clusters.codes.unique(return_inverse=True)
        codes.append(numbered.cpu())
        if shape.scheme == "residual":
            nearest = clusters.centroids[clusters.codes].split(points.dim, dim=1)
            rests = [rest - found for rest, found in zip(rests, nearest, strict=True)]
            distortion = clusters.distortion
        else:
            distortion += clusters.distortion
    return CodedPoints(shape, codes, distortion)


def candidate_shapes(scheme: Scheme | Literal["auto"], dim: int, num_points: int) -> Iterator[CodeShape]:
    """Yields the shapes to try for vectors of ``dim`` numbers, up to as many centroids as there are points."""
    for name in SCHEMES if scheme == "auto" else (scheme,):
        most = min(num_points, _MOST_CENTROIDS[name])
        sizes = {min(size, most) for size in _sizes(most, with_halves=name == "one")}
        for num_parts in [1] if name == "one" else _part_counts(name, dim):
            yield from (CodeShape(name, num_parts, size) for size in sorted(sizes))


def shape_of_bits(scheme: Scheme | Literal["auto"], bits: int, dim: int) -> CodeShape | None:
    """Returns the shape whose codes take ``bits`` an id, with parts of up to 8 bits; None where no shape does.

    ``auto`` is one codebook up to 8 bits, and parts of the vector above.
    """
    if scheme == "auto":
        scheme = "one" if bits <= _PART_BITS else "product"
    if scheme == "one":
        return CodeShape("one", 1, 1 << bits) if bits <= _PART_BITS + 1 else None
    most = dim if scheme == "product" else bits
    fitting = [parts for parts in range(2, most + 1) if bits % parts == 0 and bits // parts <= _PART_BITS]
    return CodeShape(scheme, fitting[0], 1 << (bits // fitting[0])) if fitting else None


def _sizes(most: int, with_halves: bool) -> list[int]:
    """Returns the powers of 2 up to the first that reaches ``most``, with the numbers half-way between for one part."""
    powers = [1 << bits for bits in range(most.bit_length() + 1)]
    return powers + [3 * power for power in powers if with_halves]


def _part_counts(scheme: Scheme, dim: int) -> list[int]:
    if scheme == "residual":
        return [2]
    return [parts for parts in (2, 4, _MOST_PARTS) if dim // parts >= _LEAST_PART] or [min(2, dim)]


def _part_columns(shape: CodeShape, dim: int) -> tuple[range, ...]:
    if shape.scheme == "residual":
        return (range(dim),) * shape.num_parts
    return Concat().columns(dim, shape.num_parts)


def _part_dims(shape: CodeShape, dim: int) -> list[int]:
    return [len(columns) for columns in _part_columns(shape, dim)]


def _mean(vectors: Float[Tensor, "ids dim"], weights: Float[Tensor, " ids"]) -> Float[Tensor, "1 dim"]:
    """Returns the weighted mean of vectors, computed in float64."""
    pieces = zip(weights.split(_IDS_AT_ONCE), vectors.split(_IDS_AT_ONCE), strict=True)
    sums = sum((own @ piece.double() for own, piece in pieces), torch.zeros(vectors.shape[1], dtype=torch.float64))
    return (sums / weights.sum()).float().unsqueeze(0)
