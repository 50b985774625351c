"""Plans of compositional tables: what the planner may choose, and what it says where nothing fits."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from distembed.errors import RunError, UserError
from distembed.partitions import QuotientRemainder
from distembed.planning import PlanConfig, describe_plan, make_plan, plan_as_json
from distembed.planning import plan as plan_module
from distembed.planning.config import TablePlanConfig
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder
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


def one_table(num_bytes: int) -> list[CompositionalEmbeddingBagConfig]:
    num_ids = num_bytes // (16 * 4) * 4
    scheme = QuotientRemainder(num_ids, collisions=4)
    return [CompositionalEmbeddingBagConfig("a", num_ids, 16, ["a"], scheme)]


def plan(
    config: PlanConfig, of_tables: list[CompositionalEmbeddingBagConfig] | None = None, **settings: Any
) -> dict[str, dict[str, Any]]:
    model = nn.ModuleDict({"e": CompositionalEmbeddingBagCollection(of_tables or tables(), device="meta")})
    world = dist.get_world_size()
    made = make_plan(
        model,
        [CompositionalEmbeddingBagCollectionSharder()],
        device=torch.device("cpu"),
        world_size=world,
        local_world_size=world,
        batch_size=8,
        config=config,
        **settings,
    )
    assert describe_plan(made).count("shards by rank") == 1
    return plan_as_json(made)["e"]


def types(planned: dict[str, dict[str, Any]]) -> list[str]:
    return [placed["sharding_type"] for placed in planned.values()]


def check_plans(rank: int, world_size: int) -> None:
    # unless told otherwise, what communicates as plain tables do
    assert set(types(plan(PlanConfig()))) <= {"table_wise", "column_wise"}
    own = {"a": TablePlanConfig(["column_wise"], min_partition=4), "b": TablePlanConfig(["row_wise"])}
    chosen = plan(PlanConfig(["data_parallel"], tables=own))
    assert types(chosen) == ["column_wise", "row_wise", "data_parallel"]
    assert [shard["size"][1] for shard in chosen["a"]["shards"]] == [4] * 4
    assert all(placed["compute_kernel"] == "dense" for placed in plan(PlanConfig(), fused=False).values())
    with pytest.raises(UserError, match="'c' may only be placed row_wise, but it cannot be"):
        plan(PlanConfig(["row_wise"]))
    with pytest.raises(UserError, match="plan.tables"):
        plan(PlanConfig(tables={"x": TablePlanConfig()}))
    # on two ranks of 3 GiB, 2 GiB fit as they are, 4 GiB by rows only and 400 GiB not at all
    plan_module.host_memory_bytes = lambda: 2 * 3 * GIB
    assert types(plan(PlanConfig(), one_table(2 * GIB))) == ["table_wise"]
    assert types(plan(PlanConfig(), one_table(4 * GIB))) == ["row_wise"]
    with pytest.raises(RunError, match="do not fit in the memory of 2 rank"):  # on every rank, and none waits
        plan(PlanConfig(), one_table(400 * GIB))


@pytest.mark.distributed
def test_the_planner_chooses_from_what_is_allowed() -> None:
    run_on_ranks(2, check_plans)
