"""Compares estimated and measured times of the embedding part of a step, for five placements.

::

    python tools/bench_estimates.py --ranks 2 4

For each number of gloo ranks, the bench first calibrates the machine by other tables, unless ``--device`` names a
device file. Then it places Criteo Kaggle's 26 tables, quotient-remainder at 16 collisions, in five ways. The placements
take turns; the shortest mean time of a turn's steps counts, as in a calibration. A step is forward, backward and update
with all exchanges, without networks. The bench prints each placement's times. Of the pairs whose measured times differ
by 20% or more, it prints the pairs that the estimates put in the opposite order. Each rank computes with one thread.
"""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from bench_common import run_ranks
from torchrec.distributed.sharding_plan import column_wise, data_parallel, row_wise, table_wise

from distembed.base.ranks import Ranks
from distembed.data.dataset.schema import CRITEO_KAGGLE_CARDINALITIES
from distembed.embedding import CompositionalEmbeddingBagConfig
from distembed.partitions import QuotientRemainder
from distembed.planning.calibrate import calibrate
from distembed.planning.devices import read_device
from distembed.planning.probes import ShardedTables, TimedStep, shortest_seconds

DIM, COLLISIONS = 16, 16
SMALL = 20_000
"""Largest number of ids of a replicated table."""
DIFFERENT = 1.2
"""Smallest ratio of measured times at which the bench compares the order of two placements."""

PLACEMENTS: dict[str, Callable[[int, int, int], Any]] = {
    "table-wise, in turn": lambda i, num_ids, world_size: _whole(i % world_size),
    "table-wise, all on one rank": lambda i, num_ids, world_size: _whole(0),
    "column-wise": lambda i, num_ids, world_size: column_wise(ranks=list(range(world_size)), compute_kernel="fused"),
    "row-wise": lambda i, num_ids, world_size: row_wise(compute_kernel="fused"),
    "small replicated, others in turn": lambda i, num_ids, world_size: (
        data_parallel() if num_ids <= SMALL else _whole(i % world_size)
    ),
}
"""The placement of the i-th table, given its number of ids and the number of ranks."""


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
    """Returns all tables with their placements."""
    places = []
    for i, num_ids in enumerate(CRITEO_KAGGLE_CARDINALITIES, start=1):
        partition = QuotientRemainder(num_ids, collisions=min(COLLISIONS, num_ids))
        table = CompositionalEmbeddingBagConfig(f"C{i}", num_ids, DIM, [f"C{i}"], partition)
        places.append((table, PLACEMENTS[name](i, num_ids, world_size)))
    return places


def measure(options: argparse.Namespace, ranks: Ranks) -> list[dict[str, Any]]:
    """Measures all placements and returns their rows; all ranks call it."""
    device = calibrate(ranks).device if options.device is None else read_device(options.device)
    rows = []
    sharded = {name: ShardedTables(place(name, ranks.world_size), ranks) for name in PLACEMENTS}
    for num_rows in options.rows_per_rank:
        steps = {name: TimedStep(tables, num_rows) for name, tables in sharded.items()}
        seconds = shortest_seconds(list(steps.values()), options.rounds, options.steps, ranks.device)
        for (name, step), taken in zip(steps.items(), seconds, strict=True):
            estimated = step.estimated_seconds(device)
            row = Row(name, ranks.world_size, num_rows, 1e3 * taken, 1e3 * estimated)
            rows.append(dataclasses.asdict(row))
    return rows


def report(rows: Sequence[Row]) -> None:
    """Prints a table for one number of ranks and rows, and the order of the pairs."""
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
    parser.add_argument("--device", type=Path, help="device file instead of a calibration")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each placement")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn")
    options = parser.parse_args()
    for world_size in options.ranks:
        rows = [Row(**row) for row in run_ranks(measure, options, world_size)]
        for num_rows in options.rows_per_rank:
            report([row for row in rows if row.rows_per_rank == num_rows])


if __name__ == "__main__":
    main()
