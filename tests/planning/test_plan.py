"""Plans of compositional tables: what the planner may choose, and what it says where nothing fits."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from distembed.base.errors import InsufficientMemory, UserError
from distembed.base.ranks import Ranks
from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from distembed.optim.declared import TableOptimizers
from distembed.partitions import QuotientRemainder
from distembed.planning import PlanConfig, Workload, describe_plan, make_plan, plan_as_json
from distembed.planning import search as plan_module
from distembed.planning.config import TablePlanConfig
from distembed.planning.devices import Cluster, find_device
from distembed.planning.layouts import Layouts
from distembed.planning.networks import NetworkEstimate
from distembed.planning.search import find_plan
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder
from distembed.sharding.placement import place_table
from tests.planning.drawn_requests import request_of
from tests.ranks import run_on_ranks

GIB = 2**30


def tables() -> list[CompositionalEmbeddingBagConfig]:
    scheme = QuotientRemainder(4000, collisions=4)
    make = CompositionalEmbeddingBagConfig
    return [
        make("a", 4000, 16, ["a"], scheme),
        make("b", 4000, 16, ["b"], scheme, "path_linear"),
        make("c", 4000, 16, ["c"], scheme, pooling="max"),
    ]


def one_table(num_bytes: int, composition: str = "product") -> list[CompositionalEmbeddingBagConfig]:
    num_ids = num_bytes // (32 * 4) * 4
    scheme = QuotientRemainder(num_ids, collisions=4)
    return [CompositionalEmbeddingBagConfig("a", num_ids, 32, ["a"], scheme, composition)]


def plan(
    config: PlanConfig,
    of_tables: list[CompositionalEmbeddingBagConfig] | None = None,
    workload: Workload | None = None,
    **settings: Any,
) -> dict[str, dict[str, Any]]:
    model = nn.ModuleDict({"e": CompositionalEmbeddingBagCollection(of_tables or tables(), device="meta")})
    world = dist.get_world_size()
    made = make_plan(
        model,
        [CompositionalEmbeddingBagCollectionSharder()],
        Ranks(dist.get_rank(), world, world, torch.device("cpu")),
        workload or Workload(8 * world),
        config,
        **settings,
    )
    assert describe_plan(made).count("shards by rank") == 1
    return plan_as_json(made)["e"]


def types(planned: dict[str, dict[str, Any]]) -> list[str]:
    return [placed["sharding_type"] for placed in planned.values()]


def check_plans(rank: int, world_size: int) -> None:
    # small tables are whole or replicated
    assert set(types(plan(PlanConfig()))) <= {"table_wise", "data_parallel"}
    own = {"a": TablePlanConfig(["column_wise"], min_partition=4), "b": TablePlanConfig(["row_wise"])}
    chosen = plan(PlanConfig(["data_parallel"], tables=own))
    assert types(chosen) == ["column_wise", "row_wise", "data_parallel"]
    assert [shard["size"][1] for shard in chosen["a"]["shards"]] == [8] * 2
    by_torch = plan(PlanConfig(), one_table(4000), optimizers=TableOptimizers(is_fused=False))
    assert [placed["compute_kernel"] for placed in by_torch.values()] == ["dense"]
    with pytest.raises(UserError, match="'c' may only be placed row_wise, but it cannot be"):
        plan(PlanConfig(["row_wise"]))
    with pytest.raises(UserError, match="plan.tables"):
        plan(PlanConfig(tables={"x": TablePlanConfig()}))
    # on two ranks of 3 GiB, 4 GiB are divided, by rows where columns need each other, and 400 GiB do not fit at all
    plan_module.host_memory_bytes = lambda: 2 * 3 * GIB
    assert types(plan(PlanConfig(), one_table(4 * GIB))) == ["column_wise"]
    assert types(plan(PlanConfig(), one_table(4 * GIB, "path_linear"))) == ["row_wise"]
    assert types(plan(PlanConfig(["row_wise"]), one_table(4 * GIB))) == ["row_wise"]
    # 3 GiB of weights fit on two ranks, with as much state of Adagrad they do not, nor with AMSGrad's and gradients
    assert types(plan(PlanConfig(), one_table(3 * GIB))) == ["column_wise"]
    for optimizer, is_fused in (("adagrad", True), ("amsgrad", False)):
        with pytest.raises(InsufficientMemory, match="do not fit"):
            plan(PlanConfig(), one_table(3 * GIB), optimizers=TableOptimizers(optimizer, is_fused=is_fused))
    with pytest.raises(InsufficientMemory, match="do not fit in the memory of 2 rank"):  # on every rank, and none waits
        plan(PlanConfig(), one_table(400 * GIB))
    # tables that have room, and a step that has none; or its networks
    with pytest.raises(InsufficientMemory, match=r"A step does not fit: rank \d lacks [\d,]+ bytes.*train.batch_size"):
        plan(PlanConfig(), one_table(1 * GIB), Workload(20_000_000))
    with pytest.raises(InsufficientMemory, match=r"besides tables each rank needs 3,221,225,472 bytes.*activations"):
        plan(PlanConfig(), workload=Workload(8, network=NetworkEstimate(peak=3 * GIB)))


@pytest.mark.parametrize(
    ("device", "data_type", "config", "narrowest"),
    [
        ("h100-80gb", "FP32", PlanConfig(), 32),
        ("h100-80gb", "FP16", PlanConfig(), 64),
        ("cpu-256gb", "FP32", PlanConfig(), 16),
        ("h100-80gb", "FP32", PlanConfig(min_partition=8), 8),
        ("h100-80gb", "FP32", PlanConfig(["table_wise", "column_wise"]), 32),
        ("h100-80gb", "FP32", PlanConfig(["column_wise"]), 4),
    ],
)
def test_columns_are_cut_to_lines_of_the_cache_unless_the_config_says_otherwise(
    device: str, data_type: Any, config: PlanConfig, narrowest: int
) -> None:
    table = CompositionalEmbeddingBagConfig("t", 1000, 128, ["f"], data_type=data_type)
    request = request_of([table], Cluster(find_device(device), 1, 64), Workload(64), config)
    layouts = Layouts(request).for_unit([(table, "bags")])[0]
    assert min(stop - start for layout in layouts for start, stop in layout.columns) == narrowest


def large_tables(num_tables: int) -> list[CompositionalEmbeddingBagConfig]:
    """Up to 10^10 ids, as many tables of each order of magnitude; every tenth has a row an id, up to 10^8."""
    rng = np.random.default_rng(0)
    made = []
    for i in range(num_tables):
        num_ids, dim = int(10 ** rng.uniform(6, 8 if i % 10 == 0 else 10)), int(rng.choice([64, 128]))
        scheme = "naive" if i % 10 == 0 else QuotientRemainder(num_ids, collisions=1000)
        made.append(CompositionalEmbeddingBagConfig(f"t{i}", num_ids, dim, [f"f{i}"], scheme))
    return made


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("num_tables", "nodes", "optimizer"),
    [(24, 3, "row_wise_adagrad"), pytest.param(1000, 128, "adagrad", marks=pytest.mark.slow)],
)
def test_many_ranks_have_room_and_take_about_as_long_as_any_plan_must(
    num_tables: int, nodes: int, optimizer: str
) -> None:
    of_tables, world_size = large_tables(num_tables), 8 * nodes
    cluster, workload = Cluster(find_device("a100-80gb"), nodes, 8), Workload(512 * world_size)
    made = find_plan(request_of(of_tables, cluster, workload, optimizers=TableOptimizers(optimizer)))
    planned = made.plan.plan["bags"]
    assert list(planned) == [table.name for table in of_tables]
    # refuses what is not placed once and whole
    placements = [place_table(table, planned[table.name], world_size) for table in of_tables]
    for placement in placements:
        ranks = placement.unit.ranks or []
        assert len(set(ranks)) == len(ranks) > 0
    slowest = max(rank.times.total for rank in made.ranks)
    assert made.fits and made.lower_bound_ms is not None and made.lower_bound_ms <= slowest * (1 + 1e-9)
    assert slowest <= 1.5 * made.lower_bound_ms
    assert all(len(others) == 2 for others in made.alternatives.values())


@pytest.mark.thorough
@pytest.mark.distributed
def test_the_planner_chooses_from_what_is_allowed() -> None:
    run_on_ranks(2, check_plans)


def test_ranges_of_columns_within_nodes_lie_on_one_node_each() -> None:
    of_tables = [CompositionalEmbeddingBagConfig(f"t{i}", 4000, 64, [f"f{i}"], "naive") for i in range(3)]
    config, cluster = PlanConfig(["table_column_wise"]), Cluster(find_device("h100-80gb"), 2, 4)
    found = find_plan(request_of(of_tables, cluster, Workload(65_536), config))
    for placed in plan_as_json(found.plan)["bags"].values():
        assert placed["ranks"] in ([0, 1, 2, 3], [4, 5, 6, 7])
        assert [shard["offset"][1] for shard in placed["shards"]] == [0, 16, 32, 48]
    assert found.lower_bound_ms is not None
    # the bound and the step add the same times up in another order
    assert found.lower_bound_ms <= max(rank.times.total for rank in found.ranks) * (1 + 1e-12)


LARGE, SMALL = 1_000_000, 8
"""Ids of tables of 16 numbers, which take 128 MB with Adagrad's states, and 1 KB."""


def why(num_ids: int, *, megabytes: int = 80_000, rows_of_rank: int = 256, config: PlanConfig | None = None) -> str:
    """The reason of one table's placement on two devices."""
    device = replace(find_device("h100-80gb"), memory_bytes=megabytes * 10**6)
    table = CompositionalEmbeddingBagConfig("t", num_ids, 16, ["f"])
    workload, optimizers = Workload(2 * rows_of_rank), TableOptimizers("adagrad")
    found = find_plan(request_of([table], Cluster(device, 1, 2), workload, config, optimizers))
    assert found.fits
    return found.why["t"]


def test_a_table_that_no_rank_has_room_for_is_divided_for_that() -> None:
    assert why(LARGE, megabytes=120).endswith(": whole it would not fit")


@pytest.mark.thorough
def test_a_table_that_one_rank_is_slow_with_is_divided_for_that() -> None:
    assert why(LARGE, rows_of_rank=200_000).endswith(": whole its rank would be the slowest")


def test_a_table_whose_gradients_are_less_than_its_vectors_is_replicated() -> None:
    # 8 rows of 16 floats
    assert why(SMALL) == "replicated: 512 B of gradients cost less than its exchange"


def test_what_the_config_says_is_the_reason() -> None:
    reason = why(SMALL, config=PlanConfig(["row_wise"]))  # type: ignore[arg-type]
    assert reason == "of row_wise, as plan.sharding_types has it"
