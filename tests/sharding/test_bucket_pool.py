"""Products pooled by buckets, against a loop over ids and against optimizers on weights that are composed id by id."""

from collections.abc import Callable

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import embedding, embedding_bag
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from distembed.sharding.bucket_pool import Buckets, buckets_are_faster, count_buckets_per_bag, split_bags

DIM = 4
# features x bags; an id is drawn for each number
LENGTHS = st.integers(0, 4).flatmap(
    lambda batch: st.lists(st.lists(st.integers(0, 5), min_size=batch, max_size=batch), min_size=1, max_size=4)
)


def draw_rows(lengths: Tensor, num_rows: list[list[int]], generator: torch.Generator) -> Tensor:
    """Rows of each id in each partition; ``num_rows`` are those of each feature."""
    pieces = [
        torch.stack([torch.randint(rows, (count,), generator=generator) for rows in of_feature])
        for of_feature, count in zip(num_rows, lengths.sum(1).tolist(), strict=True)
    ]
    return torch.cat(pieces, dim=1)


def compose_each_id(weights: list[Tensor], rows: Tensor, lengths: Tensor, of_ids: Tensor | None) -> Tensor:
    """Pooled products, ``[batch, features, dim]``, id by id."""
    products = torch.stack([embedding(row, weight) for row, weight in zip(rows, weights, strict=True)]).prod(0)
    if of_ids is not None:
        products = products * of_ids.unsqueeze(1)
    bag_of_id = torch.arange(lengths.numel()).repeat_interleave(lengths.flatten())
    pooled = products.new_zeros(lengths.numel(), DIM).index_add(0, bag_of_id, products)
    return pooled.view(*lengths.shape, DIM).transpose(0, 1)


def look_up(weights: list[Tensor], buckets: Buckets, num_features: int, of_ids: Tensor | None) -> list[Tensor]:
    """Sums over the buckets' bags by torch."""
    sums = []
    for j, weight in enumerate(weights):
        scale = of_ids[buckets.order] if of_ids is not None and j == buckets.largest else None
        summed = embedding_bag(
            buckets.rows[j], weight, buckets.offsets[j], mode="sum", per_sample_weights=scale, include_last_offset=True
        )
        sums.append(summed.view(num_features, len(summed) // num_features, DIM).transpose(0, 1))
    return sums


@pytest.mark.parametrize("num_rows", [[7, 2], [3, 300], [40, 3, 2], [2, 3, 90], [5, 5], [1, 1]])
@pytest.mark.parametrize("weighted", [False, True])
@settings(max_examples=25)
@given(lengths=LENGTHS, seed=st.integers(0, 100))
def test_pooling_and_its_gradients_equal_composing_each_id(
    num_rows: list[int], weighted: bool, lengths: list[list[int]], seed: int
) -> None:
    check_against_composing_each_id(num_rows, weighted, lengths, seed)


@pytest.mark.thorough
@pytest.mark.parametrize("codes", [127, 128, 129, 255, 257, 16_383, 16_385, 40_000])
def test_codes_may_be_many(codes: int) -> None:
    check_against_composing_each_id([codes + 1, codes], False, [[9, 9], [9, 9]], seed=0)


def check_against_composing_each_id(num_rows: list[int], weighted: bool, lengths: list[list[int]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    of_bags = torch.tensor(lengths, dtype=torch.long)
    # every feature has a table of its own, below the last one's, and the first has the most rows
    of_features = [[max(1, rows - f) for rows in num_rows] for f in range(len(lengths))]
    first_rows = torch.tensor(of_features).cumsum(0).t() - torch.tensor(of_features).t()
    rows = draw_rows(of_bags, of_features, generator)
    rows = rows + first_rows.repeat_interleave(of_bags.sum(1), dim=1)
    weights = [
        torch.randn(sum(column), DIM, dtype=torch.float64, generator=generator, requires_grad=True)
        for column in zip(*of_features, strict=True)
    ]
    of_ids = torch.rand(rows.shape[1], dtype=torch.float64, generator=generator) if weighted else None

    buckets = split_bags(rows, of_bags, num_rows, first_rows)
    pooled = buckets.pool(look_up(weights, buckets, len(lengths), of_ids))
    expected = compose_each_id(weights, rows, of_bags, of_ids)
    torch.testing.assert_close(pooled, expected)
    for j in range(len(num_rows)):
        assert set(buckets.rows[j].tolist()) == set(rows[j].tolist())  # the others are left alone

    gradient = torch.randn(pooled.shape, dtype=torch.float64, generator=generator)
    ours = torch.autograd.grad(pooled, weights, gradient)
    theirs = torch.autograd.grad(expected, weights, gradient)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their)


def test_a_feature_has_a_bag_for_every_code_that_occurs() -> None:
    #        feature 0: bags [a b c] []      feature 1: bags [d] [e f]
    lengths = torch.tensor([[3, 0], [1, 2]])
    rows = torch.tensor([[5, 6, 7, 8, 9, 5], [1, 0, 1, 2, 2, 0]])
    buckets = split_bags(rows, lengths, [10, 3])
    assert (buckets.largest, buckets.buckets_per_bag) == (0, 3)
    # by feature, code and bag
    assert buckets.rows[0].tolist() == [6, 5, 7, 5, 8, 9]
    assert buckets.offsets[0].diff().tolist() == [1, 0, 2, 0, 0, 0, 0, 1, 0, 0, 1, 1]
    assert buckets.order.tolist() == [1, 0, 2, 5, 3, 4]
    assert buckets.rows[1].tolist() == [0, 1, 0, 2]
    assert buckets.offsets[1].diff().tolist() == [1, 1, 0, 1, 0, 1]


Optimizer = Callable[..., torch.optim.Optimizer]
FUSED: dict[str, tuple[EmbOptimType, Optimizer, dict[str, float]]] = {
    "sgd": (EmbOptimType.EXACT_SGD, torch.optim.SGD, {}),
    "adagrad": (EmbOptimType.EXACT_ADAGRAD, torch.optim.Adagrad, {"eps": 1e-8}),
    "rowwise_adagrad": (EmbOptimType.EXACT_ROWWISE_ADAGRAD, RowWiseAdagrad, {"eps": 1e-8}),
}
TABLES = [[300, 4], [12, 3], [50, 4]]
"""Rows of each table in each partition."""
TABLE_OF_FEATURE = [0, 0, 1, 2]


def make_tbe(partition: int, optimizer: EmbOptimType, device: str) -> SplitTableBatchedEmbeddingBagsCodegen:
    location = EmbeddingLocation.HOST if device == "cpu" else EmbeddingLocation.DEVICE
    compute = ComputeDevice.CPU if device == "cpu" else ComputeDevice.CUDA
    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows[partition], DIM, location, compute) for rows in TABLES],
        feature_table_map=TABLE_OF_FEATURE,
        optimizer=optimizer,
        learning_rate=0.1,
        eps=1e-8,
        device=torch.device(device),
        bounds_check_mode=BoundsCheckMode.NONE,
    )
    tbe.init_embedding_weights_uniform(-1, 1)
    return tbe


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "device"),
    [
        ("sgd", "cpu"),
        ("adagrad", "cpu"),
        ("rowwise_adagrad", "cpu"),
        pytest.param("rowwise_adagrad", "cuda", marks=pytest.mark.gpu),
    ],
)
def test_fused_updates_equal_those_of_composed_ids(optimizer: str, device: str, weighted: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    fused, reference, settings = FUSED[optimizer]
    tbes = [make_tbe(partition, fused, device) for partition in range(2)]
    tables = [[nn.Parameter(weight.cpu().clone()) for weight in tbe.split_embedding_weights()] for tbe in tbes]
    steps = reference([weight for of_partition in tables for weight in of_partition], lr=0.1, **settings)
    num_rows = [max(rows) for rows in zip(*TABLES, strict=True)]
    for batch_size in (5, 1, 0, 7):
        lengths = torch.randint(0, 6, (len(TABLE_OF_FEATURE), batch_size), generator=generator, dtype=torch.int32)
        lengths[:, :1] = 0
        rows = draw_rows(lengths, [TABLES[table] for table in TABLE_OF_FEATURE], generator)
        of_ids = torch.rand(rows.shape[1], generator=generator) if weighted else None
        gradient = torch.randn(batch_size, len(TABLE_OF_FEATURE), DIM, generator=generator)

        buckets = split_bags(rows.to(device), lengths.to(device), num_rows)
        vectors = []
        for j, tbe in enumerate(tbes):
            scale = of_ids.to(device)[buckets.order] if of_ids is not None and j == buckets.largest else None
            summed = tbe(indices=buckets.rows[j], offsets=buckets.offsets[j], per_sample_weights=scale)
            vectors.append(summed.unflatten(1, (len(TABLE_OF_FEATURE), DIM)))
        pooled = buckets.pool(vectors)

        table_of_id = torch.tensor(TABLE_OF_FEATURE).repeat_interleave(lengths.sum(1))
        first_rows = torch.tensor(TABLES).cumsum(0) - torch.tensor(TABLES)
        stacked = [torch.cat(list(of_partition)) for of_partition in tables]
        expected = compose_each_id(stacked, rows + first_rows.t()[:, table_of_id], lengths, of_ids)
        torch.testing.assert_close(pooled.detach().cpu(), expected.detach())

        pooled.backward(gradient.to(device))
        steps.zero_grad()
        expected.backward(gradient)
        steps.step()
        for tbe, of_partition in zip(tbes, tables, strict=True):
            for held, weight in zip(tbe.split_embedding_weights(), of_partition, strict=True):
                torch.testing.assert_close(held.cpu(), weight.detach())


def test_codes_are_the_row_tuples_of_all_but_the_largest_partition() -> None:
    assert count_buckets_per_bag([100, 4]) == count_buckets_per_bag([4, 100]) == 4
    assert count_buckets_per_bag([5, 3, 2]) == 6
    assert count_buckets_per_bag([7, 7]) == 7


def test_buckets_are_for_few_codes_and_many_ids() -> None:
    assert buckets_are_faster(num_ids=1000, num_bags=100, buckets_per_bag=4)
    assert not buckets_are_faster(num_ids=100, num_bags=100, buckets_per_bag=4)
    assert not buckets_are_faster(num_ids=1000, num_bags=100, buckets_per_bag=600)
    assert not buckets_are_faster(num_ids=0, num_bags=100, buckets_per_bag=2)
