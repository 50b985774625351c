"""Counts the bytes that a DLRM step sends between two hosts, and times it, with full and compositional tables.

It runs as root, because it creates the two hosts on this machine with ``tools/two_hosts.sh`` and removes them again::

    sudo .venv/bin/python tools/bench_network.py --output bench_network.json

Two hosts of one rank each train DLRM (13 dense, 26 categorical features, D=16, fp32) through gloo, with one thread
each. Tables have the sizes of the Criteo Kaggle data, at most 400,000 ids, and are placed by the planner. Full, hashed
and quotient-remainder tables take turns at every limit of the network in every round.

The bytes are the kernel's counts on both hosts' eth0. The kernel gives data to a veth in pieces of up to 64 KiB, and
counts each piece with one header of Ethernet, IP and TCP; on a real wire, packets have 1448 bytes of data and 66 of
headers. ``data`` is the count without headers. On busy processors TCP sometimes sends a piece twice, and both are
counted. ``estimated`` is the estimate of ``distembed plan``.
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
from bench_commands import bench_parser, median_ratio, write_output
from bench_common import (
    COLLISIONS,
    DIM,
    NUM_BATCHES,
    NUM_IDS,
    Step,
    draw_batch,
    draw_ids,
    estimated_step,
    surroundings,
    trainer_step,
)

from distembed.base.ranks import Collectives, Ranks, process_group
from distembed.data.dataset.schema import CRITEO_KAGGLE_CARDINALITIES, Schema, criteo_schema
from distembed.data.reader.batch import Batch
from distembed.embedding import EmbeddingConfig, TableConfig
from distembed.planning import describe_plan
from distembed.planning.storage import SentBytes
from distembed.training.build import Blueprint, build_training_state
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
        batch_size: Number of rows of all ranks.
        step: Takes one step; all ranks call it.
        plan: The placement of the tables, in one line.
        estimate: Estimated bytes that all ranks send in a step.
    """

    tables: str
    batch_size: int
    step: Step
    plan: str
    estimate: SentBytes


@dataclasses.dataclass(frozen=True)
class Turn:
    """The seconds of a rank's step, and the bytes (with headers) and packets that its host sent in the step."""

    seconds: float
    counted_bytes: float
    packets: float


@dataclasses.dataclass(frozen=True)
class Row:
    """The result of one contender at one limit: medians over rounds, with the bytes of both hosts in a step.

    ``ratio`` is the median of the ratios of each round's time to the time with full tables.
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
    """Draws batches that are equal for all contenders and differ between ranks."""
    generator = torch.Generator().manual_seed(ranks.rank)
    num_local = batch_size // ranks.world_size
    sizes = torch.tensor([feature.num_embeddings for feature in schema.categorical])
    batches = []
    for _ in range(NUM_BATCHES):
        ids = draw_ids(len(sizes) * num_local, generator).view(len(sizes), num_local) % sizes[:, None]
        batches.append(draw_batch(ids.flatten(), num_local, generator, batch_size))
    return batches


def make_contender(tables: str, batch_size: int, ranks: Ranks) -> Contender:
    """Returns distembed's trainer with these tables; all ranks call it."""
    schema = criteo_schema([min(size, NUM_IDS) for size in CRITEO_KAGGLE_CARDINALITIES])
    embedding = EmbeddingConfig(default=TABLES[tables])
    train = TrainConfig(batch_size=batch_size, precision="fp32")
    config = Config(embedding=embedding, train=train)
    blueprint = Blueprint.for_ranks(config, schema, ranks, {})
    state = build_training_state(blueprint, ranks, num_steps=1000)
    step = trainer_step(state, draw_batches(schema, batch_size, ranks))
    estimate = estimated_step(blueprint, state.plan)
    sent = sum((estimate.sent_bytes(rank) for rank in range(ranks.world_size)), SentBytes())
    return Contender(tables, batch_size, step, describe_plan(state.plan), sent)


def sent_so_far() -> tuple[int, int]:
    """Returns the bytes and packets that this host has sent, once the counters stand still; all ranks call it."""
    counters = [Path(f"/sys/class/net/{INTERFACE}/statistics/tx_{name}") for name in ("bytes", "packets")]
    dist.barrier()
    before, now = [-1], [int(counter.read_text()) for counter in counters]
    while now != before:
        time.sleep(SETTLED_SECONDS)
        before, now = now, [int(counter.read_text()) for counter in counters]
    dist.barrier()
    return now[0], now[1]


def take_turn(step: Step, num_steps: int) -> Turn:
    """Takes and times steps, after one that is not timed, because its ids were already sent in the last turn."""
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
            median_ratio(seconds, others),
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
    """Returns a table of measurements and a table of the estimates' parts, in bytes of both hosts in a step."""
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
            rows_as_json = [dataclasses.asdict(row) for row in rows]
            write_output(options, {**surroundings(ranks.device), **setting, "rows": rows_as_json})


def run_hosts(options: argparse.Namespace) -> int:
    """Creates the hosts, runs this script on each and removes them; returns the exit code of the first failure."""
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
        print(f"The hosts {options.name}* are up already; choose others by --name and --subnet.", file=sys.stderr)
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
        # after one rank fails, the second waits for it until its host is removed
        return next(rank.returncode for rank in ranks if rank.poll() is not None) or ranks[0].wait() or ranks[1].wait()
    finally:
        subprocess.run([HOSTS, "down"], env=environment)


def main() -> int:
    """Creates the hosts and measures; on one of its hosts, runs a rank."""
    parser = bench_parser(__doc__)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[2048, 8192], help="rows of all ranks together")
    parser.add_argument("--limits", nargs="+", default=["1gbit", "none"], help="rates of each host, in tc's units")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of one contender's turn")
    parser.add_argument("--name", default="benchhost", help="name of the hosts")
    parser.add_argument("--subnet", default="10.79.0", help="subnet of the hosts' addresses")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        return run_hosts(options)
    run_rank(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
