"""Counts the bytes that a training step of DLRM sends from host to host, and times it, with plain and composed tables.

It runs as root, as it makes the two hosts on this machine with ``tools/two_hosts.sh`` and takes them down again::

    sudo .venv/bin/python tools/bench_network.py --output bench_network.json

Two hosts of one rank each train DLRM (13 dense, 26 categorical features, D=16, fp32) through gloo. Tables have the
sizes of the Criteo Kaggle data, cut off at 400,000 ids, and are placed by the planner. The contenders are full tables,
hashed ones and quotient-remainder tables; they take turns at every limit of the network in every round.

The bytes are those that the kernel counts on both hosts' eth0. It gives data to a veth in pieces of up to 64 KiB, each
of which it counts with one header of Ethernet, IP and TCP; on a real wire packets have 1448 bytes of data and 66 of
headers. ``data`` is the count without headers; on busy processors TCP sometimes sends a piece twice, and both are
counted. Beside it stands the estimate of ``distembed plan``. Each rank computes with one thread.
"""

import argparse
import dataclasses
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from bench_common import (
    COLLISIONS,
    DIM,
    NUM_BATCHES,
    NUM_IDS,
    Step,
    draw_batch,
    draw_ids,
    surroundings,
    trainer_step,
)
from torchrec.distributed.types import ShardingPlan

from distembed.base.files import write_json
from distembed.base.ranks import Collectives, Ranks, process_group
from distembed.data.dataset.schema import CRITEO_KAGGLE_CARDINALITIES, Schema, criteo_schema
from distembed.data.reader.batch import Batch
from distembed.embedding import EmbeddingConfig, TableConfig
from distembed.planning import describe_plan
from distembed.planning.buffers import Step as StepEstimate
from distembed.planning.search import plan_placements
from distembed.planning.storage import SentBytes
from distembed.training.build import Blueprint, build_training_state, table_optimizers
from distembed.training.config import Config
from distembed.training.train_config import TrainConfig

HOSTS = Path(__file__).with_name("two_hosts.sh")
NUM_HOSTS = 2
INTERFACE = "eth0"
HEADER_BYTES = 14 + 20 + 32
"""The headers of Ethernet, IPv4, and TCP with its timestamps."""
SETTLED_SECONDS = 0.05

BASELINE = "full"
TABLES = {
    BASELINE: TableConfig(partition="naive", embedding_dim=DIM),
    "hashed": TableConfig(partition="remainder", collisions=COLLISIONS, embedding_dim=DIM),
    "quotient-remainder, product": TableConfig(
        partition="quotient_remainder", collisions=COLLISIONS, composition="product", embedding_dim=DIM
    ),
}


@dataclasses.dataclass(frozen=True)
class Contender:
    """A trainer at one batch size.

    Attributes:
        tables: A name of ``TABLES``.
        batch_size: The number of rows of a step on all ranks.
        step: Takes one step; all ranks call it.
        plan: The placement of the tables, in one line.
        estimate: The estimated bytes that all ranks send in a step.
    """

    tables: str
    batch_size: int
    step: Step
    plan: str
    estimate: SentBytes


@dataclasses.dataclass(frozen=True)
class Turn:
    """The seconds of a rank's step, and the bytes (with headers) and packets that its host sent in it."""

    seconds: float
    counted_bytes: float
    packets: float


@dataclasses.dataclass(frozen=True)
class Row:
    """The result of one contender at one limit: medians over rounds; bytes are those of both hosts in a step.

    ``ratio`` is the median of the ratios of each round's time to that with full tables.
    """

    limit: str
    batch_size: int
    tables: str
    counted_bytes: float
    data_bytes: float
    estimated_bytes: int
    milliseconds: float
    fastest_milliseconds: float
    ratio: float


def draw_batches(schema: Schema, batch_size: int, ranks: Ranks) -> list[Batch]:
    """Draws batches that are the same for every contender, and different on every rank."""
    generator = torch.Generator().manual_seed(ranks.rank)
    num_local = batch_size // ranks.world_size
    sizes = torch.tensor([feature.num_embeddings for feature in schema.categorical])
    batches = []
    for _ in range(NUM_BATCHES):
        ids = draw_ids(len(sizes) * num_local, generator).view(len(sizes), num_local) % sizes[:, None]
        batches.append(draw_batch(ids.flatten(), num_local, generator, batch_size))
    return batches


def make_contender(tables: str, batch_size: int, ranks: Ranks) -> Contender:
    """Returns this project's trainer with these tables; all ranks call it."""
    schema = criteo_schema([min(size, NUM_IDS) for size in CRITEO_KAGGLE_CARDINALITIES])
    embedding = EmbeddingConfig(default=TABLES[tables])
    train = TrainConfig(batch_size=batch_size, precision="fp32")
    config = Config(embedding=embedding, train=train)
    blueprint = Blueprint.for_ranks(config, schema, ranks, {})
    state = build_training_state(blueprint, ranks, num_steps=1000)
    step = trainer_step(state, draw_batches(schema, batch_size, ranks))
    return Contender(tables, batch_size, step, describe_plan(state.plan), estimated_bytes(blueprint, state.plan))


def estimated_bytes(blueprint: Blueprint, plan: ShardingPlan) -> SentBytes:
    """Returns what all ranks together send in a step, as it is estimated for a plan."""
    world_size = blueprint.world_size
    placements = plan_placements(blueprint.build_plannable(), plan, world_size)
    step = StepEstimate(
        placements, world_size, blueprint.workload(), table_optimizers(blueprint.config.train), blueprint.device.type
    )
    return sum((step.sent_bytes(rank) for rank in range(world_size)), SentBytes())


def sent_so_far() -> tuple[int, int]:
    """Returns the bytes and packets that this host has sent, once nothing more is on its way; all ranks call it."""
    counters = [Path(f"/sys/class/net/{INTERFACE}/statistics/tx_{name}") for name in ("bytes", "packets")]
    dist.barrier()
    before, now = [-1], [int(counter.read_text()) for counter in counters]
    while now != before:
        time.sleep(SETTLED_SECONDS)
        before, now = now, [int(counter.read_text()) for counter in counters]
    dist.barrier()
    return now[0], now[1]


def take_turn(step: Step, num_steps: int) -> Turn:
    """Takes that many steps, after one that is not timed, as its ids were already sent in the last turn."""
    bytes_before, packets_before = sent_so_far()
    step()
    dist.barrier()
    started = time.perf_counter()
    for _ in range(num_steps):
        step()
    dist.barrier()
    seconds = time.perf_counter() - started
    bytes_after, packets_after = sent_so_far()
    counted = num_steps + 1
    return Turn(seconds / num_steps, (bytes_after - bytes_before) / counted, (packets_after - packets_before) / counted)


def set_limit(limit: str, ranks: Ranks) -> None:
    """Limits the rate at which each host sends; all ranks call it."""
    if ranks.is_first:
        subprocess.run([HOSTS, "limit", limit], check=True)
    dist.barrier()


def take_turns(
    contenders: Sequence[Contender], options: argparse.Namespace, ranks: Ranks
) -> dict[tuple[str, int, str], list[list[Turn]]]:
    """Returns every contender's turns by limit, batch size and tables, each a list over ranks; all ranks call it."""
    for contender in contenders:
        take_turn(contender.step, 3)
    turns: dict[tuple[str, int, str], list[list[Turn]]] = {}
    for _, limit in product(range(options.rounds), options.limits):
        set_limit(limit, ranks)
        for contender in contenders:
            own = take_turn(contender.step, options.steps)
            rank_turns = Collectives().gather(own)
            turns.setdefault((limit, contender.batch_size, contender.tables), []).append(rank_turns)
    return turns


def summarise(
    contenders: Sequence[Contender], turns: dict[tuple[str, int, str], list[list[Turn]]], limits: Sequence[str]
) -> Iterator[Row]:
    """Yields the medians over rounds of every contender at every limit."""
    for limit, contender in product(limits, contenders):
        own, baseline = (turns[limit, contender.batch_size, name] for name in (contender.tables, BASELINE))
        seconds, others = (
            [max(turn.seconds for turn in rank_turns) for rank_turns in rounds] for rounds in (own, baseline)
        )
        counted = [sum(turn.counted_bytes for turn in rank_turns) for rank_turns in own]
        data = [sum(turn.counted_bytes - HEADER_BYTES * turn.packets for turn in rank_turns) for rank_turns in own]
        yield Row(
            limit,
            contender.batch_size,
            contender.tables,
            statistics.median(counted),
            statistics.median(data),
            sum(dataclasses.astuple(contender.estimate)),
            1000 * statistics.median(seconds),
            1000 * min(seconds),
            statistics.median(a / b for a, b in zip(seconds, others, strict=True)),
        )


MEASURED = (
    *("limit", "rows a step", "tables", "counted", "data", "estimated", "data / estimated"),
    *("ms a step", "fastest", "to full"),
)
ESTIMATED = ("rows a step", "tables", "ids", "vectors", "gradients", "all-reduce", "plan")


def heading(names: Sequence[str]) -> str:
    """Returns the first two lines of a Markdown table."""
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}"


def markdown(rows: Sequence[Row], contenders: Sequence[Contender]) -> str:
    """Returns two tables, of the measurements and of the parts of the estimates, in bytes of both hosts in a step."""
    lines = [heading(MEASURED)]
    for row in rows:
        lines.append(
            f"| {row.limit} | {row.batch_size} | {row.tables} | {row.counted_bytes:,.0f} | {row.data_bytes:,.0f} | "
            f"{row.estimated_bytes:,} | {row.data_bytes / row.estimated_bytes:.4f} | {row.milliseconds:.1f} | "
            f"{row.fastest_milliseconds:.1f} | {row.ratio:.2f}x |"
        )
    lines += ["", heading(ESTIMATED)]
    for contender in contenders:
        parts = " | ".join(f"{value:,}" for value in dataclasses.astuple(contender.estimate))
        lines.append(f"| {contender.batch_size} | {contender.tables} | {parts} | {contender.plan} |")
    return "\n".join(lines)


def run_rank(options: argparse.Namespace) -> None:
    """Measures on one of the hosts; the first rank prints and writes the results."""
    torch.set_num_threads(1)
    with process_group("cpu") as ranks:
        contenders = [make_contender(name, batch_size, ranks) for batch_size in options.batch_sizes for name in TABLES]
        turns = take_turns(contenders, options, ranks)
        if ranks.is_first:
            rows = list(summarise(contenders, turns, options.limits))
            print(markdown(rows, contenders))
            setting = {"rounds": options.rounds, "steps": options.steps}
            result = {**surroundings(ranks.device), **setting, "rows": [dataclasses.asdict(row) for row in rows]}
            if options.output is not None:
                write_json(options.output, result)


def run_hosts(options: argparse.Namespace) -> int:
    """Makes the hosts, runs this script on each of them and takes them down; returns the first failure's exit code."""
    environment = {
        **os.environ,
        "TWO_HOSTS_NAME": options.name,
        "TWO_HOSTS_SUBNET": options.subnet,
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": f"{options.name}1",
        "MASTER_PORT": "29500",
        "WORLD_SIZE": str(NUM_HOSTS),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    if subprocess.run([HOSTS, "exec", "1", "true"], env=environment, capture_output=True).returncode == 0:
        print(f"The hosts {options.name}* are up already: give others by --name and --subnet.", file=sys.stderr)
        return 1
    made = subprocess.run([HOSTS, "up"], env=environment).returncode
    if made != 0:
        return made
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        ranks = [
            subprocess.Popen(
                [HOSTS, "exec", str(rank + 1), sys.executable, *sys.argv], env={**environment, "RANK": str(rank)}
            )
            for rank in range(NUM_HOSTS)
        ]
        while all(rank.poll() is None for rank in ranks):
            time.sleep(0.2)
        # a rank that fails leaves the other waiting for it, which ends with its host
        return next(rank.returncode for rank in ranks if rank.poll() is not None) or ranks[0].wait() or ranks[1].wait()
    finally:
        subprocess.run([HOSTS, "down"], env=environment)


def main() -> int:
    """Makes the hosts and measures; on one of its hosts, runs a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[2048, 8192], help="rows of all ranks together")
    parser.add_argument("--limits", nargs="+", default=["1gbit", "none"], help="of what a host sends, in tc's units")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3, help="that are timed in one contender's turn")
    parser.add_argument("--name", default="benchhost", help="of the hosts")
    parser.add_argument("--subnet", default="10.79.0", help="of their addresses")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        return run_hosts(options)
    run_rank(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
