"""Tables with gradients in all rows, or scored as a whole: how they are placed, and what is counted of them."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.types import ParameterSharding, ShardMetadata

from distembed.base.errors import UserError
from distembed.base.ranks import Ranks
from distembed.embedding import (
    CompositionalEmbeddingBagConfig,
    CompositionalEmbeddingCollection,
    CompositionalEmbeddingConfig,
)
from distembed.optim.declared import TableOptimizers
from distembed.planning import make_plan
from distembed.planning.config import PlanConfig, TablePlanConfig
from distembed.planning.request import Workload
from distembed.planning.storage import whole_table_storage
from distembed.sharding import default_sharders
from distembed.sharding.placement import WITHIN_NODES, can_be_placed, place_table
from distembed.sharding.table_slice import unit_size

TABLES = [
    CompositionalEmbeddingConfig("user", 1000, 16, ["user"]),
    CompositionalEmbeddingConfig("item", 500, 16, ["item"], dense_gradient=True),
]


def test_dense_kernel_is_for_such_tables_alone() -> None:
    model = nn.Module()
    model.embeddings = CompositionalEmbeddingCollection(TABLES, device="meta")
    ranks = Ranks(0, 1, 1, torch.device("cpu"))
    optimizers = TableOptimizers("row_wise_adagrad", "adam", is_fused=True)
    for kind, kernels in (("table_wise", ("fused", "dense")), ("data_parallel", ("dense", "dense"))):
        config = PlanConfig(tables={table.name: TablePlanConfig(sharding_types=[kind]) for table in TABLES})
        plan = make_plan(model, default_sharders(), ranks, Workload(8), config, optimizers).plan["embeddings"]
        assert (plan["user"].compute_kernel, plan["item"].compute_kernel) == kernels


@pytest.mark.parametrize("first_is_dense", [False, True])
def test_tables_of_one_size_have_the_kernels_of_their_own_gradients(first_is_dense: bool) -> None:
    tables = [
        replace(TABLES[0], name=name, feature_names=[name], dense_gradient=is_dense)
        for name, is_dense in (("first", first_is_dense), ("second", not first_is_dense))
    ]
    model = nn.Module()
    model.embeddings = CompositionalEmbeddingCollection(tables, device="meta")
    ranks = Ranks(0, 1, 1, torch.device("cpu"))
    plan = make_plan(model, default_sharders(), ranks, Workload(8)).plan["embeddings"]
    kernels = {table.name: "dense" if table.dense_gradient else "fused" for table in tables}
    assert {name: plan[name].compute_kernel for name in kernels} == kernels


def test_storage_has_the_gradient_and_the_state_of_the_dense_optimizer() -> None:
    user, item = (whole_table_storage(table, TableOptimizers("row_wise_adagrad", "adam")) for table in TABLES)
    assert (user.weights, user.optimizer_state, user.gradients) == (1000 * 16 * 4, 1000 * 4, 0)
    weights = 500 * 16 * 4
    assert (item.weights, item.gradients) == (weights, weights)
    assert 2 * weights <= item.optimizer_state <= 2 * weights + 8


def planned(kernel: str, sharding_type: str = "table_wise") -> ParameterSharding:
    shards = [ShardMetadata([0, 0], list(unit_size(TABLES[1])), "rank:0/cpu")]
    return ParameterSharding(sharding_type, kernel, [0], EnumerableShardingSpec(shards))


def test_a_planner_that_tells_no_tables_apart_does_no_harm() -> None:
    assert place_table(TABLES[1], planned("fused"), 1).unit.compute_kernel == "dense"
    assert place_table(replace(TABLES[1], dense_gradient=False), planned("fused"), 1).unit.compute_kernel == "fused"
    with pytest.raises(UserError, match=r"'item' is planned with compute kernel fused_uvm.*host_memory=False"):
        place_table(TABLES[1], planned("fused_uvm"), 1)


@pytest.mark.parametrize("sharding_type", WITHIN_NODES)
def test_tables_that_are_scored_are_not_divided_within_nodes(sharding_type: str) -> None:
    table = CompositionalEmbeddingBagConfig("item", 500, 16, ["item"])
    scored = replace(table, all_scored=True)
    assert can_be_placed(table, sharding_type) and not can_be_placed(scored, sharding_type)
    assert can_be_placed(scored, "row_wise")
    assert place_table(table, planned("fused", sharding_type), 1).sharded
    with pytest.raises(UserError, match=f"'item' is planned {sharding_type}, and all of its vectors are scored"):
        place_table(scored, planned("fused", sharding_type), 1)
