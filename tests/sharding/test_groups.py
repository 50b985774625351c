"""Kinds of groups: a plan counts the kind that a lookup makes, for every composition, of bags and of sequences."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.types import ParameterSharding, ShardingType, ShardMetadata

from distembed.composition import COMPOSITIONS
from distembed.embedding import CompositionalEmbeddingBagConfig, CompositionalEmbeddingConfig
from distembed.embedding.settings import POOLINGS
from distembed.optim.declared import TableOptimizers
from distembed.partitions import Naive, QuotientRemainder
from distembed.planning.buffers import Step
from distembed.planning.request import Workload
from distembed.sharding import groups
from distembed.sharding.groups import GroupLoad, TableLoad, fused, group_type, make_group
from distembed.sharding.groups.fused import FusedGroup
from distembed.sharding.placement import place_table
from distembed.sharding.table_slice import LocalTable, unit_size, width

NUM_IDS, DIM, ROWS = 400, 8, 64
KINDS = {
    "sum": "PooledGroup",
    "concat": "PooledGroup",
    "feature": "PooledGroup",
    "concat_sum": "PooledGroup",
    "product": "ProductGroup",
    "path_linear": "PathGroup",
    "path_mlp": "PathGroup",
    "weighted_sum": "DistinctGroup",
    "tensor_train": "PerIdGroup",
}
CASES: list[tuple[str, str | None]] = list(itertools.product(COMPOSITIONS, [*POOLINGS, None]))


def make_table(composition: str, pooling: str | None, kernel: str = "auto") -> CompositionalEmbeddingConfig:
    """A table of bags, or of sequences where there is no pooling."""
    scheme = QuotientRemainder(NUM_IDS, collisions=4)
    settings: dict[str, Any] = {"partition": scheme, "composition": composition, "kernel": kernel}
    if pooling is None:
        return CompositionalEmbeddingConfig("t", NUM_IDS, DIM, ["f"], **settings)
    return CompositionalEmbeddingBagConfig("t", NUM_IDS, DIM, ["f"], **settings, pooling=pooling)  # type: ignore[arg-type]


def replicate(table: CompositionalEmbeddingConfig, world_size: int) -> Any:
    unit = ParameterSharding(ShardingType.DATA_PARALLEL.value, "dense", list(range(world_size)))
    return place_table(table, unit, world_size)


def expected_kind(composition: str, pooling: str | None, kernel: str) -> str:
    by_column = not composition.startswith("path") and composition not in ("weighted_sum", "tensor_train")
    if kernel == "auto" and pooling != "max" and by_column and composition != "concat_sum":
        return "FusedGroup"
    if pooling is None:
        return "SequenceGroup"
    return "PerIdGroup" if pooling == "max" and by_column else KINDS[composition]


@pytest.mark.parametrize(("composition", "pooling"), CASES)
@pytest.mark.parametrize("kernel", ["auto", "fbgemm"])
def test_the_lookup_is_of_the_kind_that_is_counted(composition: str, pooling: str | None, kernel: str) -> None:
    table = make_table(composition, pooling, kernel)
    kind = group_type(replicate(table, 2).slice(0, width(table)), "cpu", "row_wise_adagrad")
    assert kind.__name__ == expected_kind(composition, pooling, kernel)
    weights = {part.name: nn.Parameter(torch.zeros(part.num_rows, part.dim)) for part in table.partition_tables()}
    whole = replicate(table, 2).slice(0, width(table))
    assert type(make_group([LocalTable(table, whole.num_columns, whole.partitions)], weights, 1, [], "cpu")) is kind
    absent = LocalTable(table, whole.num_columns, ())
    assert type(make_group([absent], weights, 1, [], "cpu")).__name__ == "AbsentGroup"


@pytest.mark.parametrize(
    ("architecture", "is_intel", "has_avx512", "in_one_pass"),
    [
        ("x86_64", True, True, {"adagrad", "row_wise_adagrad"}),
        ("x86_64", False, False, {"adagrad", "row_wise_adagrad"}),
        ("x86_64", False, True, {"adagrad"}),
        ("aarch64", False, False, set()),
    ],
)
def test_tables_of_one_partition_take_one_pass_where_the_processor_and_the_optimizer_make_it_faster(
    monkeypatch: pytest.MonkeyPatch, architecture: str, is_intel: bool, has_avx512: bool, in_one_pass: set[str]
) -> None:
    capabilities = {"architecture": architecture, "avx512_f": has_avx512}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(fused, "is_intel_processor", lambda: is_intel)
    monkeypatch.setattr(groups, "is_faster_alone", fused.is_faster_alone.__wrapped__)
    table = CompositionalEmbeddingBagConfig("t", NUM_IDS, DIM, ["f"], Naive(NUM_IDS))
    own = place_table(table, hypothetical_unit(table, "table_wise", 2), 2).slice(0, DIM)
    kinds = {name: group_type(own, "cpu", name) for name in ("sgd", "adagrad", "row_wise_adagrad", "lamb")}
    assert {name for name, kind in kinds.items() if kind is FusedGroup} == in_one_pass
    assert not any(
        group_type(whole, "cuda", name) is FusedGroup
        for whole in (own, replicate(table, 2).slice(0, DIM))
        for name in kinds
    )


@pytest.mark.parametrize(("composition", "pooling"), CASES)
@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
@pytest.mark.parametrize("kernel", ["auto", "fbgemm"])
def test_more_ids_take_no_less_memory_and_work(
    composition: str, pooling: str | None, device_kind: str, kernel: str
) -> None:
    table = make_table(composition, pooling, kernel)
    whole = replicate(table, 2).slice(0, width(table))
    kind = group_type(whole, device_kind, "row_wise_adagrad")

    def load(ids_per_row: float) -> GroupLoad:
        return GroupLoad([whole], [NUM_IDS], [ROWS * ids_per_row], [ids_per_row > 1], ROWS, averages_gradients=True)

    totals = []
    for ids_per_row in (1.0, 3.0, 9.0, 27.0):
        memory = kind.memory(load(ids_per_row), device_kind)
        assert min(memory.saved_bytes, memory.backward_bytes, memory.update_bytes, memory.forward_bytes) >= 0
        totals.append(memory.saved_bytes + memory.forward_bytes)
    # from single ids to bags the way of looking up changes
    assert totals[1:] == sorted(totals[1:])
    few, many = (kind.work(TableLoad(whole, 1, num_ids, ROWS, [NUM_IDS], True)) for num_ids in (ROWS, 9 * ROWS))
    assert few.moved_bytes <= many.moved_bytes and few.operations <= many.operations
    assert max(few.lookups) <= max(many.lookups)
    assert (few.operations > 0) == composition.startswith("path")


@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise"])
def test_sequences_send_a_vector_an_id_where_bags_send_one_a_bag(sharding_type: str) -> None:
    world_size, ids_per_row = 2, 3.0
    workload = Workload(ROWS * world_size, {"f": ids_per_row})
    sent = {}
    for pooling in ("sum", None):
        table = make_table("product", pooling)
        placement = place_table(table, hypothetical_unit(table, sharding_type, world_size), world_size)
        step = Step([placement], world_size, workload, TableOptimizers(), "cpu")
        sent[pooling] = [step.sent_bytes(rank) for rank in range(world_size)]
    vector_bytes = 4 * DIM
    # half of a row-wise table's ids are this rank's own; of bags every rank has a partial sum
    vectors = ids_per_row * ROWS * (0.5 if sharding_type == "row_wise" else 1)
    assert [own.ids for own in sent[None]] == [own.ids for own in sent["sum"]]
    assert max(own.vectors for own in sent[None]) == vectors * vector_bytes
    assert max(own.vectors for own in sent["sum"]) == ROWS * vector_bytes


def hypothetical_unit(table: CompositionalEmbeddingConfig, sharding_type: str, world_size: int) -> ParameterSharding:
    rows, columns = unit_size(table)
    ranks = list(range(world_size if sharding_type == "row_wise" else 1))
    block = -(-rows // len(ranks))
    shards = [
        ShardMetadata([rank * block, 0], [min(block, rows - rank * block), columns], f"rank:{rank}/cpu")
        for rank in ranks
    ]
    return ParameterSharding(sharding_type, "fused", ranks, EnumerableShardingSpec(shards))
