"""Weighted k-means, compared with distances and means in NumPy's float64."""

import math

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans

from distembed.base.errors import UserError
from distembed.partitions import kmeans
from distembed.partitions.kmeans import assign, k_means


def drawn(num_points: int, dim: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws points in clumps, with weights as skewed as the popularity of ids."""
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(7, dim))[rng.integers(0, 7, num_points)] + 0.2 * rng.normal(size=(num_points, dim))
    return torch.from_numpy(points.astype(np.float32)), torch.from_numpy(rng.pareto(1.0, num_points) + 1e-3)


def distortion(points: torch.Tensor, weights: torch.Tensor, centroids: torch.Tensor) -> float:
    differences = points.double().numpy()[:, None] - centroids.double().numpy()[None]
    return float((weights.numpy() * np.square(differences).sum(2).min(1)).sum())


@pytest.mark.parametrize("num_points, k", [(1, 1), (1, 5), (2, 2), (40, 3), (500, 16), (200, 199)])
def test_no_turn_raises_the_distortion(num_points: int, k: int) -> None:
    points, weights = drawn(num_points)
    found = [k_means(points, weights, k, most_turns=turns) for turns in range(12)]
    for clusters in found:
        expected = distortion(points, weights, clusters.centroids)
        assert clusters.distortion == pytest.approx(expected, rel=1e-9, abs=1e-12)
        own = np.square(points.double().numpy() - clusters.centroids[clusters.codes].numpy()).sum(1)
        assert (weights.numpy() * own).sum() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert all(later.distortion <= earlier.distortion for earlier, later in zip(found, found[1:], strict=False))


def test_at_the_end_centroids_are_the_means_of_their_points() -> None:
    points, weights = drawn(300)
    clusters = k_means(points, weights, 8, most_turns=500)
    for code in range(8):
        own = (clusters.codes == code).numpy()
        mean = np.average(points.double().numpy()[own], axis=0, weights=weights.numpy()[own])
        assert clusters.centroids[code].numpy() == pytest.approx(mean, abs=0.02)


@pytest.mark.parametrize("k", [5, 6, 60])
def test_as_many_clusters_as_distinct_points_leave_no_error(k: int) -> None:
    distinct, _ = drawn(5)
    order = torch.from_numpy(np.random.default_rng(0).integers(0, 5, 200))
    order[:5] = torch.arange(5)
    clusters = k_means(distinct[order], torch.rand(200) + 0.01, k)
    assert clusters.distortion == 0.0 and len(clusters.centroids) == 5
    assert clusters.centroids[clusters.codes].float().equal(distinct[order])


def test_it_comes_as_near_as_scikit_learn() -> None:
    points, weights = drawn(1000)
    theirs = KMeans(12, n_init=1, random_state=0).fit(points.double().numpy(), sample_weight=weights.numpy())
    ours = min(k_means(points, weights, 12, seed).distortion for seed in range(3))
    assert ours <= 1.1 * theirs.inertia_


def test_a_cluster_without_points_takes_the_worst_point() -> None:
    points, weights = drawn(50)
    far = torch.full((1, 3), 1e3, dtype=torch.float64)
    centroids = torch.cat([points[:2].double(), far])
    codes, squares = assign(points, centroids)
    assert not (codes == 2).any()
    moved = kmeans._moved(points, weights, centroids, codes, weights * squares)
    assert moved[2].equal(points[(weights * squares).argmax()].double())
    assert distortion(points, weights, moved) < distortion(points, weights, centroids)


def test_equal_seeds_give_equal_clusters() -> None:
    points, weights = drawn(400)
    first, second = (k_means(points, weights, 9, seed=3) for _ in range(2))
    assert first.centroids.equal(second.centroids) and first.codes.equal(second.codes)
    assert not k_means(points, weights, 9, seed=4).centroids.equal(first.centroids)


def test_many_points_are_clustered_by_a_sample_and_seen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    points, weights = drawn(20_000)
    whole = k_means(points, weights, 7)
    monkeypatch.setattr(kmeans, "MOST_POINTS", 2000)
    monkeypatch.setattr(kmeans, "_DISTANCES_AT_ONCE", 999)
    sampled = k_means(points, weights, 7)
    assert sampled.distortion == pytest.approx(distortion(points, weights, sampled.centroids), rel=1e-9)
    assert sampled.distortion < 1.3 * whole.distortion
    assert sampled.codes.equal(k_means(points, weights, 7).codes)


def test_no_clusters_are_refused() -> None:
    with pytest.raises(UserError, match="num_clusters is 0"):
        k_means(*drawn(3), 0)


@pytest.mark.parametrize(
    "num_points, k, balance", [(1, 1, 1.0), (40, 3, 1.0), (41, 3, 1.0), (500, 16, 1.3), (300, 9, 2)]
)
def test_no_cluster_has_more_points_than_the_bound(num_points: int, k: int, balance: float) -> None:
    points, weights = drawn(num_points)
    clusters = k_means(points, weights, k, balance=balance)
    sizes = np.bincount(clusters.codes, minlength=k)
    assert sizes.max() <= math.ceil(balance * num_points / k) and sizes.sum() == num_points
    own = np.square(points.double().numpy() - clusters.centroids[clusters.codes].numpy()).sum(1)
    assert clusters.distortion == pytest.approx(float(weights.numpy() @ own), rel=1e-9, abs=1e-12)
    # a bound that nothing exceeds changes nothing
    assert k_means(points, weights, k, balance=k).codes.equal(k_means(points, weights, k).codes)


def test_the_points_that_lose_most_take_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two centroids, the assignment of least distortion puts the points of the greatest weighted gaps first."""
    points, weights = drawn(60)
    centroids = points[:2].double()
    monkeypatch.setattr(kmeans, "_DISTANCES_AT_ONCE", 50)
    codes, squares = assign(points, centroids, weights, balance=1.0)
    differences = points.double().numpy()[:, None] - centroids.numpy()[None]
    costs = weights.numpy()[:, None] * np.square(differences).sum(2)
    best = costs[:, 1].sum() + np.sort(costs[:, 0] - costs[:, 1])[:30].sum()
    assert np.bincount(codes).tolist() == [30, 30]
    assert float(weights @ squares) == pytest.approx(best, rel=1e-9)


def test_a_bound_below_the_mean_is_refused() -> None:
    with pytest.raises(UserError, match="balance is 0.5; give 1 or more"):
        k_means(*drawn(3), 2, balance=0.5)


def test_rare_points_get_centroids_though_the_sample_has_few_distinct_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kmeans, "MOST_POINTS", 400)
    points = torch.randn(1500, 3, generator=torch.Generator().manual_seed(0))
    points[1300:] = points[1100:1300]  # equal points share a centroid
    weights = torch.full((1500,), 1e-6)
    weights[:50] = 1.0  # of which the sample consists
    clusters = k_means(points, weights, 300)
    assert len(clusters.codes.unique()) == 300
    assert clusters.distortion == pytest.approx(distortion(points, weights.double(), clusters.centroids), rel=1e-9)
    assert k_means(points, weights, 1500).distortion == pytest.approx(0, abs=1e-12)
