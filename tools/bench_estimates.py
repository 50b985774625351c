"""Compares estimated times of the embedding part of a step with measured ones, for placements that differ.

::

    python tools/bench_estimates.py --ranks 2 4

On every number of gloo ranks the machine is calibrated first, by tables that are not among those compared, unless
``--device`` names a device file. Then Criteo Kaggle's 26 tables, quotient-remainder at 16 collisions, are placed in
five ways; they take turns, and the shortest mean of a turn's steps counts, as it does when a machine is calibrated. A
step is forward, backward and update with all exchanges, without networks. Printed are each placement's times, and of
the pairs whose measured times differ by 20% or more those that are estimated in the other order. Each rank computes
with one thread.
"""

import argparse
import dataclasses
import json
import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torchrec.distributed.sharding_plan import column_wise, data_parallel, row_wise, table_wise

from distembed.base.files import write_json
from distembed.base.ranks import Ranks, process_group
from distembed.data.dataset.schema import CRITEO_KAGGLE_CARDINALITIES
from distembed.embedding import CompositionalEmbeddingBagConfig
from distembed.partitions import QuotientRemainder
from distembed.planning.calibrate import calibrate
from distembed.planning.devices import read_device
from distembed.planning.probes import ShardedTables, TimedStep, shortest_seconds

DIM, COLLISIONS = 16, 16
SMALL = 20_000
"""Number of ids up to which tables are replicated in one of the placements."""
DIFFERENT = 1.2
"""Ratio of measured times from which on the order of two placements is compared."""

PLACEMENTS: dict[str, Callable[[int, int, int], Any]] = {
    "table-wise, in turn": lambda i, num_ids, world_size: _whole(i % world_size),
    "table-wise, all on one rank": lambda i, num_ids, world_size: _whole(0),
    "column-wise": lambda i, num_ids, world_size: column_wise(ranks=list(range(world_size)), compute_kernel="fused"),
    "row-wise": lambda i, num_ids, world_size: row_wise(compute_kernel="fused"),
    "small replicated, others in turn": lambda i, num_ids, world_size: (
        data_parallel() if num_ids <= SMALL else _whole(i % world_size)
    ),
}
"""The place of the i-th table, of so many ids."""


def _whole(rank: int) -> Any:
    return table_wise(rank=rank, compute_kernel="fused")


@dataclasses.dataclass(frozen=True)
class Row:
    """Times of one placement, in milliseconds."""

    placement: str
    ranks: int
    rows_per_rank: int
    measured: float
    estimated: float


def place(name: str, world_size: int) -> list[tuple[CompositionalEmbeddingBagConfig, Any]]:
    """Returns all tables in their places."""
    places = []
    for i, num_ids in enumerate(CRITEO_KAGGLE_CARDINALITIES, start=1):
        partition = QuotientRemainder(num_ids, collisions=min(COLLISIONS, num_ids))
        table = CompositionalEmbeddingBagConfig(f"C{i}", num_ids, DIM, [f"C{i}"], partition)
        places.append((table, PLACEMENTS[name](i, num_ids, world_size)))
    return places


def measure(options: argparse.Namespace, ranks: Ranks) -> list[Row]:
    """Measures all placements; all ranks call it."""
    device = calibrate(ranks).device if options.device is None else read_device(options.device)
    rows = []
    sharded = {name: ShardedTables(place(name, ranks.world_size), ranks) for name in PLACEMENTS}
    for num_rows in options.rows_per_rank:
        steps = {name: TimedStep(tables, num_rows) for name, tables in sharded.items()}
        seconds = shortest_seconds(list(steps.values()), options.rounds, options.steps, ranks.device)
        for (name, step), taken in zip(steps.items(), seconds, strict=True):
            estimated = step.estimated_seconds(device)
            rows.append(Row(name, ranks.world_size, num_rows, 1e3 * taken, 1e3 * estimated))
    return rows


def run_rank(rank: int, world_size: int, port: int, options: argparse.Namespace, output: Path) -> None:
    """Measures on one rank; the first rank writes the results."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    with process_group("cpu") as ranks:
        rows = [dataclasses.asdict(row) for row in measure(options, ranks)]
        if ranks.is_first:
            write_json(output, rows)


def run_ranks(world_size: int, options: argparse.Namespace) -> list[Row]:
    """Starts the ranks and returns their results."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        mp.spawn(run_rank, (world_size, port, options, output), nprocs=world_size)
        return [Row(**row) for row in json.loads(output.read_text())]


def report(rows: Sequence[Row]) -> None:
    """Prints a table of one number of ranks and rows, and how pairs are ordered."""
    print(f"\n{rows[0].ranks} ranks, {rows[0].rows_per_rank:,} rows a rank\n")
    print("| placement | measured, ms | estimated, ms | estimated / measured |\n|---|---|---|---|")
    for row in sorted(rows, key=lambda row: row.measured):
        print(f"| {row.placement} | {row.measured:.1f} | {row.estimated:.1f} | {row.estimated / row.measured:.2f} |")
    pairs = [sorted(pair, key=lambda row: row.measured) for pair in combinations(rows, 2)]
    different = [(fast, slow) for fast, slow in pairs if slow.measured >= DIFFERENT * fast.measured]
    wrong = [(fast, slow) for fast, slow in different if fast.estimated >= slow.estimated]
    print(f"\n{len(different) - len(wrong)} of {len(different)} pairs that differ by 20% or more in the measured order")
    for fast, slow in wrong:
        print(f"in the other order: {fast.placement} and {slow.placement}")


def main() -> None:
    """Measures every number of ranks and rows, and prints a table of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rows-per-rank", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--device", type=Path, help="device file in place of a calibration")
    parser.add_argument("--rounds", type=int, default=12, help="how often each placement has its turn")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn")
    options = parser.parse_args()
    for world_size in options.ranks:
        rows = run_ranks(world_size, options)
        for num_rows in options.rows_per_rank:
            report([row for row in rows if row.rows_per_rank == num_rows])


if __name__ == "__main__":
    main()
