"""Weighted k-means: few centroids near many points (Lloyd, "Least squares quantization in PCM", 1982).

It lowers the distortion ``sum over points x of w_x |x - c(x)|^2`` by two steps in turn; no step can raise it::

    assign   each point to its nearest centroid
    move     each centroid to the weighted mean of its points; one without points to the point that adds most

The first centroids are drawn one after another, a point with a probability in proportion to its weight times its
squared distance to the centroids before (k-means++, Arthur and Vassilvitskii, SODA 2007).

With ``balance``, no cluster has more than ``ceil(balance * points / k)`` points: in place of its nearest centroid, a
point may have to take the nearest that has room. Points that would lose most by it, ``w_x (|x - c'|^2 - |x - c|^2)``
with the next nearest centroid c', go first. The bound is one of points, not of weights: a single popular id may weigh
more than all others.

Of more than :data:`MOST_POINTS` points, k-means clusters a sample, drawn in proportion to the weights. A sample with
few distinct points gives too few centroids: the missing ones are drawn from all points at once, in proportion to weight
times squared distance (as in k-means||, Bahmani et al., VLDB 2012). All points take part in one last turn.

This is own code: scikit-learn's ``KMeans`` runs on no GPU, is no dependency of the product, and draws other random
numbers in other versions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from distembed.base.errors import UserError
from distembed.partitions.base import require_positive

MOST_POINTS = 1 << 16
_DISTANCES_AT_ONCE = 1 << 22
_LEAST_GAIN = 1e-4
_MOST_FILLS = 5
"""Draws of missing centroids, each of as many points as are missing; equal points are drawn again."""


@dataclass(frozen=True)
class Clusters:
    """Points in clusters.

    Attributes:
        centroids: The vector of each cluster; k of them, or fewer where there are fewer distinct points.
        codes: The cluster of each point, whose centroid is nearest, or with ``balance`` the nearest that has room.
        distortion: The sum over points of weight times squared distance to the centroid.
    """

    centroids: Float[Tensor, "k dim"]
    codes: Int64[Tensor, " points"]
    distortion: float


def k_means(
    points: Float[Tensor, "points dim"],
    weights: Float[Tensor, " points"],
    num_clusters: int,
    seed: int = 0,
    most_turns: int = 25,
    balance: float | None = None,
) -> Clusters:
    """Clusters points; equal arguments give equal clusters.

    Args:
        points: The points, at least one, in float32 or float64, on any device.
        weights: A positive weight of each point.
        num_clusters: The most clusters, k. With as many as there are distinct points, the distortion is 0.
        seed: The seed of the first centroids.
        most_turns: The most turns after the first assignment; fewer are taken once one gains less than a
            ten-thousandth.
        balance: The most points of a cluster, in multiples of the mean number, at least 1; None for no bound.

    Raises:
        UserError: ``num_clusters`` or ``balance`` is below 1.
    """
    require_balance("balance", balance)
    require_positive("num_clusters", num_clusters, "It is the number of centroids.")
    generator = torch.Generator().manual_seed(seed)
    weights = weights.double()
    if len(points) <= MOST_POINTS:
        centroids, is_exact = _first_centroids(points, weights, num_clusters, generator)
        return _improved(points, weights, centroids, 0 if is_exact else most_turns, balance)
    drawn = _draw(weights, MOST_POINTS, generator)
    sampled, counts = drawn.unique(return_counts=True)
    sample, counts = points[sampled], counts.double()
    centroids, _ = _first_centroids(sample, counts, num_clusters, generator)
    centroids = _improved(sample, counts, centroids, most_turns, balance).centroids
    centroids = _filled(points, weights, centroids, num_clusters, generator)
    return _improved(points, weights, centroids, 1, balance)


def require_balance(field: str, balance: float | None) -> None:
    """Raises a :class:`UserError` for a bound below the mean number of points."""
    if balance is not None and not 1 <= balance < math.inf:
        raise UserError(f"{field} is {balance}; give 1 or more: 2 for clusters of at most twice the mean size.")


def assign(
    points: Float[Tensor, "points dim"],
    centroids: Float[Tensor, "k dim"],
    weights: Float[Tensor, " points"] | None = None,
    balance: float | None = None,
) -> tuple[Int64[Tensor, " points"], Float[Tensor, " points"]]:
    """Returns the centroid of each point and the squared distance to it.

    It is the nearest, the first of equally near ones; with ``balance``, which needs ``weights``, the nearest with room.
    """
    if balance is not None and weights is not None:
        most = math.ceil(balance * len(points) / len(centroids))
        return _assign_within(points, weights, centroids, most)
    codes = torch.empty(len(points), dtype=torch.int64, device=points.device)
    squares = torch.empty(len(points), dtype=torch.float64, device=points.device)
    for rows, chunk in _chunks(points, len(centroids)):
        # |x - c|^2 = |x|^2 - 2 x c + |c|^2, of which |x|^2 does not decide; the distance itself is computed exactly
        scores = torch.addmm(centroids.square().sum(1), chunk, centroids.T, alpha=-2.0)
        codes[rows] = scores.argmin(1)
        squares[rows] = (chunk - centroids[codes[rows]]).square().sum(1)
    return codes, squares


def _assign_within(
    points: Float[Tensor, "points dim"],
    weights: Float[Tensor, " points"],
    centroids: Float[Tensor, "k dim"],
    most: int,
) -> tuple[Int64[Tensor, " points"], Float[Tensor, " points"]]:
    """Assigns at most so many points to each centroid, which has to leave room for all points.

    In each round every waiting point asks for its nearest open centroid. Centroids take the askers that would lose
    most, and close where they are full: at least one does, or no point waits any more.
    """
    codes = torch.full((len(points),), -1, device=points.device)
    room = torch.full((len(centroids),), most, device=points.device)
    waiting = torch.arange(len(points), device=points.device)
    while len(waiting):
        is_open = (room > 0).nonzero().squeeze(1)
        nearest, losses = (
            torch.empty_like(waiting),
            torch.empty(len(waiting), dtype=torch.float64, device=points.device),
        )
        own = centroids[is_open]
        for rows in torch.arange(len(waiting), device=points.device).split(_chunk_size(points, len(own))):
            scores = torch.addmm(own.square().sum(1), points[waiting[rows]].double(), own.T, alpha=-2.0)
            best = scores.topk(min(2, len(own)), dim=1, largest=False)
            nearest[rows] = is_open[best.indices[:, 0]]
            losses[rows] = weights[waiting[rows]] * (best.values[:, -1] - best.values[:, 0])
        order = losses.argsort(descending=True, stable=True)
        order = order[nearest[order].argsort(stable=True)]  # askers of one centroid together, the greatest loss first
        askers = nearest[order].bincount(minlength=len(centroids))
        place = torch.arange(len(order), device=points.device) - (askers.cumsum(0) - askers)[nearest[order]]
        taken = order[place < room[nearest[order]]]
        codes[waiting[taken]] = nearest[taken]
        room = room - nearest[taken].bincount(minlength=len(centroids))
        waiting = waiting[codes[waiting] < 0]
    squares = [(chunk - centroids[codes[rows]]).square().sum(1) for rows, chunk in _chunks(points, 1)]
    return codes, torch.cat(squares)


def _improved(
    points: Float[Tensor, "points dim"],
    weights: Float[Tensor, " points"],
    centroids: Float[Tensor, "k dim"],
    most_turns: int,
    balance: float | None,
) -> Clusters:
    """Returns the clusters after at most so many turns from the given centroids."""
    codes, squares = assign(points, centroids, weights, balance)
    distortion = float(weights @ squares)
    for _ in range(most_turns):
        moved = _moved(points, weights, centroids, codes, weights * squares)
        new_codes, new_squares = assign(points, moved, weights, balance)
        gained = distortion - float(weights @ new_squares)
        if gained <= 0:  # a minimum, up to rounding
            break
        centroids, codes, squares, distortion = moved, new_codes, new_squares, distortion - gained
        if gained <= _LEAST_GAIN * distortion:
            break
    return Clusters(centroids, codes, distortion)


def _moved(
    points: Float[Tensor, "points dim"],
    weights: Float[Tensor, " points"],
    centroids: Float[Tensor, "k dim"],
    codes: Int64[Tensor, " points"],
    errors: Float[Tensor, " points"],
) -> Float[Tensor, "k dim"]:
    """Returns the mean of each cluster's points; clusters without points take the points of the largest errors."""
    totals = torch.zeros(len(centroids), 1, dtype=torch.float64, device=points.device)
    sums = torch.zeros_like(centroids)
    for rows, chunk in _chunks(points, len(centroids)):
        weighted = torch.cat([chunk * weights[rows].unsqueeze(1), weights[rows].unsqueeze(1)], dim=1)
        added = _sum_by_code(weighted, codes[rows], len(centroids))
        sums, totals = sums + added[:, :-1], totals + added[:, -1:]
    moved = torch.where(totals > 0, sums / totals, centroids)
    empty = (totals.squeeze(1) == 0).nonzero().squeeze(1)
    if len(empty):
        worst = errors.topk(min(len(empty), len(points))).indices
        moved[empty[: len(worst)]] = points[worst].double()
    return moved


def _sum_by_code(
    values: Float[Tensor, "points columns"], codes: Int64[Tensor, " points"], k: int
) -> Float[Tensor, "k columns"]:
    """Returns the sum of the values of each code, in an order that does not change: CUDA's ``index_add_`` has none."""
    if values.is_cuda:
        return torch.nn.functional.one_hot(codes, k).double().T @ values
    return values.new_zeros(k, values.shape[1]).index_add_(0, codes, values)


def _first_centroids(
    points: Float[Tensor, "points dim"], weights: Float[Tensor, " points"], k: int, generator: torch.Generator
) -> tuple[Float[Tensor, "k dim"], bool]:
    """Returns up to k distinct points drawn by k-means++, and whether each point equals one of them."""
    chosen: list[Tensor] = []
    squares = torch.ones(len(points), dtype=torch.float64, device=points.device)
    while len(chosen) < min(k, len(points)):
        centroid = points[int(_draw(weights * squares, 1, generator))].double()
        for rows, chunk in _chunks(points, 1):
            distances = (chunk - centroid).square().sum(1)
            squares[rows] = torch.minimum(squares[rows], distances) if chosen else distances
        chosen.append(centroid)
        if not bool(squares.any()):
            break
    return torch.stack(chosen), not bool(squares.any())


def _filled(
    points: Float[Tensor, "points dim"],
    weights: Float[Tensor, " points"],
    centroids: Float[Tensor, "found dim"],
    k: int,
    generator: torch.Generator,
) -> Float[Tensor, "k dim"]:
    """Returns k centroids: the given ones and points drawn by weighted error; fewer where there are few points."""
    for _ in range(_MOST_FILLS):
        if len(centroids) >= k:
            break
        errors = (weights * assign(points, centroids)[1]).cpu()
        # the points of the earliest arrivals at rates of their errors are a draw without replacement
        arrivals = torch.empty_like(errors).exponential_(generator=generator) / errors
        count = min(k - len(centroids), int(errors.count_nonzero()))
        drawn = arrivals.topk(count, largest=False).indices.sort().values.to(points.device)
        centroids = torch.cat([centroids, points[drawn].double().unique(dim=0)])
    return centroids


def _draw(weights: Float[Tensor, " points"], count: int, generator: torch.Generator) -> Int64[Tensor, " count"]:
    """Returns places drawn in proportion to weights; ``torch.multinomial`` takes no more than 2^24 of them."""
    ends = weights.cpu().cumsum(0)
    drawn = torch.rand(count, dtype=torch.float64, generator=generator) * ends[-1]
    places = torch.searchsorted(ends, drawn, right=True).clamp(max=int(torch.searchsorted(ends, ends[-1])))
    return places.to(weights.device)


def _chunks(points: Float[Tensor, "points dim"], k: int) -> Iterator[tuple[slice, Float[Tensor, "chunk dim"]]]:
    """Yields pieces of the points in float64 with their places, few enough for their distances to k centroids."""
    size = _chunk_size(points, k)
    for start in range(0, len(points), size):
        rows = slice(start, min(start + size, len(points)))
        yield rows, points[rows].double()


def _chunk_size(points: Float[Tensor, "points dim"], k: int) -> int:
    return max(1, _DISTANCES_AT_ONCE // max(k, points.shape[1]))
