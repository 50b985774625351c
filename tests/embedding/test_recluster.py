"""Re-clustering a table, against k-means of scikit-learn in float64."""

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans

from distembed.base.errors import UserError
from distembed.embedding import CompositionalEmbeddingBagConfig
from distembed.embedding.recluster import Reclustered, recluster, require_clustered
from distembed.partitions import Clustered

N, DIM = 600, 12


def table_of(composition: str = "concat_sum", num_partitions: int = 4) -> CompositionalEmbeddingBagConfig:
    scheme = Clustered(N, num_buckets=20, num_partitions=num_partitions)
    return CompositionalEmbeddingBagConfig("t", N, DIM, ["f"], scheme, composition)


def drawn(table: CompositionalEmbeddingBagConfig) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Weights around some centres, a state for each weight and one for each row."""
    generator = torch.Generator().manual_seed(1)
    weights = []
    for part in table.partition_tables():
        centres = 3 * torch.randn(5, part.dim, generator=generator)
        near = torch.randint(5, (part.num_rows,), generator=generator)
        weights.append(centres[near] + 0.1 * torch.randn(part.num_rows, part.dim, generator=generator))
    states = [
        {"sum": torch.rand(weight.shape, generator=generator), "row": torch.rand(len(weight), generator=generator)}
        for weight in weights
    ]
    return weights, states


def vectors_of(table: CompositionalEmbeddingBagConfig, weights: list[torch.Tensor]) -> np.ndarray:
    return table.combine.embed(weights, table.scheme.rows(torch.arange(N))).double().numpy()


def apply(table: CompositionalEmbeddingBagConfig, found: Reclustered) -> list[torch.Tensor]:
    assert isinstance(table.scheme, Clustered)
    table.scheme.reassign(list(found.rows))
    return [values["weight"] for values in found.values]


@pytest.mark.parametrize(
    ("composition", "num_partitions", "dtype"),
    [
        ("concat_sum", 4, torch.float32),
        ("concat_sum", 3, torch.float32),
        ("sum", 2, torch.float32),
        ("concat_sum", 4, torch.float16),
    ],
)
def test_the_vectors_become_a_minimum_of_k_means(composition: str, num_partitions: int, dtype: torch.dtype) -> None:
    table = table_of(composition, num_partitions)
    require_clustered(table)
    weights, states = drawn(table)
    weights = [weight.to(dtype) for weight in weights]
    counts = torch.from_numpy(np.random.default_rng(0).integers(1, 50, N)).float()
    before = vectors_of(table, [weight.double() for weight in weights])
    after_weights = apply(table, recluster(table, weights, states, counts, seed=3))
    assert all(weight.dtype == dtype for weight in after_weights)
    after = vectors_of(table, after_weights)
    columns = {"concat_sum": [slice(0, 8), slice(8, 12)], "sum": [slice(0, 12)]}[composition]
    for part in columns:
        points, centres = before[:, part], after[:, part]
        distinct = np.unique(centres, axis=0)
        assert 2 <= len(distinct) <= 20
        # scikit-learn, started from these centroids, moves none: they are the weighted means of their nearest points
        fitted = KMeans(len(distinct), init=distinct, n_init=1, max_iter=1, tol=0).fit(
            points, sample_weight=counts.double().numpy()
        )
        distortion = counts.double().numpy() @ ((points - centres) ** 2).sum(1)
        assert distortion == pytest.approx(fitted.inertia_, rel=1e-3)
        nearest = ((points[:, None] - distinct[None]) ** 2).sum(2).argmin(1)
        rounding = 1e-6 if dtype == torch.float32 else 2.0**-10 * np.abs(points).max()
        np.testing.assert_allclose(centres, distinct[nearest], atol=rounding)


def test_stored_rows_carry_the_weighted_mean_of_their_ids_states_and_hashed_rows_start_over() -> None:
    table = table_of()
    weights, states = drawn(table)
    counts = torch.from_numpy(np.random.default_rng(0).integers(1, 50, N)).float()
    old = table.scheme.rows(torch.arange(N)).numpy()
    found = recluster(table, weights, states, counts, seed=3)
    for part in range(2):
        codes, weighed = found.rows[part].numpy(), counts.double().numpy()
        for name, state in states[part].items():
            of_id = state.double().numpy()[old[part]]
            for row in range(20):
                own = codes == row
                expected = np.average(of_id[own], axis=0, weights=weighed[own]) if own.any() else 0 * of_id[0]
                np.testing.assert_allclose(found.values[part][name][row].numpy(), expected, rtol=1e-5)
        assert all(not value.any() for value in found.values[2 + part].values())
        assert found.values[2 + part].keys() == {"weight", "sum", "row"}


def test_equal_arguments_give_equal_clusters_and_leave_the_table() -> None:
    table = table_of()
    weights, states = drawn(table)
    before = vectors_of(table, weights)
    first, second = (recluster(table, weights, states, torch.ones(N), seed=0) for _ in range(2))
    assert torch.equal(first.rows, second.rows)
    assert all(torch.equal(a["weight"], b["weight"]) for a, b in zip(first.values, second.values, strict=True))
    assert np.array_equal(before, vectors_of(table, weights))


def test_a_composition_whose_parts_are_no_sums_is_refused() -> None:
    with pytest.raises(UserError, match="table 't' has partition clustered and composition 'product'.*concat_sum"):
        require_clustered(table_of("product", 2))
