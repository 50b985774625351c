"""Laws of every composition."""

import pytest
import torch

from distembed.composition import COMPOSITIONS, Product
from distembed.errors import UserError


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_dimensions_add_up_to_the_composed_one(name: str, k: int) -> None:
    composition = COMPOSITIONS[name]()
    vectors = [torch.randn(5, 4, dim) for dim in composition.partition_dims(7, k)]
    assert composition.compose(vectors).shape == (5, 4, 7)


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_gradients_are_right(name: str) -> None:
    composition = COMPOSITIONS[name]()
    vectors = [torch.randn(3, d, dtype=torch.float64, requires_grad=True) for d in composition.partition_dims(5, 3)]
    assert torch.autograd.gradcheck(lambda *parts: composition.compose(parts), vectors)


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_what_is_said_of_pooling_is_true(name: str) -> None:
    composition = COMPOSITIONS[name]()
    bag = [torch.randn(6, dim) for dim in composition.partition_dims(8, 2)]
    composed_then_summed = composition.compose(bag).sum(0)
    summed_then_composed = composition.compose([vectors.sum(0) for vectors in bag])
    assert torch.allclose(composed_then_summed, summed_then_composed, atol=1e-5) == composition.commutes_with_sum


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_composed_variance_is_the_one_asked_for(name: str, k: int) -> None:
    composition = COMPOSITIONS[name]()
    generator = torch.Generator().manual_seed(0)
    dims, draws = composition.partition_dims(16, k), composition.initial_weights(0.01, k)
    vectors = [draw.fill(torch.empty(200_000, dim), generator) for dim, draw in zip(dims, draws, strict=True)]
    for vector, draw in zip(vectors, draws, strict=True):
        assert vector.var().item() == pytest.approx(draw.variance, rel=0.03)
    composed = composition.compose(vectors)
    assert composed.var().item() == pytest.approx(0.01, rel=0.03)
    assert composed.mean().item() == pytest.approx(0.0, abs=1e-3)


def test_product_tells_ids_apart_that_pooling_first_would_merge() -> None:
    # two bags with the same multiset of rows in each partition, but other pairs
    product = Product()
    remainder, quotient = torch.randn(10, 4), torch.randn(5, 4)
    first = product.compose([remainder[[3, 7]], quotient[[0, 4]]]).sum(0)
    second = product.compose([remainder[[7, 3]], quotient[[0, 4]]]).sum(0)
    assert not torch.allclose(first, second)


def test_concat_of_too_few_dimensions_is_refused() -> None:
    with pytest.raises(UserError, match="embedding_dim is 2"):
        COMPOSITIONS["concat"]().partition_dims(2, 3)
