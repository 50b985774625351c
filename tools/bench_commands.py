"""Command lines of the benches, and the commands that benches run and time.

It loads no torch: Linux counts the memory of the process that starts a command towards the command's peak memory.
"""

import argparse
import gzip
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from distembed.base.files import write_json

CONFIGS = Path(__file__).parents[1] / "configs"


def bench_parser(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the bench's docstring as its help, and the option ``--output``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    return parser


def write_output(options: argparse.Namespace, results: object) -> None:
    """Writes results to the file of ``--output``, if it is given."""
    if options.output is not None:
        write_json(options.output, results)


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Returns the median over rounds of the ratio of two contenders."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def deviation(values: Sequence[float]) -> float:
    """Returns the standard deviation, 0 for a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def mean_and_deviation(values: Sequence[float]) -> str:
    """Returns the mean and the standard deviation as a cell of a table."""
    return f"{statistics.mean(values):.4f} ± {deviation(values):.4f}"


def read_lines(path: Path, most: int | None = None) -> list[bytes]:
    """Returns the lines of a file, plain or gzip, or the first of them."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        return list(islice(file, most))


def run_distembed(*arguments: object) -> str:
    """Runs a command of distembed and returns its output; ends the bench with it if the command fails."""
    command = [sys.executable, "-m", "distembed", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"distembed {' '.join(command[3:])}\n{done.stdout}{done.stderr}")
    return done.stdout


@dataclass(frozen=True)
class Taken:
    """The time and the peak resident memory of a process from its start to its end."""

    seconds: float
    processor_seconds: float
    peak_bytes: int


def timed_command(command: Sequence[str]) -> Taken:
    """Runs a command without its output, and measures it; ends the bench if the command fails."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if status:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return Taken(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)
