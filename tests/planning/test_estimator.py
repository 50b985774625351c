"""What the planner is told of each shard against what the finished plan holds, to the byte."""

import itertools
from typing import Any

import pytest
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.planners import to_sharding_plan
from torchrec.distributed.planner.types import ShardingOption

from distembed.composition import PathMLP
from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from distembed.optim.declared import TableOptimizers
from distembed.optim.kinds import OPTIMIZERS
from distembed.partitions import QuotientRemainder
from distembed.planning.reservation import Reservation
from distembed.planning.storage import TableStorage, function_storage, table_storage
from distembed.planning.storage_estimator import StorageEstimator
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder
from distembed.sharding.placement import SHARDING_TYPES, WITHIN_NODES, can_be_placed, place_table

WORLD = 4


def tables() -> list[CompositionalEmbeddingBagConfig]:
    make = CompositionalEmbeddingBagConfig
    return [
        make("a", 101, 16, ["a"], QuotientRemainder(101, collisions=4)),
        make("b", 60, 16, ["b"], QuotientRemainder(60, collisions=5), "concat"),
        make("c", 90, 16, ["c"], QuotientRemainder(90, collisions=7), PathMLP(hidden=[5])),
        make("d", 37, 16, ["d"]),
        make("e", 3, 16, ["e"], QuotientRemainder(3, collisions=2)),  # fewer rows than ranks
    ]


def options(sharding_type: str, device: str, optimizers: TableOptimizers, **settings: Any) -> list[ShardingOption]:
    """Of all tables, where they can be placed so; estimated."""
    topology = Topology(world_size=WORLD, local_world_size=2, compute_device=device)
    model = nn.ModuleDict({"m": CompositionalEmbeddingBagCollection(tables(), device="meta")})
    constraints = {
        table.name: ParameterConstraints(
            sharding_types=[sharding_type if can_be_placed(table, sharding_type) else "table_wise"],
            min_partition=4,
            **settings,
        )
        for table in tables()
    }
    estimator = StorageEstimator(topology, tables(), optimizers)
    sharder: Any = CompositionalEmbeddingBagCollectionSharder(host_memory=True)
    return EmbeddingEnumerator(topology, 1, constraints, estimator=estimator).enumerate(model, [sharder])


@pytest.mark.parametrize("sharding_type", [kind for kind in SHARDING_TYPES if kind not in WITHIN_NODES])
def test_shards_and_functions_are_what_ranks_hold(sharding_type: str) -> None:
    topology = Topology(world_size=WORLD, local_world_size=2, compute_device="cpu")
    for sparse, dense, is_fused in itertools.product(OPTIMIZERS, ["sgd", "adam"], [True, False]):
        optimizers = TableOptimizers(sparse, dense, is_fused)
        estimator = StorageEstimator(topology, tables(), optimizers)
        functions = sum((function_storage(table, optimizers) for table in tables()), TableStorage())
        estimated = [functions.total] * WORLD
        placed = options(sharding_type, "cpu", optimizers)
        for i, option in enumerate(placed):
            for j, (shard, num_bytes) in enumerate(zip(option.shards, estimator.table_bytes(option), strict=True)):
                # neither in order nor on the first ranks, where that is free
                shard.rank = j if option.partition_by == "uniform" else (i + 3 * j) % WORLD
                estimated[shard.rank] += num_bytes
        plan = to_sharding_plan(placed, topology).plan["m"]
        if not is_fused:
            for sharding in plan.values():  # type: ignore[attr-defined]
                sharding.compute_kernel = "dense"
        placements = [place_table(table, plan[table.name], WORLD) for table in tables()]  # type: ignore[index]
        held = [sum(rank.values(), TableStorage()).total for rank in table_storage(placements, WORLD, optimizers)]
        assert estimated == held, (sparse, dense, is_fused)


def test_buffers_come_on_top_and_lie_where_the_tables_do() -> None:
    optimizers = TableOptimizers("adagrad")
    for device in ("cpu", "cuda"):
        (option,) = [o for o in options("table_wise", device, optimizers, compute_kernels=["fused"]) if o.name == "d"]
        (shard,) = option.shards
        weights = 37 * 16 * 4
        ids, vectors = WORLD * 8, WORLD * 16 * 4
        # the pipeline of CUDA has ids of two steps
        expected = 2 * weights + vectors + (2 if device == "cuda" else 1) * ids
        assert (shard.storage.hbm, shard.storage.ddr) == ((expected, 0) if device == "cuda" else (0, expected))


def test_host_memory_has_the_tables_and_the_device_their_cache_and_numbers_of_rows() -> None:
    for kernel in (EmbeddingComputeKernel.FUSED_UVM, EmbeddingComputeKernel.FUSED_UVM_CACHING):
        found = options("table_wise", "cuda", TableOptimizers("row_wise_adagrad"), compute_kernels=[kernel.value])
        (shard,) = next(option for option in found if option.name == "d").shards
        buffers = WORLD * (2 * 8 + 16 * 4)
        cache = round(0.2 * 37 * 16 * 4 + 37 * (4 + 16 * 0.2)) if kernel.value.endswith("caching") else 0
        assert (shard.storage.hbm, shard.storage.ddr) == (buffers + 37 * 4 + cache, 37 * 16 * 4)


def test_functions_are_taken_off_every_rank() -> None:
    topology = Topology(world_size=2, compute_device="cpu", ddr_cap=10_000_000)
    left = Reservation(0.5, tables(), TableOptimizers(dense="adam")).reserve(topology, 1, nn.Module(), [])
    # 16-5-16 with biases; weights, gradients, two states, and one number of steps
    functions = 7 * (5 * 16 + 5 + 16 * 5 + 16)
    assert [device.storage.ddr for device in left.devices] == [5_000_000 - 4 * (4 * functions + 1)] * 2
    assert topology.devices[0].storage.ddr == 10_000_000
