"""Pooling against a loop over bags."""

import pytest
import torch

from distembed.base.errors import UserError
from distembed.embedding.pooling import pool
from tests.embedding.reference import pooled


@pytest.mark.parametrize("pooling", ["sum", "mean", "max"])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [1], [1, 1, 1], [0, 3, 0, 1], [5, 0, 2, 1, 0]])
def test_bags_equal_a_loop(pooling: str, is_weighted: bool, lengths: list[int]) -> None:
    if is_weighted and pooling == "max":
        return
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(sum(lengths), 3, generator=generator, dtype=torch.float64)
    weights = torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
    for kind in (torch.int32, torch.int64):
        sizes = torch.tensor(lengths, dtype=kind)
        found = pool(vectors, sizes, pooling, weights if is_weighted else None)  # type: ignore[arg-type]
        expected = torch.zeros(len(lengths), 3, dtype=torch.float64)
        for bag, (bag_vectors, bag_weights) in enumerate(
            zip(vectors.split(lengths), weights.split(lengths), strict=True)
        ):
            factors = bag_weights.tolist() if is_weighted else [1.0] * len(bag_vectors)
            expected[bag] = pooled(list(bag_vectors), factors, pooling, 3)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("pooling", ["sum", "mean", "max"])
def test_gradients(pooling: str) -> None:
    vectors = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(6, dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor([0, 3, 1, 0, 2])
    inputs = (vectors,) if pooling == "max" else (vectors, weights)
    assert torch.autograd.gradcheck(lambda v, w=None: pool(v, lengths, pooling, w), inputs)  # type: ignore[arg-type]


def test_a_maximum_of_negative_numbers_is_negative() -> None:
    found = pool(torch.tensor([[-3.0], [-2.0]]), torch.tensor([2, 0]), "max")
    assert found.tolist() == [[-2.0], [0.0]]


def test_a_maximum_takes_no_weights() -> None:
    with pytest.raises(UserError, match="pooling max"):
        pool(torch.ones(1, 2), torch.tensor([1]), "max", torch.ones(1))
