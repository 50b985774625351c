"""Command lines of the benches, and the commands that benches run and time.

It loads no torch: Linux counts the memory of the process that starts a command towards the command's peak memory.
"""

import argparse
import gzip
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
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
    if options.output is None:
        return
    write_json(options.output, results)
    file, settings = _rows_file(options.output), _settings(options)
    others = [line for line in _whole_lines(file) if json.loads(line)["settings"] != settings]
    if others:
        file.write_text("".join(others))
    else:
        file.unlink(missing_ok=True)


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
    stopped, one with equal options, input files, code and machine takes the rows from there; :func:`write_output`
    removes them. After a failure or Ctrl-C, measures that run already come to their end, and no others start.
    """
    file = None if options.output is None else _rows_file(options.output)
    settings = _settings(options)
    rows: dict[str, Any] = {}
    if file is not None and file.exists():
        lines = _whole_lines(file)
        file.write_text("".join(lines))  # without the line that a killed bench cut short
        read = [line for line in map(json.loads, lines) if line["settings"] == settings]
        rows = {line["name"]: line["row"] for line in read if line["name"] in measures}
    missing = [name for name in measures if name not in rows]
    started, num_kept, lock = time.monotonic(), len(rows), threading.Lock()

    def take(name: str) -> None:
        row = json.loads(json.dumps(measures[name]()))
        with lock:
            rows[name] = row
            if file is not None:
                with file.open("a") as opened:
                    opened.write(json.dumps({"name": name, "settings": settings, "row": row}) + "\n")
            _tell(name, len(rows) - num_kept, len(missing), started)

    if workers == 1:  # in this thread
        for name in missing:
            take(name)
        return {name: rows[name] for name in measures}
    pool = ThreadPoolExecutor(workers)
    try:
        for future in as_completed([pool.submit(take, name) for name in missing]):
            future.result()
    finally:
        pool.shutdown(cancel_futures=True)
    return {name: rows[name] for name in measures}


def _settings(options: argparse.Namespace) -> dict[str, str]:
    """Returns what a bench's rows depend on: its options, input files and threads, the machine, and the code."""
    settings = {key: _with_stamp(value) for key, value in vars(options).items() if key not in ("output", "only")}
    git = ["git", "-C", str(Path(__file__).parent)]
    code = [
        subprocess.run([*git, *words], capture_output=True).stdout
        for words in (["rev-parse", "HEAD"], ["diff", "HEAD"])
    ]
    revision = hashlib.sha256(b"".join(code)).hexdigest()
    return settings | {
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
        "machine": f"{platform.node()}, {os.cpu_count()} cores",
        "revision": revision,
    }


def _with_stamp(value: object) -> str:
    """Returns an option as text, with the size and the time of the file that it names."""
    if isinstance(value, str | Path) and (path := Path(value)).is_file():
        status = path.stat()
        return f"{value} {status.st_size} {status.st_mtime_ns}"
    return str(value)


def _whole_lines(file: Path) -> list[str]:
    """Returns the lines of a file without one that was cut short; none where there is no file."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [line for line in lines if line.endswith("\n")]


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
