import itertools

import pytest
import torch

from distembed.base.errors import UserError
from distembed.composition import COMPOSITIONS, TensorTrain
from distembed.embedding.config import CompositionalEmbeddingBagConfig
from distembed.embedding.settings import ManagedConfig
from distembed.partitions import PARTITIONS, Explicit, MixedRadix, Partition, QuotientRemainder
from distembed.serving.convert import fit_table, full_vectors
from distembed.serving.convert.tables import carried_sums

N, DIM = 60, 8
FITTED = ("product", "sum", "concat", "tensor_train")
ARITHMETIC = [name for name in PARTITIONS if name != "explicit"]


def scheme_of(name: str) -> Partition:
    if name == "explicit":
        return Explicit(N, [torch.arange(N) % 7, torch.arange(N) // 7])
    if name in ("multi_hash", "clustered"):
        # Every pair of rows has an id, as in the arithmetic schemes. A product of rows that few ids join ends at a
        # minimum that depends on the initial weights, as the module says.
        scheme = PARTITIONS[name](N, num_buckets=4)
        assert len(scheme.rows(torch.arange(N)).unique(dim=1).T) == 16
        return scheme
    return PARTITIONS[name](N, **({"collisions": 4} if name in ("remainder", "quotient_remainder") else {}))


def table_of(scheme: Partition, composition: str, **settings: object) -> CompositionalEmbeddingBagConfig:
    combine = TensorTrain(2) if composition == "tensor_train" else composition  # at rank 8, every fit is exact
    return CompositionalEmbeddingBagConfig("t", N, DIM, ["f"], scheme, combine, seed=3, **settings)


def drawn(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    counts = (1000.0 / torch.arange(1, N + 1)).long() - 16
    return torch.randn(N, DIM, generator=generator), counts


def weighted_error(vectors: torch.Tensor, composed: torch.Tensor, weights: torch.Tensor) -> float:
    return float((weights.double().unsqueeze(1) * (vectors.double() - composed.detach().double()).square()).sum())


@pytest.mark.parametrize("composition", FITTED)
@pytest.mark.parametrize("partition", PARTITIONS)
def test_no_small_step_of_any_number_comes_nearer(partition: str, composition: str) -> None:
    """The gradient of the weighted squared distance, by autograd, is near zero where the fit has ended."""
    vectors, counts = drawn()
    table = table_of(scheme_of(partition), composition)
    fitted = fit_table(table, vectors, counts)
    weights = [weight.double().requires_grad_() for weight in fitted.weights]
    composed = table.combine.embed(weights, table.scheme.rows(torch.arange(N)))
    own = torch.where(counts > 0, counts.double(), 1e-3).unsqueeze(1)
    error = (own * (vectors.double() - composed).square()).sum()
    initial = [part.init(torch.empty(part.num_rows, part.dim)).double() for part in table.partition_tables()]
    at_start = weighted_error(vectors, table.combine.embed(initial, table.scheme.rows(torch.arange(N))), own.squeeze(1))
    assert float(error.detach()) <= at_start
    # one step of gradient descent with the best step size along it gains less than a hundredth of the error
    gradients = torch.autograd.grad(error, weights)
    norm = sum(float(gradient.square().sum()) for gradient in gradients)
    for step in torch.logspace(-8, 0, 25):
        moved = [w - step * g for w, g in zip(weights, gradients, strict=True)]
        after = weighted_error(vectors, table.combine.embed(moved, table.scheme.rows(torch.arange(N))), own.squeeze(1))
        assert after >= float(error.detach()) * 0.99 - 1e-6, (float(step), norm)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_a_sum_is_as_near_as_numpys_least_squares(partition: str) -> None:
    vectors, counts = drawn()
    table = table_of(scheme_of(partition), "sum")
    fitted = fit_table(table, vectors, counts)
    rows = table.scheme.rows(torch.arange(N))
    design = torch.cat(
        [torch.nn.functional.one_hot(own, n) for own, n in zip(rows, table.scheme.num_rows, strict=True)], dim=1
    ).double()
    weights = torch.where(counts > 0, counts.double(), 1e-3)
    root = weights.sqrt().unsqueeze(1)
    exact = torch.linalg.lstsq(design * root, vectors.double() * root, driver="gelsd").solution
    best = weighted_error(vectors, design @ exact, weights)
    found = weighted_error(vectors, full_vectors(table, fitted.weights), weights)
    assert best <= found + 1e-6
    assert found <= best * 1.01 + 1e-6


@pytest.mark.parametrize("composition", FITTED)
@pytest.mark.parametrize("partition", PARTITIONS)
def test_what_the_table_can_compose_is_met(partition: str, composition: str) -> None:
    # of mixed radix's 64 pairs of rows no id has 4, where a tensor train ends at another minimum
    has_all_pairs = partition != "mixed_radix" or composition != "tensor_train"
    table = table_of(scheme_of(partition) if has_all_pairs else MixedRadix(N, moduli=[10, 6]), composition)
    generator = torch.Generator().manual_seed(1)
    given = [torch.rand(p.num_rows, p.dim, generator=generator) + 0.5 for p in table.partition_tables()]
    vectors = full_vectors(table, given)
    fitted = fit_table(table, vectors)
    assert torch.allclose(full_vectors(table, fitted.weights), vectors, atol=1e-2)
    assert fitted.error.variance_left < 1e-4


def test_a_product_of_two_is_the_first_singular_pair_of_each_column() -> None:
    """With equal weights and all pairs of rows, by numpy's singular values."""
    n, m = 48, 12
    table = CompositionalEmbeddingBagConfig("t", n, 4, ["f"], QuotientRemainder(n, num_buckets=m), "product")
    vectors = torch.randn(n, 4, generator=torch.Generator().manual_seed(0))
    error = weighted_error(vectors, full_vectors(table, fit_table(table, vectors).weights), torch.ones(n))
    by_quotient = vectors.double().view(n // m, m, 4)
    singular = [torch.linalg.svdvals(by_quotient[:, :, c]) for c in range(4)]
    best = sum(float(values[1:].square().sum()) for values in singular)
    second = min(float(values[0] ** 2 - values[1] ** 2) for values in singular)
    assert best <= error + 1e-6 and error <= best + 0.05 * max(second, best)


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_two_cores_are_the_truncated_singular_value_decomposition(rank: int) -> None:
    """With equal weights and all pairs of rows, by the singular values of the matrix [n_1 d_1, n_2 d_2]."""
    n, m, dims = 48, 12, (4, 2)
    scheme = QuotientRemainder(n, num_buckets=m)
    table = CompositionalEmbeddingBagConfig("t", n, 8, ["f"], scheme, TensorTrain(rank, dims))
    scales = torch.arange(1, n + 1).pow(-0.5).unsqueeze(1)
    vectors = torch.randn(n, 8, generator=torch.Generator().manual_seed(0)) * scales
    fitted = fit_table(table, vectors)
    error = weighted_error(vectors, full_vectors(table, fitted.weights), torch.ones(n))
    matrix = vectors.double().view(n // m, m, *dims).permute(1, 2, 0, 3).reshape(m * dims[0], -1)
    best = float(torch.linalg.svdvals(matrix)[rank:].square().sum())
    assert best - 1e-6 <= error <= best * 1.02 + 1e-6
    assert float(fitted.weights[1].square().mean()) == pytest.approx(1 / rank)


@pytest.mark.parametrize("ranks", [[2, 2], [1, 3]])
def test_three_cores_are_found_again(ranks: list[int]) -> None:
    n = 60
    scheme = MixedRadix(n, moduli=[5, 4, 3])
    table = CompositionalEmbeddingBagConfig("t", n, 8, ["f"], scheme, TensorTrain(ranks), seed=1)
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(part.num_rows, part.dim, generator=generator) for part in table.partition_tables()]
    vectors = full_vectors(table, given)
    assert fit_table(table, vectors, torch.arange(n)).error.variance_left < 1e-6


@pytest.mark.parametrize("composition", FITTED)
def test_carried_sums_are_squared_derivatives_times_the_full_tables_sums(composition: str) -> None:
    """Each number's derivatives by autograd, one column of one id at a time."""
    table = table_of(scheme_of("quotient_remainder"), composition)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(part.num_rows, part.dim, generator=generator) for part in table.partition_tables()]
    sums = torch.rand(N, DIM, generator=generator)
    expected = [torch.zeros_like(weight) for weight in weights]
    leaves = [weight.clone().requires_grad_() for weight in weights]
    composed = table.combine.embed(leaves, table.scheme.rows(torch.arange(N)))
    for i, c in itertools.product(range(N), range(DIM)):
        derivatives = torch.autograd.grad(composed[i, c], leaves, retain_graph=True)
        for own, derivative in zip(expected, derivatives, strict=True):
            own += sums[i, c] * derivative.square()
    for found, own in zip(carried_sums(table, weights, sums), expected, strict=True):
        assert torch.allclose(found, own, rtol=1e-4)


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_full_to_full_and_back_is_exact(composition: str) -> None:
    vectors, counts = drawn()
    vectors[0, 0] = -0.0
    table = table_of(scheme_of("naive"), composition)
    fitted = fit_table(table, vectors, counts)
    back = full_vectors(table, fitted.weights)
    assert torch.equal(back.view(torch.int32), vectors.view(torch.int32))
    assert (fitted.error.variance_left, fitted.error.worst_distance) == (0.0, 0.0)


def test_hashed_ids_get_the_weighted_mean_and_the_error_is_that_of_numpy() -> None:
    vectors, counts = drawn()
    table = table_of(scheme_of("remainder"), "product")
    fitted = fit_table(table, vectors, counts)
    weights = torch.where(counts > 0, counts.double(), 1e-3)
    rows = torch.arange(N) % table.scheme.num_rows[0]
    for row in range(table.scheme.num_rows[0]):
        own = rows == row
        mean = (weights[own].unsqueeze(1) * vectors[own].double()).sum(0) / weights[own].sum()
        assert torch.allclose(fitted.weights[0][row].double(), mean, atol=1e-6)
    distances = (vectors.double() - fitted.weights[0][rows].double()).square().sum(1)
    center = (weights.unsqueeze(1) * vectors.double()).sum(0) / weights.sum()
    variance = float(weights @ (vectors.double() - center).square().sum(1))
    assert fitted.error.variance_left == pytest.approx(float(weights @ distances) / variance)
    assert fitted.error.worst_id == int(distances.argmax())
    assert fitted.error.worst_distance == pytest.approx(float(distances.max()) ** 0.5)


@pytest.mark.parametrize("composition", FITTED)
def test_frequent_ids_come_nearer_when_they_weigh_more(composition: str) -> None:
    vectors, counts = drawn()
    table = table_of(scheme_of("quotient_remainder"), composition)
    weighted, plain = (full_vectors(table, fit_table(table, vectors, own).weights) for own in (counts, None))
    assert weighted_error(vectors, weighted, counts) < weighted_error(vectors, plain, counts)


@pytest.mark.parametrize("composition", [name for name in COMPOSITIONS if name not in FITTED])
def test_compositions_without_a_fit_are_refused_by_name(composition: str) -> None:
    with pytest.raises(UserError, match=rf"table 't' has composition '{composition}'.*product, sum, concat"):
        fit_table(table_of(scheme_of("quotient_remainder"), composition), drawn()[0])


def test_managed_ids_are_refused_both_ways() -> None:
    table = table_of(PARTITIONS["naive"](N), "product", ids=ManagedConfig(size=N))
    for convert in (lambda: fit_table(table, drawn()[0]), lambda: full_vectors(table, [drawn()[0]])):
        with pytest.raises(UserError, match="table 't' has managed ids.*leave embedding.tables.t.ids out"):
            convert()


def test_wrong_vectors_and_counts_are_refused() -> None:
    table = table_of(scheme_of("quotient_remainder"), "sum")
    vectors, counts = drawn()
    with pytest.raises(UserError, match=r"shape \(59, 8\).*60 ids of 8"):
        fit_table(table, vectors[1:])
    with pytest.raises(UserError, match="not finite"):
        fit_table(table, vectors / 0.0)
    for wrong in (counts[1:], -counts - 1):
        with pytest.raises(UserError, match="counts"):
            fit_table(table, vectors, wrong)


@pytest.mark.parametrize("num_ids", [1, 2, 5])
@pytest.mark.parametrize("composition", FITTED)
def test_the_smallest_tables_are_fitted(num_ids: int, composition: str) -> None:
    table = CompositionalEmbeddingBagConfig("t", num_ids, 4, ["f"], "quotient_remainder", composition)
    vectors = torch.randn(num_ids, 4, generator=torch.Generator().manual_seed(0))
    error = fit_table(table, vectors).error
    assert 0 <= error.variance_left <= 1.0 and 0 <= error.worst_id < num_ids


def test_half_precision_is_stored_and_compared_as_stored() -> None:
    vectors, _ = drawn()
    table = table_of(scheme_of("naive"), "product", data_type="FP16")
    fitted = fit_table(table, vectors)
    assert fitted.weights[0].dtype == torch.float16
    assert torch.equal(fitted.weights[0], vectors.half())
    assert fitted.error.worst_distance == pytest.approx(
        float((vectors - vectors.half().float()).square().sum(1).max().sqrt()), rel=1e-4
    )
