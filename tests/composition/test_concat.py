"""The dimensions of a concatenation's parts."""

import pytest
import torch

from distembed.base.errors import UserError
from distembed.composition import Concat


def test_dimensions_as_given() -> None:
    concat = Concat(dims=[12, 4])
    assert concat.partition_dims(16, 2) == (12, 4)
    first, second = torch.randn(5, 12), torch.randn(3, 4)
    composed = concat.embed([first, second], torch.tensor([[4, 1], [0, 2]]))
    assert torch.equal(composed, torch.stack([torch.cat([first[4], second[0]]), torch.cat([first[1], second[2]])]))


@pytest.mark.parametrize(("dim", "k", "dims"), [(7, 3, (3, 2, 2)), (16, 1, (16,)), (3, 3, (1, 1, 1))])
def test_equal_shares_put_the_larger_ones_first(dim: int, k: int, dims: tuple[int, ...]) -> None:
    assert Concat().partition_dims(dim, k) == dims


@pytest.mark.parametrize(("dims", "k"), [([12, 5], 2), ([12, 4], 3), ([16], 2), ([], 1)])
def test_dimensions_that_do_not_fit_are_refused_with_their_sum(dims: list[int], k: int) -> None:
    with pytest.raises(UserError, match=rf"sum to {sum(dims)}.*needs {k}.*embedding_dim, 16"):
        Concat(dims=dims).partition_dims(16, k)


@pytest.mark.parametrize("dim", [0, -1, 2.0, True])
def test_a_dimension_that_is_none_is_refused(dim: object) -> None:
    with pytest.raises(UserError, match=r"dims\[1\]"):
        Concat(dims=[16, dim])  # type: ignore[list-item]


def test_too_few_dimensions_are_refused() -> None:
    with pytest.raises(UserError, match="embedding_dim is 2"):
        Concat().partition_dims(2, 3)
