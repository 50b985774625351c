"""Bytes that a step is said to send against those that the ranks hand to gloo."""

import itertools
import os

import pytest
import torch
import torch.distributed as dist

from distembed.base.ranks import Ranks
from distembed.embedding.settings import QuantizedCommsConfig, VectorExchange
from distembed.optim.declared import TableOptimizers
from distembed.planning.buffers import Step
from distembed.planning.networks import NetworkEstimate
from distembed.planning.storage import SentBytes
from distembed.sharding.bag_collection import ShardedCompositionalEmbeddingBagCollection
from distembed.training.pipeline import StepPipeline
from tests.planning.test_buffers import Case, batches, sharded, workload_of
from tests.ranks import run_on_ranks
from tests.sharding.test_traffic import CountBytes

NUM_STEPS = 4


def sent(counted: CountBytes, are_ids: bool) -> int:
    """Bytes that this rank gives to others, of ids and of what tells their number, or of vectors and gradients."""
    return sum(
        num_bytes
        for (name, peer, dtype), num_bytes in counted.by_peer.items()
        if name != "allreduce_" and peer != dist.get_rank()
        # uint8 is of codecs to int8
        if are_ids != (dtype.is_floating_point or dtype == torch.uint8)
    )


def check(rank: int, world_size: int, cases: list[Case]) -> None:
    torch.manual_seed(0)
    for case in cases:
        model, optimizers = sharded(case, world_size)
        pipeline = StepPipeline(model, optimizers.combined, Ranks(rank, world_size, world_size, torch.device("cpu")))
        num_rows = case.batch_size // world_size
        with CountBytes() as counted:
            assert len(list(pipeline.outputs(batches(case, rank, num_rows, NUM_STEPS)))) == NUM_STEPS
        (module,) = [m for m in model.modules() if isinstance(m, ShardedCompositionalEmbeddingBagCollection)]
        workload = workload_of(case, NetworkEstimate())
        placements, exchanges = list(module._placements.values()), {"": case.exchange}
        expected = Step(placements, world_size, workload, TableOptimizers(), "cpu", exchanges).sent_bytes(rank)
        assert sent(counted, False) == NUM_STEPS * (expected.vectors + expected.gradients), (case, expected)
        # how many ids go where depends on their rows, and so does what is told of it beforehand
        slack = 0.02 if case.layouts == ("table_wise",) and not case.is_multi_hot else 0.12
        assert sent(counted, True) == pytest.approx(NUM_STEPS * expected.ids, rel=slack), (case, expected)


CASES = [
    Case((layout,), "product", is_multi_hot, dim=dim)
    for layout, is_multi_hot, dim in itertools.product(("table_wise", "column_wise", "row_wise"), (False, True), (32,))
]


EXCHANGES = [
    VectorExchange("fp16"),
    VectorExchange("bf16"),
    VectorExchange(comms=QuantizedCommsConfig("fp16", "bf16")),
    VectorExchange(comms=QuantizedCommsConfig(backward_precision="fp16")),
    VectorExchange(comms=QuantizedCommsConfig("int8", "int8")),
    VectorExchange(comms=QuantizedCommsConfig("int8", "bf16")),
]
HALF_CASES = [
    Case((layout,), dim=64, exchange=exchange)
    for layout, exchange in itertools.product(("table_wise", "column_wise", "row_wise"), EXCHANGES)
    if layout != "row_wise" or not exchange.has_int8
]


SOME_HALF_CASES = [HALF_CASES[0], HALF_CASES[-2], *HALF_CASES[2:5]]
MIXED_CASES = [Case(("table_wise", "row_wise"), is_multi_hot=True), Case(("table_wise", "row_wise"), data_type="fp16")]


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (2, [*CASES, MIXED_CASES[0], *SOME_HALF_CASES]),
        *(pytest.param(ranks, [*CASES, *MIXED_CASES, *HALF_CASES], marks=pytest.mark.slow) for ranks in (2, 4)),
    ],
    ids=["2", "2, all", "4, all"],
)
def test_ranks_send_in_full_and_rounded_as_many_bytes_as_are_estimated(world_size: int, cases: list[Case]) -> None:
    run_on_ranks(world_size, check, cases)


def check_on_two_nodes(rank: int, world_size: int, cases: list[Case]) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    check(rank, world_size, cases)


@pytest.mark.distributed
@pytest.mark.slow
def test_ranks_of_two_nodes_send_what_is_estimated() -> None:
    kinds = [("table_row_wise",), ("grid_shard",), ("grid_shard", "table_row_wise", "column_wise", "row_wise")]
    cases = [Case(kind, "product", is_multi_hot) for kind in kinds for is_multi_hot in (False, True)]
    cases += [Case(kind, exchange=exchange) for kind, exchange in itertools.product(kinds[:2], EXCHANGES[:4])]
    run_on_ranks(
        4, check_on_two_nodes, [*cases, Case(("grid_shard",), "concat"), Case(("table_row_wise",), "path_mlp")]
    )


def test_data_parallel_tables_and_single_ranks_send_nothing_but_gradients_in_a_ring() -> None:
    network = NetworkEstimate(gradients=1000)
    assert Step([], 1, workload_of(CASES[0], network), TableOptimizers(), "cpu").sent_bytes(0) == SentBytes()
    assert Step([], 4, workload_of(CASES[0], network), TableOptimizers(), "cpu").sent_bytes(3) == SentBytes(
        all_reduce=1500
    )
