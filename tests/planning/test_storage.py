"""Estimated bytes of tables against those of the live tensors, on every rank, to the byte."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ParameterSharding, ShardMetadata

from distembed.embedding import CompositionalEmbeddingBagConfig
from distembed.embedding.config import DataType
from distembed.optim.declared import TableOptimizers
from distembed.optim.table_storage import TableStorage, replicated_storage, total_storage
from distembed.partitions import QuotientRemainder
from distembed.planning.costs import Layout, divided_table
from distembed.planning.devices import Cluster, find_device
from distembed.planning.storage import slice_storage, storage_by_rank
from distembed.planning.table_problem import unit_sharding
from distembed.sharding.bag_collection import ShardedCompositionalEmbeddingBagCollection
from distembed.sharding.placement import place_table
from tests.layouts import LAYOUTS, OPTIMIZER_NAMES, Trained, build, replicated_leaves
from tests.ranks import run_on_ranks


def local_bytes(value: object) -> int:
    if isinstance(value, ShardedTensor):
        return sum(local_bytes(shard.tensor) for shard in value.local_shards())
    assert isinstance(value, Tensor)
    return value.numel() * value.itemsize


def live_bytes(trained: Trained) -> tuple[int, int]:
    """Of this rank's weights of tables and of their optimizers' states, after a step has made these."""
    trained.step(0)
    weights = {n: v for n, v in trained.model.state_dict().items() if n.startswith("embeddings.")}
    states = trained.optimizer.state_dict()["state"]
    kept = [v for n, of_parameter in states.items() if n.startswith("embeddings.") for v in of_parameter.values()]
    # torch counts steps, which state dicts of fused optimizers do not say
    live = [own for leaf in replicated_leaves(trained.optimizer) for own in leaf.live.values()]
    steps = [own["step"] for own in live if "step" in own]
    return sum(map(local_bytes, weights.values())), sum(map(local_bytes, [*kept, *steps]))


def check(rank: int, layout: str, sparse: str, dense: str, data_type: DataType = "FP32") -> None:
    trained = build(layout, sparse, dense, data_type=data_type)
    assert isinstance(trained.model, DistributedModelParallel)
    (module,) = [m for m in trained.model.modules() if isinstance(m, ShardedCompositionalEmbeddingBagCollection)]
    optimizers = TableOptimizers(sparse, dense)
    placed = (storage_by_rank(own, dist.get_world_size(), optimizers) for own in module._placements.values())
    own = total_storage(by_rank[rank] for by_rank in placed if rank in by_rank)
    assert (own.weights, own.optimizer_state) == live_bytes(trained)
    gradients = [
        p.grad for n, p in trained.model.named_parameters() if n.startswith("embeddings.") and p.grad is not None
    ]
    # on one rank, what is updated within the backward pass has none behind it
    updated = [p for leaf in replicated_leaves(trained.optimizer) for p in leaf.live if p.grad is None]
    assert own.gradients == sum(map(local_bytes, [*gradients, *updated]))
    assert not updated or dist.get_world_size() == 1


def check_cases(rank: int, world_size: int, cases: list[Any]) -> None:
    torch.manual_seed(0)
    for case in cases:
        try:
            check(rank, *case)
        except AssertionError as error:
            raise AssertionError(f"{case} on rank {rank} of {world_size}: {error}") from error


# FBGEMM has no bf16 on CPUs, but where torch looks tables up, which every rank has
HALF_CASES = [
    (*case, "adagrad", data_type)
    for data_type in ("FP16", "BF16")
    for case in itertools.product(LAYOUTS[1:], OPTIMIZER_NAMES)
    if data_type == "FP16" or case[0] == "data_parallel"
]
SOME_HALF_CASES = [
    ("table_wise", "adagrad", "adagrad", "FP16"),
    ("row_wise", "row_wise_adagrad", "adagrad", "FP16"),
    ("column_wise", "amsgrad", "adagrad", "FP16"),
    ("row_wise", "amsgrad", "adagrad", "FP16"),
    ("data_parallel", "adagrad", "adagrad", "BF16"),
]


ALL_CASES = [*itertools.product(LAYOUTS[1:], OPTIMIZER_NAMES, ["adam"]), ("row_wise", "adagrad", "sgd"), *HALF_CASES]
# every layout and every optimizer
SOME_CASES = [(layout, OPTIMIZER_NAMES[at % 4], "adam") for at, layout in enumerate(LAYOUTS[1:])]


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (1, SOME_CASES),
        (2, [*ALL_CASES[: -len(HALF_CASES)], *SOME_HALF_CASES]),
        *(pytest.param(ranks, ALL_CASES, marks=pytest.mark.slow) for ranks in (1, 2, 4)),
    ],
    ids=["1", "2", "1, all", "2, all", "4, all"],
)
def test_weights_and_states_are_estimated_to_the_byte(world_size: int, cases: list[Any]) -> None:
    run_on_ranks(world_size, check_cases, cases)


def test_of_a_table_in_host_memory_the_small_partition_and_the_cache_are_on_the_device() -> None:
    # 250 and 4 rows, of which two ranks have 12 and 4 columns
    table = CompositionalEmbeddingBagConfig("t", 1000, 16, ["t"], QuotientRemainder(1000, collisions=4))
    ranges = [ShardMetadata([0, 0], [254, 12], "rank:0/cuda:0"), ShardMetadata([0, 12], [254, 4], "rank:1/cuda:1")]
    for kernel, slots in (("fused_uvm", None), ("fused_uvm_caching", 0.5)):
        unit = ParameterSharding("column_wise", kernel, [0, 1], EnumerableShardingSpec(ranges))
        by_rank = storage_by_rank(place_table(table, unit, 2), 2, TableOptimizers("row_wise_adagrad"), 0.5)
        for rank, columns in enumerate((12, 4)):
            # FBGEMM notes an int32 of each row of what is cached, and two int64 of each slot
            cache = 0 if slots is None else slots * 250 * columns * 4 + 250 * 4 + slots * 250 * 16
            assert by_rank[rank] == TableStorage(
                weights=4 * columns * 4,
                optimizer_state=(250 + 4) * 4,
                cache=round(cache),
                host_weights=250 * columns * 4,
            )


@pytest.mark.parametrize(
    "composition", ["product", "concat", "path_linear", "weighted_sum", "tensor_train", "concat_sum"]
)
@pytest.mark.parametrize("kernel", ["fused", "dense", "fused_uvm_caching"])
def test_a_shard_s_slice_has_the_storage_that_the_placed_table_has_there(composition: str, kernel: str) -> None:
    table = CompositionalEmbeddingBagConfig("t", 1001, 16, ["t"], QuotientRemainder(1001, collisions=4), composition)
    cluster, optimizers = Cluster(find_device("h100-80gb"), 2, 2), TableOptimizers("row_wise_adagrad")
    ways = [("table_wise", 1, [1]), ("row_wise", 1, [0, 1, 2, 3]), ("table_row_wise", 1, [2, 3])]
    if composition in ("product", "concat", "concat_sum"):
        ways += [("column_wise", 2, [3, 1]), ("grid_shard", 2, [0, 1, 2, 3])]
    for sharding_type, num_ranges, ranks in ways:
        wide = 16 // num_ranges
        layout = Layout(sharding_type, kernel, tuple((start, start + wide) for start in range(0, 16, wide)))
        placed = place_table(table, unit_sharding(table, layout, ranks, cluster), 4)
        by_rank = storage_by_rank(placed, 4, optimizers, 0.5)
        slices, replicated = divided_table(table, layout)
        on_all = replicated_storage(table, replicated, optimizers)
        for own, rank in zip(slices, ranks[:: len(ranks) // num_ranges], strict=True):
            shard = slice_storage(own, len(ranks) // num_ranges, optimizers, 0.5, num_ranges > 1)
            assert on_all + shard == by_rank[rank], (sharding_type, rank)
