"""Tensor trains: TT-Rec's equation number by number, sizes of cores, and refused settings."""

import math

import numpy as np
import pytest
import torch

from distembed.base.errors import UserError
from distembed.composition import TensorTrain
from distembed.data.dataset.schema import CategoricalFeature
from distembed.embedding import CompositionalEmbeddingBagConfig, EmbeddingConfig, TableConfig, build_tables
from distembed.partitions import MixedRadix, QuotientRemainder
from distembed.sharding.placement import can_be_placed


@pytest.mark.parametrize(("dims", "ranks"), [((2, 3), (3,)), ((4, 1), (1,)), ((2, 3, 2), (3, 2)), ((2, 1, 3), (1, 4))])
def test_vectors_and_gradients_are_those_of_the_papers_equation(dims: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    """e[c_1, ..., c_k] sums G_1[c_1, s_1] G_2[s_1, c_2, s_2] ... over all s, product by product in float64."""
    rng, num_ids, num_rows = np.random.default_rng(len(dims)), 12, (5, 4, 3)[: len(dims)]
    outer = (1, *ranks, 1)
    shapes = [(n, outer[j], dims[j], outer[j + 1]) for j, n in enumerate(num_rows)]
    cores = [rng.normal(size=shape) for shape in shapes]
    rows, upstream = np.stack([rng.integers(0, n, num_ids) for n in num_rows]), rng.normal(size=(num_ids, *dims))
    expected, gradients = np.zeros((num_ids, *dims)), [np.zeros(shape) for shape in shapes]
    for i in range(num_ids):
        for place in np.ndindex(*dims, *ranks):
            columns, inner = place[: len(dims)], (0, *place[len(dims) :], 0)
            at = [(rows[j, i], inner[j], columns[j], inner[j + 1]) for j in range(len(dims))]
            numbers = [core[where] for core, where in zip(cores, at, strict=True)]
            expected[(i, *columns)] += math.prod(numbers)
            for j, where in enumerate(at):
                gradients[j][where] += upstream[(i, *columns)] * math.prod(numbers[:j] + numbers[j + 1 :])
    composition = TensorTrain(list(ranks), dims)
    assert composition.partition_dims(math.prod(dims), len(dims)) == tuple(math.prod(shape[1:]) for shape in shapes)
    weights = [torch.tensor(core.reshape(len(core), -1), requires_grad=True) for core in cores]
    embedded = composition.embed(weights, torch.tensor(rows))
    embedded.backward(torch.tensor(upstream.reshape(num_ids, -1)))
    assert np.allclose(embedded.detach().numpy(), expected.reshape(num_ids, -1), rtol=1e-12, atol=1e-12)
    for weight, gradient in zip(weights, gradients, strict=True):
        assert weight.grad is not None
        assert np.allclose(weight.grad.numpy(), gradient.reshape(len(gradient), -1), rtol=1e-12, atol=1e-12)


def test_a_vector_by_hand() -> None:
    # rows of the first core: (1, 2) for c_1 = 0 and (3, 4) for c_1 = 1; columns of the second one: (5, 7) and (6, 8)
    vectors = [torch.tensor([[1.0, 2, 3, 4]]), torch.tensor([[5.0, 6, 7, 8]])]
    assert TensorTrain(2).compose(vectors).tolist() == [[19.0, 22, 43, 50]]


def test_a_rank_of_the_whole_matrix_represents_any_table() -> None:
    """With G_2 a selection of all columns, the first core holds each id's numbers."""
    num_rows, num_quotients = 5, 3
    table = torch.randn(num_quotients, num_rows, 2, 2, dtype=torch.float64)
    rank = num_quotients * 2
    first = table.permute(1, 2, 0, 3).reshape(num_rows, 2 * rank)
    second = (
        torch.eye(rank, dtype=torch.float64).view(rank, num_quotients, 2).transpose(0, 1).reshape(num_quotients, -1)
    )
    rows = QuotientRemainder(15, num_buckets=num_rows).rows(torch.arange(15))
    assert torch.equal(TensorTrain(rank).embed([first, second], rows), table.view(15, 4))


def test_factors_are_as_equal_as_divisors_can_be() -> None:
    found = {(dim, k): TensorTrain().factors(dim, k) for dim in (16, 64, 128, 30, 7) for k in (1, 2, 3)}
    by_two = {16: (4, 4), 64: (8, 8), 128: (16, 8), 30: (6, 5), 7: (7, 1)}
    by_three = {16: (4, 2, 2), 64: (4, 4, 4), 128: (8, 4, 4), 30: (5, 3, 2), 7: (7, 1, 1)}
    assert found == {
        **{(dim, 1): (dim,) for dim in by_two},
        **{(dim, 2): factors for dim, factors in by_two.items()},
        **{(dim, 3): factors for dim, factors in by_three.items()},
    }


def test_numbers_of_a_core_and_numbers_kept_for_the_backward_pass() -> None:
    assert TensorTrain().partition_dims(16, 3) == (4 * 8, 8 * 2 * 8, 8 * 2)
    assert TensorTrain([4, 8]).partition_dims(16, 3) == (4 * 4, 4 * 2 * 8, 8 * 2)
    # the rows, and the product of the first two: [8, 8]
    assert TensorTrain([4, 8]).num_saved((16, 64, 16)) == 16 + 64 + 16 + 8 * 8
    assert TensorTrain().num_saved((32, 32)) == 64 and TensorTrain([4, 8]).partition_dims(16, 1) == (16,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, r"rank\[0\] is 0; it must lie between 1 and"),
        ({"rank": [8, 2.0]}, r"rank\[1\] is 2.0, of type float; it must be an integer"),
        ({"rank": [8, 4]}, "2 ranks; tensor_train of 2 partitions needs 1"),
        ({"dims": [2, 4]}, r"2 factors with the product 8; .* the product embedding_dim, 16: \[4, 4\] do"),
        ({"dims": [4, 2, 2]}, "3 factors with the product 16; tensor_train needs 2"),
        ({"dims": [16, 0]}, r"dims\[1\] is 0"),
    ],
)
def test_ranks_and_factors_that_do_not_fit_are_refused(settings: dict[str, list[int]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TensorTrain(**settings).partition_dims(16, 2)


def test_a_config_gives_one_rank_or_a_list_and_full_tables_ignore_both() -> None:
    features = [CategoricalFeature("C1", 10_000), CategoricalFeature("C2", 100)]
    settings = {"partition": "mixed_radix", "num_partitions": 3, "composition": "tensor_train"}
    for rank in (8, [4, 8]):
        default = TableConfig(**settings, rank=rank)  # type: ignore[arg-type]
        train, full = build_tables(features, EmbeddingConfig(default))
        assert train.combine == TensorTrain(rank) and full.num_parameters == 100 * 16
        assert train.num_parameters == sum(
            n * dim for n, dim in zip((22, 22, 21), TensorTrain(rank).partition_dims(16, 3), strict=True)
        )


def test_rows_of_other_than_multiples_of_four_numbers_are_for_data_parallel_tables() -> None:
    for rank, can in ((8, True), (3, False)):
        scheme = MixedRadix(1000, num_partitions=3)
        table = CompositionalEmbeddingBagConfig("t", 1000, 16, ["f"], scheme, TensorTrain(rank))
        assert can_be_placed(table, "table_wise") is can and can_be_placed(table, "data_parallel")
        assert not can_be_placed(table, "column_wise")
