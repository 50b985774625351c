"""TorchRec's planner with our estimates, and ours in its place: plans, refusals, and equal losses on several ranks."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
)
from torchrec.distributed.planner.types import (
    CustomTopologyData,
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
)
from torchrec.distributed.types import CacheParams, ParameterSharding, ShardingPlan
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from distembed.composition import COMPOSITIONS
from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingBagConfig,
    CompositionalEmbeddingCollection,
    CompositionalEmbeddingConfig,
)
from distembed.partitions import QuotientRemainder
from distembed.planning import CompositionalShardEstimator, CompositionalShardingPlanner
from distembed.planning.search import plan_placements
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder, default_sharders
from tests.ranks import run_on_ranks

GIB = 2**30
Units = Mapping[str, ParameterSharding]


def topology(ranks: int = 4, kind: str = "cuda", memory: int = 80 * GIB, nodes: int = 1, **more: Any) -> Topology:
    own = {"hbm_cap": memory} if kind == "cuda" else {"ddr_cap": memory}
    return Topology(ranks, kind, local_world_size=ranks // nodes, **own, **more)


def full_tables(number: int = 3, num_ids: int = 2_000_000, dim: int = 128) -> nn.Module:
    """Full tables t0, t1, ... of about a GiB each, trained by SGD, which keeps nothing of them."""
    tables = [CompositionalEmbeddingBagConfig(f"t{at}", num_ids, dim, [f"f{at}"]) for at in range(number)]
    return nn.ModuleDict({"bags": CompositionalEmbeddingBagCollection(tables, device="meta")})


def units(plan: ShardingPlan) -> Units:
    return {name: own for module in plan.plan.values() for name, own in module.items()}  # type: ignore[attr-defined]


def planned(model: nn.Module, own: Topology | None = None, **arguments: Any) -> Units:
    return units(CompositionalShardingPlanner(own or topology(), 1024, **arguments).plan(model, default_sharders()))


def stock(own: Topology, batch_size: int, model: nn.Module, with_ours: bool, **constraints: Any) -> ShardingPlan:
    """The plan of TorchRec's planner, by its own estimates or ours."""
    estimator = CompositionalShardEstimator(own, constraints) if with_ours else None
    enumerator = EmbeddingEnumerator(own, batch_size, constraints, estimator)
    reservation = FixedPercentageStorageReservation(0.15)
    planner = EmbeddingShardingPlanner(
        own, batch_size, enumerator, reservation, constraints=constraints, stats=[], debug=False
    )
    return planner.plan(model, default_sharders())


def options(model: nn.Module, own: Topology, sharders: list[Any] | None = None) -> list[ShardingOption]:
    enumerator = EmbeddingEnumerator(own, 1024, estimator=CompositionalShardEstimator(own))
    return enumerator.enumerate(model, sharders or default_sharders())


def is_refused(option: ShardingOption) -> bool:
    return any(shard.perf is not None and shard.perf.total > 1e9 for shard in option.shards)


@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize(("nodes", "kind"), [(2, "cuda"), (1, "cpu")])
def test_sharding_takes_every_layout_that_torchrec_proposes(composition: str, nodes: int, kind: str) -> None:
    table = ["t", 10_000, 256, ["f"], QuotientRemainder(10_000, collisions=4), composition]
    bags = CompositionalEmbeddingBagCollection([CompositionalEmbeddingBagConfig(*table)], device="meta")
    found = options(nn.ModuleDict({"bags": bags}), topology(4, kind, nodes=nodes))
    assert {"table_wise", "data_parallel"} <= {option.sharding_type for option in found}
    assert not any(map(is_refused, found))
    if composition == "feature":
        return
    sequences = CompositionalEmbeddingCollection([CompositionalEmbeddingConfig(*table)], device="meta")
    assert not any(map(is_refused, options(nn.ModuleDict({"sequences": sequences}), topology(4, kind, nodes=nodes))))


def path_tables() -> nn.Module:
    tables = [
        CompositionalEmbeddingBagConfig(
            f"t{at}", 2_000_000, 256, [f"f{at}"], QuotientRemainder(2_000_000, collisions=4), "path_mlp"
        )
        for at in range(4)
    ]
    tables.append(CompositionalEmbeddingBagConfig("product", 2_000_000, 256, ["f4"], tables[0].scheme))
    return nn.ModuleDict({"bags": CompositionalEmbeddingBagCollection(tables, device="meta")})


class AllTypes(CompositionalEmbeddingBagCollectionSharder):
    """Proposes what path tables cannot have."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ["column_wise", "row_wise", "table_wise"]


@pytest.mark.thorough
@pytest.mark.parametrize("with_ours", [False, True])
def test_torchrecs_planner_never_divides_the_columns_of_path_tables(with_ours: bool) -> None:
    model, own = path_tables(), topology(8)
    placements = plan_placements(model, stock(own, 8192, model, with_ours), 8)
    assert len(placements) == 5
    of_columns = {option.name for option in options(model, own) if option.sharding_type == "column_wise"}
    assert of_columns == {"product"}


def test_a_layout_that_sharding_refuses_has_an_estimate_that_no_plan_can_hold() -> None:
    found = [option for option in options(path_tables(), topology(8), [AllTypes()]) if option.name != "product"]
    assert {option.sharding_type for option in found if is_refused(option)} == {"column_wise"}
    assert {option.sharding_type for option in found if not is_refused(option)} == {"row_wise", "table_wise"}


def test_estimates_count_optimizer_states_gradients_of_replicated_tables_and_small_partitions() -> None:
    table = CompositionalEmbeddingBagConfig("t", 10**6, 64, ["f"], QuotientRemainder(10**6, collisions=100))
    bags = CompositionalEmbeddingBagCollection([table], device="meta")
    apply_optimizer_in_backward(torch.optim.Adagrad, bags.parameters(), {"lr": 0.1})
    by_type = {option.sharding_type: option for option in options(nn.ModuleDict({"bags": bags}), topology(4))}
    weights, small = (4 * 64 * sum(table.scheme.num_rows), 4 * 64 * min(table.scheme.num_rows))
    buffers = 4 * 1024 * 64 * 4 * 8  # vectors of a batch in several copies, and ids
    held = {name: option.shards[0].storage.hbm for name, option in by_type.items() if option.shards[0].storage}
    assert 2 * weights <= held["table_wise"] <= 2 * weights + buffers
    assert 3 * weights <= held["data_parallel"] <= 3 * weights + buffers
    assert 2 * (weights - small) / 4 + 3 * small <= held["row_wise"] <= 2 * (weights - small) / 4 + 3 * small + buffers
    assert all(own.perf is not None and own.perf.total > 0 for option in by_type.values() for own in option.shards)


@pytest.mark.thorough
@pytest.mark.parametrize("nodes", [1, *(pytest.param(nodes, marks=pytest.mark.slow) for nodes in (4, 16))])
def test_torchrecs_planner_by_our_estimates_is_nearly_as_fast_as_ours_on_kaggle(nodes: int) -> None:
    from distembed.planning.devices import Cluster, find_device
    from tools import bench_planner

    request = bench_planner.MODELS["kaggle"]()(Cluster(find_device("h100-80gb"), nodes, 8))
    ours, by_estimates = (
        bench_planner.estimate(request, bench_planner.PLANNERS[name](request)) for name in ("ours", "estimates")
    )
    assert by_estimates.fits
    assert by_estimates.milliseconds <= 1.05 * ours.milliseconds


@pytest.mark.thorough
def test_constraints_are_kept() -> None:
    constraints = {
        "t0": ParameterConstraints(sharding_types=["column_wise"], min_partition=64),
        "t1": ParameterConstraints(["table_wise"], ["fused_uvm_caching"], cache_params=CacheParams(load_factor=0.1)),
        "t2": ParameterConstraints(sharding_types=["data_parallel"], stochastic_rounding=False),
    }
    own = topology(memory=200 * GIB)
    sharders = [CompositionalEmbeddingBagCollectionSharder(host_memory=True)]
    planner = CompositionalShardingPlanner(own, 1024, constraints)
    found = units(planner.plan(full_tables(), sharders))
    assert found["t0"].sharding_type == "column_wise"
    assert [shard.shard_sizes[1] for shard in found["t0"].sharding_spec.shards] == [64, 64]  # type: ignore[union-attr]
    assert found["t1"].compute_kernel == "fused_uvm_caching"
    assert found["t1"].cache_params == CacheParams(load_factor=0.1)
    assert found["t2"].sharding_type == "data_parallel"
    assert found["t2"].stochastic_rounding is False
    assert planner.estimated is not None
    weights = 4 * 128 * 2_000_000
    (rank,) = (rank for rank in planner.estimated.ranks if rank.storage.host)
    assert rank.tables["t1"].host_weights == weights
    assert weights / 10 <= rank.tables["t1"].cache <= 1.2 * weights / 10 + 8 * 2_000_000


@pytest.mark.thorough
def test_ids_of_a_row_take_time_and_weighted_ids_are_sent_with_their_weights() -> None:
    def sent_and_ms(**fields: Any) -> tuple[int, float]:
        own = {"t0": ParameterConstraints(sharding_types=["table_wise"], **fields)}
        planner = CompositionalShardingPlanner(topology(), 1024, own)
        planner.plan(full_tables(1), default_sharders())
        assert planner.estimated is not None
        slowest = max(planner.estimated.ranks, key=lambda rank: rank.times.total)
        return max(rank.memory["inputs"] for rank in planner.estimated.ranks), slowest.times.total

    (few_bytes, few_ms), (many_bytes, many_ms) = sent_and_ms(), sent_and_ms(pooling_factors=[50.0])
    weighted_bytes, weighted_ms = sent_and_ms(pooling_factors=[50.0], is_weighted=True)
    assert few_bytes < many_bytes < weighted_bytes
    assert few_ms < many_ms < weighted_ms


REFUSED: Mapping[str, Any] = {
    "num_poolings": [2.0],
    "batch_sizes": [7],
    "feature_names": ["other"],
    "device_group": "cpu",
    "use_virtual_table": True,
    "output_dtype": DataType.FP16,
    "sharding_types": ["quantum_wise"],
    "compute_kernels": ["key_value"],
    "pooling_factors": [1.0, 2.0],
}


@pytest.mark.parametrize("field", REFUSED)
def test_a_constraint_that_cannot_be_honoured_is_refused_by_name(field: str) -> None:
    with pytest.raises(PlannerError, match=rf"table 't1': {field}") as caught:
        planned(full_tables(), constraints={"t1": ParameterConstraints(**{field: REFUSED[field]})})
    assert caught.value.error_type == PlannerErrorType.INPUT_VALIDATION


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"constraints": {"t9": ParameterConstraints()}}, "constraints.*t9"),
        ({"ranks": {"t9": [0]}}, "ranks.*t9"),
        ({"own": topology(8, nodes=2, pod_size=2)}, "pod_size"),
        ({"own": Topology(4, "mtia")}, "mtia"),
        ({"device": "cpu-256gb"}, "is a cpu device"),
    ],
)
def test_other_wishes_that_cannot_be_met_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PlannerError, match=message):
        planned(full_tables(), **arguments)


@pytest.mark.thorough
def test_tables_are_pinned_and_lie_together() -> None:
    found = planned(full_tables(4), ranks={"t0": [3], "t1": [0, 1]}, together=[["t0", "t2"]])
    assert found["t0"].ranks == found["t2"].ranks == [3]
    assert set(found["t1"].ranks or []) <= {0, 1}


def custom(hbm: list[int]) -> Topology:
    data = CustomTopologyData({"hbm_cap": hbm, "ddr_cap": [0] * len(hbm)}, len(hbm))
    return topology(len(hbm), custom_topology_data=data)


@pytest.mark.thorough
def test_unequal_memory_is_filled_and_never_exceeded() -> None:
    model, whole = full_tables(4), {f"t{at}": ParameterConstraints(sharding_types=["table_wise"]) for at in range(4)}
    found = planned(model, custom([5 * GIB, 2 * GIB, GIB // 4]), constraints=whole)
    ranks = [rank for own in found.values() for rank in own.ranks or []]
    assert sorted(ranks) == [0, 0, 0, 1]
    with pytest.raises(PlannerError, match=r"do not fit|does not fit|lacks") as caught:
        planned(model, custom([3 * GIB, 2 * GIB, GIB // 4]), constraints=whole)
    assert caught.value.error_type == PlannerErrorType.INSUFFICIENT_STORAGE


@pytest.mark.thorough
@pytest.mark.parametrize("make", [FixedPercentageStorageReservation, HeuristicalStorageReservation])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_a_reservation_leaves_is_filled(make: Callable[[float], Any]) -> None:
    whole = {f"t{at}": ParameterConstraints(sharding_types=["table_wise"]) for at in range(4)}
    arguments = {"own": topology(4, memory=2 * GIB), "constraints": whole}
    assert len(planned(full_tables(4), storage_reservation=make(0.4), **arguments)) == 4
    with pytest.raises(PlannerError) as caught:
        planned(full_tables(4), storage_reservation=make(0.6), **arguments)
    assert caught.value.error_type == PlannerErrorType.INSUFFICIENT_STORAGE


def check_on_ranks(rank: int, world_size: int) -> None:
    """All ranks have the plan of the first one, and raise what it raises."""
    planner = CompositionalShardingPlanner(topology(world_size, "cpu"), 64, ranks={"t0": [world_size - 1]})
    found = {name: str(own) for name, own in units(planner.collective_plan(full_tables(num_ids=1000))).items()}
    by_rank: list[Any] = [None] * world_size
    dist.all_gather_object(by_rank, found)
    assert by_rank == [found] * world_size and f"ranks=[{world_size - 1}]" in found["t0"]
    with pytest.raises(PlannerError, match="do not fit"):
        CompositionalShardingPlanner(topology(world_size, "cpu", 2**20), 64).collective_plan(full_tables())


@pytest.mark.distributed
def test_ranks_together_have_one_plan_or_one_error() -> None:
    run_on_ranks(2, check_on_ranks)
