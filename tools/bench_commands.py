"""Command lines of the benches, and the commands that benches run and time.

It loads no torch: Linux counts the memory of the process that starts a command towards the command's peak memory.
"""

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from distembed.base.files import write_json

T = TypeVar("T")
CONFIGS = Path(__file__).parents[1] / "configs"


def bench_parser(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the bench's docstring as its help, and the option ``--output``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    return parser


def write_output(options: argparse.Namespace, results: object) -> None:
    """Writes results to the file of ``--output``, if it is given, in place of the rows of :func:`kept_rows`."""
    if options.output is not None:
        write_json(options.output, results)
        _rows_file(options.output).unlink(missing_ok=True)


def told(values: Sequence[T], what: str) -> Iterator[T]:
    """Yields values, and says on stderr after each how many are done and how long the rest takes."""
    started = time.monotonic()
    for done, value in enumerate(values, start=1):
        yield value
        _tell(what, done, len(values), started)


def kept_rows(
    options: argparse.Namespace, measures: Mapping[str, Callable[[], Any]], workers: int = 1
) -> dict[str, Any]:
    """Returns the row of each measure, as JSON has it, by name in their order; says on stderr how many are done.

    With ``--output FILE`` each row is a line of ``FILE.rows.jsonl`` as soon as it is known. After a bench that was
    stopped, one with equal options takes the rows from there; :func:`write_output` removes the file.
    """
    settings = {key: str(value) for key, value in vars(options).items() if key not in ("output", "only", "jobs")}
    file = None if options.output is None else _rows_file(options.output)
    rows: dict[str, Any] = {}
    if file is not None and file.exists():
        lines = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        file.write_text("".join(lines))  # without the line that a killed bench cut short
        read = [line for line in map(json.loads, lines) if line["settings"] == settings]
        rows = {line["name"]: line["row"] for line in read if line["name"] in measures}
    missing = [name for name in measures if name not in rows]
    started = time.monotonic()
    for done, (name, row) in enumerate(_taken(measures, missing, workers), start=1):
        rows[name] = json.loads(json.dumps(row))
        if file is not None:
            with file.open("a") as opened:
                opened.write(json.dumps({"name": name, "settings": settings, "row": row}) + "\n")
        _tell(name, done, len(missing), started)
    return {name: rows[name] for name in measures}


def _taken(measures: Mapping[str, Callable[[], Any]], names: Sequence[str], workers: int) -> Iterator[tuple[str, Any]]:
    """Yields names with their rows, as they come; one worker measures in this thread."""
    if workers == 1:
        yield from ((name, measures[name]()) for name in names)
        return
    with ThreadPoolExecutor(workers) as pool:
        running = {pool.submit(measures[name]): name for name in names}
        yield from ((running[future], future.result()) for future in as_completed(running))


def _rows_file(output: Path) -> Path:
    return output.with_name(f"{output.name}.rows.jsonl")


def _tell(what: str, done: int, total: int, started: float) -> None:
    seconds = time.monotonic() - started
    left = seconds / done * (total - done)
    print(f"[{done}/{total}] {what}  {seconds:,.0f} s, {left:,.0f} s left", file=sys.stderr, flush=True)


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
