"""Compares the times of distembed's and TorchRec's sharded tables, alone and in a DLRM step, on one or several ranks.

::

    python tools/bench_sharding.py --ranks 1 2 --bags 1 10 --batch-size 2048

All contenders have 26 tables in equal placements and read equal rows of skewed ids. ``--batch-size`` is the number of
rows of all ranks together. TorchRec's ``EmbeddingBagCollection`` has either full tables, or hashed tables with as many
rows as distembed's quotient-remainder tables; its ids are hashed before the clock starts. A step is forward, backward
and update: row-wise Adagrad of the tables within the backward pass, then Adagrad of replicated parameters. A module
alone gets a given gradient; within DLRM (13 dense features, the paper's size, in float32) it gets the gradient of the
loss. On the CPU each rank computes with one thread.
"""

import argparse
import dataclasses
import statistics
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from bench_commands import bench_parser, kept_rows, median_ratio, write_output
from bench_common import (
    COLLISIONS,
    DIM,
    LEARNING_RATE,
    NAMES,
    NUM_BATCHES,
    NUM_DENSE,
    NUM_IDS,
    Step,
    compositional_collection,
    draw_clicks,
    draw_ids,
    make_features,
    run_ranks,
    surroundings,
    take_turns,
    torchrec_collection,
)
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import profile
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.ranks import Ranks
from distembed.models import DLRM
from distembed.partitions import QuotientRemainder
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder

PARTITION = QuotientRemainder(NUM_IDS, collisions=COLLISIONS)
BASELINE = "TorchRec, hashed"
ALONE, WITHIN = "embedding module", "whole DLRM step"

PLACES: dict[str, Callable[[int, int], Any]] = {
    "table_wise": lambda i, world_size: table_wise(rank=i % world_size, compute_kernel="fused"),
    "column_wise": lambda i, world_size: column_wise(ranks=list(range(world_size)), compute_kernel="fused"),
    "row_wise": lambda i, world_size: row_wise(compute_kernel="fused"),
}
"""The placement of the i-th table, by sharding type."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """A collection of 26 tables.

    Attributes:
        collection: Makes the collection, on the meta device.
        sharder: Makes the collection's sharder.
        num_rows: Ids are taken modulo this number before the step.
    """

    collection: Callable[[], nn.Module]
    sharder: Callable[[], ModuleSharder[Any]]
    num_rows: int


CONTENDERS = {
    "TorchRec, full": Contender(lambda: torchrec_collection(NUM_IDS), EmbeddingBagCollectionSharder, NUM_IDS),
    BASELINE: Contender(
        lambda: torchrec_collection(PARTITION.total_rows), EmbeddingBagCollectionSharder, PARTITION.total_rows
    ),
    **{
        f"distembed, {name}": Contender(
            lambda name=name: compositional_collection(PARTITION, name),
            CompositionalEmbeddingBagCollectionSharder,
            NUM_IDS,
        )
        for name in ("product", "sum", "concat")
    },
}


class _Alone(nn.Module):
    """A model of embeddings without networks."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        return self.embeddings(sparse_features).values()


def make_model(contender: Contender, part: str, sharding: str, ranks: Ranks) -> DistributedModelParallel:
    """Returns the contender's sharded collection, alone or within DLRM; all ranks call it."""
    torch.manual_seed(0)
    collection, sharder = contender.collection(), contender.sharder()
    vectors = collection.get_submodule("embedding_bags").parameters()
    apply_optimizer_in_backward(RowWiseAdagrad, vectors, {"lr": LEARNING_RATE})
    model = _Alone(collection) if part == ALONE else DLRM(collection, NAMES, DIM, NUM_DENSE)
    placed = {name: PLACES[sharding](i, ranks.world_size) for i, name in enumerate(NAMES)}
    plan = construct_module_sharding_plan(
        collection, placed, sharder, ranks.local_world_size, ranks.world_size, ranks.device.type
    )
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=ranks.device,
        plan=ShardingPlan({"embeddings": plan}),
        sharders=[sharder],
        init_data_parallel=ranks.world_size > 1,
    )


@dataclasses.dataclass(frozen=True)
class Rows:
    """This rank's rows of a batch, with ids feature after feature."""

    dense: Tensor
    ids: Tensor
    labels: Tensor


def draw_batches(num_local: int, bag: int, ranks: Ranks) -> list[Rows]:
    """Draws batches that are equal for all contenders and differ between ranks."""
    generator = torch.Generator().manual_seed(ranks.rank)
    batches = []
    for _ in range(NUM_BATCHES):
        dense, labels = draw_clicks(num_local, generator)
        ids = draw_ids(len(NAMES) * num_local * bag, generator)
        batches.append(Rows(dense.to(ranks.device), ids.to(ranks.device), labels.to(ranks.device)))
    return batches


def make_step(model: DistributedModelParallel, contender: Contender, part: str, batches: list[Rows]) -> Step:
    """Returns a step of forward, backward and update."""
    replicated = [weight for _, weight in in_backward_optimizer_filter(model.named_parameters())]
    optimizer = torch.optim.Adagrad(replicated, lr=LEARNING_RATE, fused=True) if replicated else None
    hashed = cycle([dataclasses.replace(batch, ids=batch.ids % contender.num_rows) for batch in batches])
    num_local = len(batches[0].labels)
    gradient = torch.randn(num_local, len(NAMES) * DIM, device=batches[0].dense.device) * 1e-3

    def step() -> None:
        batch = next(hashed)
        if optimizer is not None:
            optimizer.zero_grad()
        # new features for each step: used features have computed their offsets already
        output = model(batch.dense, make_features(batch.ids, num_local))
        if part == ALONE:
            output.backward(gradient)
        else:
            nn.functional.binary_cross_entropy_with_logits(output, batch.labels).backward()
        if optimizer is not None:
            optimizer.step()

    return step


def measure(options: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Measures all contenders; ``ratio`` is the median of the ratios of each round; all ranks call it."""
    rows = []
    chosen = {name: c for name, c in CONTENDERS.items() if name == BASELINE or options.only in name}
    models = {
        (part, name): make_model(contender, part, options.sharding, ranks)
        for part in options.parts
        for name, contender in chosen.items()
    }
    for bag in options.bags:
        batches = draw_batches(options.batch_size // ranks.world_size, bag, ranks)
        steps = {(part, name): make_step(model, chosen[name], part, batches) for (part, name), model in models.items()}
        seconds = take_turns(steps, options.rounds, options.seconds, ranks.device)
        for (part, name), values in seconds.items():
            row = {"part": part, "ranks": ranks.world_size, "bag": bag, "contender": name}
            row |= {"milliseconds": statistics.median(values) * 1000}
            rows.append({**row, "ratio": median_ratio(values, seconds[part, BASELINE])})
        if options.profile:
            for (part, name), step in steps.items():
                _print_profile(f"{part}, {name}, bag {bag}", step, ranks)
    return {**surroundings(ranks.device), "rows": rows}


def _print_profile(title: str, step: Step, ranks: Ranks) -> None:
    """Prints the operators that take the most time of 20 steps, on the first rank; all ranks call it."""
    with profile() as profiler:
        for _ in range(20):
            step()
    if ranks.is_first:
        sort = "self_cuda_time_total" if ranks.device.type == "cuda" else "self_cpu_time_total"
        print(f"{title}, 20 steps")
        print(profiler.key_averages().table(sort_by=sort, row_limit=20, max_name_column_width=60))


def main() -> None:
    """Measures every setting and prints a table."""
    parser = bench_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--bags", type=int, nargs="+", default=[1, 10], help="ids of each feature in a row")
    parser.add_argument("--batch-size", type=int, default=2048, help="rows of all ranks together")
    parser.add_argument("--sharding", choices=list(PLACES), default="table_wise")
    parser.add_argument("--parts", choices=[ALONE, WITHIN], nargs="+", default=[ALONE, WITHIN])
    parser.add_argument("--only", default="", help="the baseline and contenders whose name contains this text")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds of one contender's turn")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--profile", action="store_true", help="print the operators that take each contender's time")
    options = parser.parse_args()
    measures = {
        f"{world_size} ranks": partial(run_ranks, measure, options, world_size, device=options.device)
        for world_size in options.ranks
    }
    results = [*kept_rows(options, measures).values()]
    rows = [row for result in results for row in result["rows"]]
    table = Table("part", "ranks", "bag", "contender", "ms", f"to {BASELINE}")
    for row in rows:
        setting = row["part"], str(row["ranks"]), str(row["bag"]), row["contender"]
        table.add_row(*setting, f"{row['milliseconds']:.2f}", f"{row['ratio']:.2f}x")
    Console(width=110).print(f"{options.sharding}, {options.batch_size} rows a step", table)
    settings = {"sharding": options.sharding, "batch_size": options.batch_size}
    write_output(options, {**results[0], **settings, "rows": rows})


if __name__ == "__main__":
    main()
