"""Measures the time and the memory of proving that explicit partitions are complementary.

::

    python tools/bench_partitions.py --ids 100000000

Each case runs in a separate process. Its peak memory includes torch and the input assignments.
"""

import multiprocessing
import resource
import time
from collections.abc import Callable
from functools import partial

import torch
from bench_commands import bench_parser, kept_rows, write_output
from rich.console import Console
from rich.table import Table
from torch import Tensor

from distembed.base.errors import UserError
from distembed.partitions import Explicit


def digits(num_ids: int, count: int) -> list[Tensor]:
    """Returns ``count`` complementary assignments (int32): the digits of each id's number in a random order."""
    base = round(num_ids ** (1 / count)) + 1
    number = torch.randperm(num_ids, generator=torch.Generator().manual_seed(0))
    found = []
    for _ in range(count):
        found.append((number % base).int())
        number = torch.div(number, base, rounding_mode="floor")
    return found


def colliding(num_ids: int) -> list[Tensor]:
    """Returns two assignments that are complementary but for one id, which has the rows of another id."""
    first, second = digits(num_ids, 2)
    first[num_ids // 2], second[num_ids // 2] = first[num_ids - 1].clone(), second[num_ids - 1].clone()
    return [first, second]


CASES: dict[str, Callable[[int], list[Tensor]]] = {
    "2 partitions": lambda num_ids: digits(num_ids, 2),
    "3 partitions": lambda num_ids: digits(num_ids, 3),
    "2 partitions, one collision": colliding,
}


def run(name: str, num_ids: int, answer: "multiprocessing.SimpleQueue[tuple[float, float, str]]") -> None:
    """Runs one case and puts its seconds, peak GB and outcome into the queue."""
    assignments = CASES[name](num_ids)
    started = time.perf_counter()
    try:
        outcome = f"complementary: {Explicit(num_ids, assignments).is_complementary()}"
    except UserError as error:
        outcome = str(error).split(": ids ")[1].split(",")[0]
    seconds = time.perf_counter() - started
    answer.put((seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, outcome))


def run_alone(name: str, num_ids: int) -> tuple[float, float, str]:
    """Runs one case in a process of its own, and returns its seconds, peak GB and outcome."""
    context = multiprocessing.get_context("spawn")
    answer = context.SimpleQueue()
    process = context.Process(target=run, args=(name, num_ids, answer))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{name}: the process ended with exit code {process.exitcode}")
    return answer.get()


def main() -> None:
    """Measures every case and prints a table."""
    parser = bench_parser(__doc__)
    parser.add_argument("--ids", type=int, default=100_000_000)
    options = parser.parse_args()
    table = Table("case", "ids", "seconds", "peak GB", "outcome")
    rows = kept_rows(options, {name: partial(run_alone, name, options.ids) for name in CASES})
    for name, (seconds, peak, outcome) in rows.items():
        table.add_row(name, f"{options.ids:,}", f"{seconds:.1f}", f"{peak:.2f}", outcome)
    Console(width=110).print(table)
    write_output(options, rows)


if __name__ == "__main__":
    main()
