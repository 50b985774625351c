"""Laws of every composition."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from distembed.composition import COMPOSITIONS, Composition, Product, WeightedSum
from distembed.partitions.settings import setting_names
from tests.embedding.schemes import small_composition

COMMUTING = {"product": False, "sum": True, "concat": True, "feature": True, "path_linear": False, "path_mlp": False}
COMMUTING |= {"weighted_sum": False, "tensor_train": False, "concat_sum": True}


def drawn_weights(composition: Composition, dim: int, num_rows: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    dims = composition.partition_dims(dim, len(num_rows))
    return [torch.randn(n, d, dtype=dtype, requires_grad=True) for n, d in zip(num_rows, dims, strict=True)]


def skewed_rows(num_rows: Sequence[int], num_ids: int) -> Tensor:
    """Nearly all ids in the first rows, as where ids are sorted by frequency."""
    return torch.stack([(torch.rand(num_ids).pow(6) * n).long() for n in num_rows])


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_dimensions_add_up_to_the_composed_one(name: str, k: int) -> None:
    composition = COMPOSITIONS[name]()
    vectors = [torch.randn(5, 4, dim) for dim in composition.partition_dims(7, k)]
    assert composition.compose(vectors).shape == (5, 4, 7 * composition.num_vectors(k))


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_gradients_of_composing_an_ids_own_rows(name: str, k: int) -> None:
    composition = small_composition(name)
    vectors = drawn_weights(composition, 3, [3] * k, torch.float64)
    assert torch.autograd.gradcheck(lambda *parts: composition.compose(parts), vectors)


@pytest.mark.parametrize("num_rows", [[4], [5, 4], pytest.param([5, 4, 3], marks=pytest.mark.slow)], ids=len)
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_gradients_of_embedding_with_repeated_rows_and_empty_buckets(name: str, num_rows: list[int]) -> None:
    composition = small_composition(name)
    weights = drawn_weights(composition, 3, num_rows, torch.float64)
    rows = torch.tensor([[0, 0, 3, 2, 0, 3], [2, 2, 0, 2, 3, 0], [1, 1, 2, 1, 1, 2]])[: len(num_rows)]
    assert torch.autograd.gradcheck(lambda *parts: composition.embed(parts, rows), weights)


@pytest.mark.thorough
@pytest.mark.parametrize("num_rows", [[9], [40, 4], [40, 900], [30, 7, 3]], ids=str)
@pytest.mark.parametrize("num_ids", [0, 1, 7, 300])
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_embedding_is_composing_id_by_id(name: str, num_ids: int, num_rows: list[int]) -> None:
    torch.manual_seed(0)
    composition = COMPOSITIONS[name]()
    weights = drawn_weights(composition, 6, num_rows, torch.float64)
    rows = skewed_rows(num_rows, num_ids)
    embedded = composition.embed(weights, rows)
    width = 6 * composition.num_vectors(len(num_rows))
    assert embedded.shape == (num_ids, width)
    padded = torch.cat([torch.zeros(len(num_rows), 1, dtype=torch.int64), rows], dim=1)  # something to stack at no ids
    one_by_one = [composition.compose([w[r] for w, r in zip(weights, id_rows, strict=True)]) for id_rows in padded.T]
    reference = torch.stack(one_by_one)[1:]
    assert torch.allclose(embedded, reference)
    weigh = torch.randn_like(embedded)
    for got, expected in zip(
        torch.autograd.grad((embedded * weigh).sum(), weights),
        torch.autograd.grad((reference * weigh).sum(), weights),
        strict=True,
    ):
        assert torch.allclose(got, expected)


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_what_is_said_of_pooling_is_true(name: str) -> None:
    composition = COMPOSITIONS[name]()
    bag = [torch.randn(6, dim) for dim in composition.partition_dims(8, 2)]
    composed_then_summed = composition.compose(bag).sum(0)
    summed_then_composed = composition.compose([vectors.sum(0) for vectors in bag])
    commutes = torch.allclose(composed_then_summed, summed_then_composed, atol=1e-5)
    assert commutes == composition.commutes_with_sum == COMMUTING[name]


@pytest.mark.parametrize(("variance", "k"), [(1 / 3, 1), (0.01, 2), (1e-8, 2), (1 / 3, 3), (1e-8, 3), (0.01, 4)])
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_composed_mean_and_variance_are_those_asked_for(name: str, k: int, variance: float) -> None:
    composition = COMPOSITIONS[name]()
    generator = torch.Generator().manual_seed(0)
    dims = composition.partition_dims(16, k)
    draws = composition.initial_weights(variance, k, 16)
    num_rows = [20_000] + [500] * (k - 1) if composition.num_lookup_partitions(k) < k else [20_000] * k
    weights = [d.fill(torch.empty(n, dim), generator) for d, n, dim in zip(draws, num_rows, dims, strict=True)]
    rows = torch.stack([torch.randint(n, (20_000,), generator=generator) for n in num_rows])
    composed = composition.embed(weights, rows).double()
    assert composed.var().item() == pytest.approx(variance, rel=0.05)
    # in standard deviations of one number
    assert composed.mean().item() / variance**0.5 == pytest.approx(0.0, abs=0.02)


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_under_autocast_vectors_stay_float32(name: str) -> None:
    """Functions alone are computed in the type of autocast."""
    torch.manual_seed(0)
    composition = COMPOSITIONS[name]()
    weights = drawn_weights(composition, 8, [9, 7], torch.float32)
    rows = skewed_rows([9, 7], 50)
    exact = composition.embed(weights, rows)
    with torch.autocast("cpu", torch.bfloat16):
        embedded = composition.embed(weights, rows)
    assert embedded.dtype == torch.float32
    assert torch.equal(embedded, exact) or name in ("path_linear", "path_mlp")


def test_settings_are_keywords_of_the_constructor_with_defaults() -> None:
    for composition in COMPOSITIONS.values():
        chosen = composition().setting_values()
        assert tuple(chosen) == setting_names(composition.settings)
        again = composition(**chosen)
        assert again.setting_values() == chosen
        assert again.partition_dims(16, 2) == composition().partition_dims(16, 2)


def test_product_distinguishes_bags_that_pooling_first_would_merge() -> None:
    # {3, 47} and {7, 43} at 10 remainders: the same remainders 3, 7 and the same quotients 0, 4, in other pairs
    torch.manual_seed(0)
    remainder, quotient = torch.randn(10, 4), torch.randn(5, 4)
    bags = [torch.tensor([3, 47]), torch.tensor([7, 43])]
    first, second = (Product().embed([remainder, quotient], torch.stack([ids % 10, ids // 10])).sum(0) for ids in bags)
    assert not torch.allclose(first, second)
    pooled_first, pooled_second = (remainder[ids % 10].sum(0) * quotient[ids // 10].sum(0) for ids in bags)
    assert torch.allclose(pooled_first, pooled_second)


BY_HAND = {
    "product": [2.0 * 5 * 11, 3.0 * 7 * 13],
    "sum": [2.0 + 5 + 11, 3.0 + 7 + 13],
    "concat": [2.0, 3, 5, 7, 11, 13],
    "feature": [2.0, 3, 5, 7, 11, 13],
    "concat_sum": [2.0 + 11, 3.0 + 13, 5, 7],
}


def test_a_weighted_sum_by_hand() -> None:
    # the last row holds the numbers 11 and 13, then padding that is never read
    vectors = [torch.tensor([pair]) for pair in ([2.0, 3.0], [5.0, 7.0], [11.0, 13.0])]
    expected = [[11 * 2.0 + 13 * 5, 11 * 3.0 + 13 * 7]]
    assert WeightedSum().compose(vectors).tolist() == expected
    padded = torch.cat([vectors[2], torch.full((1, 2), float("nan"))], dim=1)
    assert WeightedSum().compose([*vectors[:2], padded]).tolist() == expected


def test_importance_rows_are_padded_to_what_fbgemm_stores() -> None:
    dims = {(16, 1): (16,), (16, 2): (16, 4), (16, 3): (16, 16, 4), (16, 6): (16,) * 5 + (8,), (7, 3): (7, 7, 2)}
    assert {case: WeightedSum().partition_dims(*case) for case in dims} == dims


@pytest.mark.parametrize("num_vectors", [1, 2, 3])
def test_a_weighted_sum_is_equation_1_of_the_paper_with_its_gradients(num_vectors: int) -> None:
    """e = sum_j p_j v_j in numpy's float64; de/dv_j = p_j and de/dp_j = v_j, added up over the ids of a row."""
    num_ids, dim, rng = 40, 8, np.random.default_rng(num_vectors)
    composition = WeightedSum()
    dims = composition.partition_dims(dim, num_vectors + 1)
    tables = [rng.normal(size=(9, columns)) for columns in dims]
    rows = rng.integers(0, 9, (num_vectors + 1, num_ids))
    weights = [torch.tensor(table, requires_grad=True) for table in tables]
    embedded = composition.embed(weights, torch.tensor(rows))
    upstream = rng.normal(size=(num_ids, dim))
    embedded.backward(torch.tensor(upstream))
    expected, gradients = np.zeros((num_ids, dim)), [np.zeros_like(table) for table in tables]
    for i in range(num_ids):
        importance = tables[-1][rows[-1, i]]
        for j in range(num_vectors):
            vector = tables[j][rows[j, i]]
            expected[i] += importance[j] * vector
            gradients[j][rows[j, i]] += importance[j] * upstream[i]
            gradients[-1][rows[-1, i], j] += vector @ upstream[i]
    assert np.allclose(embedded.detach().numpy(), expected)
    for weight, gradient in zip(weights, gradients, strict=True):
        assert np.allclose(weight.grad.numpy(), gradient)


@pytest.mark.parametrize("name", BY_HAND)
def test_formulas_by_hand(name: str) -> None:
    vectors = [torch.tensor([pair]) for pair in ([2.0, 3.0], [5.0, 7.0], [11.0, 13.0])]
    assert COMPOSITIONS[name]().compose(vectors).tolist() == [BY_HAND[name]]


def test_a_path_by_hand() -> None:
    # x W + b with W = [[1, 2], [3, 4]], b = [5, 6], then with W = [[0, 1], [1, 0]], b = [0, 0]
    packed = [torch.tensor([[1.0, 2, 3, 4, 5, 6]]), torch.tensor([[0.0, 1, 1, 0, 0, 0]])]
    assert COMPOSITIONS["path_linear"]().compose([torch.tensor([[10.0, 100.0]]), *packed]).tolist() == [[426.0, 315.0]]
