"""Tables of special kinds: looked up in one pass, with gradients in all rows, scored as a whole, in half precision."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.types import ParameterSharding, ShardMetadata
from typer.testing import CliRunner, Result

from distembed.base.errors import UserError
from distembed.base.ranks import Ranks
from distembed.commands.cli import app
from distembed.composition import PathLinear
from distembed.embedding import (
    CompositionalEmbeddingBagConfig,
    CompositionalEmbeddingCollection,
    CompositionalEmbeddingConfig,
)
from distembed.embedding.settings import LookupKernel, QuantizedCommsConfig, VectorExchange
from distembed.optim.declared import TableOptimizers
from distembed.optim.table_storage import whole_table_storage
from distembed.partitions import Clustered, MultiHash, Partition, QuotientRemainder, Remainder, Truncated
from distembed.planning import PlanConfig, Workload, make_plan
from distembed.planning.config import TablePlanConfig
from distembed.planning.devices import Cluster, find_device
from distembed.planning.layouts import Layouts
from distembed.planning.search import find_plan
from distembed.sharding import default_sharders
from distembed.sharding.placement import WITHIN_NODES, can_be_placed, place_table
from distembed.sharding.sharder import exchange_of
from distembed.sharding.table_slice import unit_size
from distembed.training.config import load_config
from tests.planning.drawn_requests import request_of

NUM_IDS = 1000


def kernels(optimizer: str, device: str = "h100-80gb", **settings: Any) -> set[tuple[str, str]]:
    """Returns the sharding types and compute kernels that a table of these settings may be planned with."""
    settings = {"embedding_dim": 16, "partition": QuotientRemainder(NUM_IDS, collisions=4), **settings}
    table = CompositionalEmbeddingBagConfig("clicks", NUM_IDS, feature_names=["f"], **settings)
    cluster, config = Cluster(find_device(device), 1, 2, 10**12), PlanConfig(host_memory=device != "cpu-256gb")
    request = request_of([table], cluster, Workload(64), config, TableOptimizers(optimizer))
    return {(layout.sharding_type, layout.compute_kernel) for layout in Layouts(request).for_unit([(table, "bags")])[0]}


def test_no_table_is_planned_where_rows_are_read_through_a_cache() -> None:
    auto, fused = kernels("adagrad"), kernels("adagrad", kernel="fused")
    assert fused == {own for own in auto if own[1] != "fused_uvm_caching"} < auto


def test_an_optimizer_that_the_pass_lacks_leaves_what_torch_updates() -> None:
    assert {kernel for _, kernel in kernels("adam")} > {"dense"}
    assert kernels("adam", kernel="fused") == {("data_parallel", "dense")}
    assert kernels("adam", "cpu-256gb", kernel="fused") == {("data_parallel", "dense")}


@pytest.mark.parametrize("device", ["h100-80gb", "cpu-256gb"])
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"composition": PathLinear()}, "path_linear does not compose column by column"),
        ({"composition": "weighted_sum"}, "the kernels have no formula of weighted_sum"),
        ({"composition": "tensor_train"}, "the kernels have no formula of tensor_train"),
        ({"composition": "concat_sum"}, "the kernels have no formula of concat_sum"),
        ({"partition": Clustered(NUM_IDS)}, "rows of clustered are not digits of ids"),
        ({"pooling": "max"}, "pooling is max"),
        ({"embedding_dim": 6}, "a number of columns is no multiple of 4"),
    ],
)
def test_what_training_would_refuse_is_not_planned(settings: dict[str, Any], reason: str, device: str) -> None:
    assert kernels("adagrad", device, **settings)
    with pytest.raises(UserError, match=f"'clicks' has kernel='fused'.*because {reason}; give it kernel='auto'"):
        kernels("adagrad", device, **settings, kernel="fused")


def test_truncated_rows_are_looked_up_in_one_pass_on_a_cpu_alone() -> None:
    settings = {"partition": Truncated(NUM_IDS), "composition": "concat"}
    assert kernels("adagrad", "cpu-256gb", **settings, kernel="fused")
    with pytest.raises(UserError, match="rows of truncated have a largest one, which the kernels for GPUs do not"):
        kernels("adagrad", **settings, kernel="fused")
    assert kernels("adagrad", **settings)


def test_hashes_of_ids_are_looked_up_in_one_pass_on_a_cpu_alone() -> None:
    hashed = MultiHash(NUM_IDS, num_buckets=50)
    assert kernels("adagrad", "cpu-256gb", partition=hashed, kernel="fused")
    with pytest.raises(UserError, match="rows of multi_hash are hashes of ids, which the kernels for GPUs do not"):
        kernels("adagrad", partition=hashed, kernel="fused")
    assert kernels("adagrad", partition=hashed)
    with pytest.raises(UserError, match="rows of multi_hash are not digits of ids"):
        kernels("adagrad", "cpu-256gb", partition=MultiHash(NUM_IDS, moduli=[2, 2**31 + 1]), kernel="fused")


@pytest.mark.parametrize("bag", [1.0, 10.0])
def test_one_pass_is_estimated_to_take_less_than_lookups_by_partition_and_less_than_a_hashed_table(bag: float) -> None:
    """As it was measured (``tools/bench_embedding.py``): 0.15x to 0.7x of a hashed table, and these above 1x."""

    def lookup_ms(partition: Partition, kernel: LookupKernel) -> float:
        table = CompositionalEmbeddingBagConfig("clicks", 400_000, 16, ["f"], partition, kernel=kernel)
        cluster, workload = Cluster(find_device("cpu-256gb"), 1, 1, 10**12), Workload(8192, {"f": bag})
        request = request_of([table], cluster, workload, optimizers=TableOptimizers("adagrad"))
        return find_plan(request).ranks[0].times.lookup

    hashed = lookup_ms(Remainder(400_000, collisions=4), "fbgemm")
    scheme = QuotientRemainder(400_000, collisions=4)
    assert 0.15 * hashed < lookup_ms(scheme, "auto") < 0.8 * hashed < hashed < lookup_ms(scheme, "fbgemm")


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


ROOT = Path(__file__).parents[2]
EXCHANGES = [VectorExchange(dtype) for dtype in ("fp32", "fp16", "bf16")]  # type: ignore[arg-type]
EXCHANGES += [VectorExchange(comms=QuantizedCommsConfig(*pair)) for pair in (("fp16", "bf16"), ("int8", "fp32"))]  # type: ignore[arg-type]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_sharders_say_what_they_were_made_with(exchange: VectorExchange) -> None:
    pooled, sequences, *stock = default_sharders(exchange=exchange)
    assert exchange_of(pooled) == exchange_of(sequences) == exchange
    assert {exchange_of(sharder) for sharder in stock} == {VectorExchange(comms=exchange.comms)}


def test_precisions_that_cannot_be_are_refused_by_path() -> None:
    for overrides, message in (
        (["embedding.default.data_type=fp8"], "embedding.default.data_type"),
        (["embedding.output_dtype=half"], "embedding.output_dtype"),
        (["train.quantized_comms.forward_precision=fp8"], "train.quantized_comms.forward_precision"),
        (["embedding.output_dtype=fp16", "train.quantized_comms.backward_precision=bf16"], "leave one of the two out"),
    ):
        with pytest.raises(UserError, match=message):
            load_config(None, overrides)


def run_plan(*settings: str, gpu: str = "h100-80gb") -> Result:
    """Returns what ``distembed plan`` does with a shipped config and these settings."""
    arguments = ["plan", str(ROOT / "configs" / "criteo_kaggle.yaml"), "data.schema=criteo_kaggle", *settings]
    return CliRunner().invoke(app, [*arguments, "--gpus", "2", "--gpu", gpu])


def test_settings_of_half_precision_reach_the_plan_of_the_command() -> None:
    def planned(*settings: str) -> list[int]:
        done = run_plan("plan.sharding_types=[table_wise]", "plan.time_tolerance=1", *settings, "--json")
        assert done.exit_code == 0, done.output
        ranks = json.loads(done.output)["ranks"]
        items = [sum(rank["memory"][item] for rank in ranks) for item in ("table_weights", "table_optimizer_state")]
        return [*items, sum(rank["sent_bytes"]["vectors"] for rank in ranks)]

    weights, states, sent = planned()
    data_type, output_dtype = "embedding.default.data_type=fp16", "embedding.output_dtype=fp16"
    half_weights, same_states, same_sent = planned(data_type)
    assert (weights, states, sent) == (2 * half_weights, same_states, same_sent)
    half_weights, same_states, half_sent = planned(data_type, output_dtype)
    assert (weights, states, sent) == (2 * half_weights, same_states, 2 * half_sent)


def test_what_cannot_be_is_refused_with_the_remedy() -> None:
    int8, rows = "train.quantized_comms.forward_precision=int8", "plan.sharding_types=[row_wise]"
    for gpu, settings, message in (
        ("cpu-256gb", ["embedding.default.data_type=bf16"], "fp16 or fp32"),
        ("h100-80gb", [int8], "multiple of 32"),
        ("h100-80gb", [int8, "embedding.default.embedding_dim=32", rows], "no int8"),
    ):
        done = run_plan(*settings, gpu=gpu)
        assert done.exit_code == 2 or isinstance(done.exception, UserError), done.output
        assert message in str(done.exception) + done.output
