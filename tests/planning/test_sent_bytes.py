"""Bytes that a step is said to send against those that the ranks hand to gloo."""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

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

NUM_STEPS = 4


class Sent:
    """Counts what this rank gives to others, by the type of what is sent."""

    def __init__(self) -> None:
        self.ids = self.floats = 0

    def count(self, tensor: Tensor, numbers: float) -> None:
        if tensor.is_floating_point() or tensor.dtype == torch.uint8:  # of codecs to int8
            self.floats += round(numbers * tensor.itemsize)
        else:
            self.ids += round(numbers * tensor.itemsize)

    def all_to_all_single(self, output: Tensor, input: Tensor, *splits: Any, **named: Any) -> None:
        sizes = named.get("input_split_sizes") or (splits[1] if len(splits) > 1 else None)
        of_row = input.numel() // max(1, len(input))
        group = named.get("group")
        own = sizes[dist.get_rank(group)] if sizes else len(input) // dist.get_world_size(group)
        self.count(input, (len(input) - own) * of_row)

    def reduce_scatter_tensor(self, output: Tensor, input: Tensor, *_: Any, **__: Any) -> None:
        self.count(input, input.numel() - output.numel())

    def reduce_scatter(self, output: Tensor, inputs: list[Tensor], *_: Any, **named: Any) -> None:
        own = dist.get_rank(named.get("group"))
        self.count(output, sum(part.numel() for i, part in enumerate(inputs) if i != own))

    def all_gather_into_tensor(self, output: Tensor, input: Tensor, *_: Any, **__: Any) -> None:
        self.count(input, output.numel() - input.numel())

    def all_gather(self, outputs: list[Tensor], input: Tensor, *_: Any, **__: Any) -> None:
        self.count(input, (len(outputs) - 1) * input.numel())


COLLECTIVES = ("all_to_all_single", "reduce_scatter_tensor", "reduce_scatter", "all_gather_into_tensor", "all_gather")


@contextmanager
def counted(sent: Sent) -> Iterator[None]:
    originals = {name: getattr(dist, name) for name in COLLECTIVES}

    def wrap(name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            given = {key: named[key] for key in ("output", "input", "output_tensor", "input_tensor") if key in named}
            positional = [*given.values(), *arguments]
            getattr(sent, name)(*positional, **{k: v for k, v in named.items() if k not in given})
            return originals[name](*arguments, **named)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, wrap(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def check(rank: int, world_size: int, cases: list[Case]) -> None:
    torch.manual_seed(0)
    for case in cases:
        model, optimizers = sharded(case, world_size)
        pipeline = StepPipeline(model, optimizers.combined, Ranks(rank, world_size, world_size, torch.device("cpu")))
        sent, num_rows = Sent(), case.batch_size // world_size
        with counted(sent):
            assert len(list(pipeline.outputs(batches(case, rank, num_rows, NUM_STEPS)))) == NUM_STEPS
        (module,) = [m for m in model.modules() if isinstance(m, ShardedCompositionalEmbeddingBagCollection)]
        workload = workload_of(case, NetworkEstimate())
        placements, exchanges = list(module._placements.values()), {"": case.exchange}
        expected = Step(placements, world_size, workload, TableOptimizers(), "cpu", exchanges).sent_bytes(rank)
        assert sent.floats == NUM_STEPS * (expected.vectors + expected.gradients), (case, expected)
        # how many ids go where depends on their rows, and so does what is told of it beforehand
        slack = 0.02 if case.layouts == ("table_wise",) and not case.is_multi_hot else 0.12
        assert sent.ids == pytest.approx(NUM_STEPS * expected.ids, rel=slack), (case, expected)


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
