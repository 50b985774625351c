"""Measures `distembed prepare ratings` and `prepare sequences`: seconds and peak memory of the whole command.

::

    python tools/bench_interactions.py --rows 1000000 --output bench_interactions.json
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from rich.console import Console
from rich.table import Table

from distembed.base.files import write_json

COMMANDS: dict[str, tuple[str, str, list[str]]] = {
    "ratings, CSV": ("ratings", "rows.csv", ["--time", "time"]),
    "ratings, Parquet": ("ratings", "rows.parquet", ["--time", "time"]),
    "ratings, Parquet, 5-core, two attributes": (
        "ratings",
        "rows.parquet",
        ["--time", "time", "--k-core", "5", "--categorical", "genre", "--dense", "price"],
    ),
    "sequences, CSV": ("sequences", "rows.csv", ["--time", "time"]),
    "sequences, Parquet, all windows, two attributes": (
        "sequences",
        "rows.parquet",
        ["--time", "time", "--windows", "all", "--categorical", "genre", "--dense", "price"],
    ),
}
ROWS_A_USER, ROWS_AN_ITEM = 20, 50


def write_rows(folder: Path, num_rows: int) -> None:
    """Writes random interactions: users alike, items by a law of Zipf."""
    rng = np.random.default_rng(0)
    table = pa.table(
        {
            "user": rng.integers(0, max(1, num_rows // ROWS_A_USER), num_rows),
            "item": rng.zipf(1.2, num_rows) % max(1, num_rows // ROWS_AN_ITEM),
            "rating": rng.integers(1, 6, num_rows),
            "time": rng.integers(0, 10**9, num_rows),
            "genre": pa.array([f"genre {number}" for number in rng.integers(0, 20, num_rows).tolist()]),
            "price": rng.random(num_rows),
        }
    )
    pyarrow.parquet.write_table(table, folder / "rows.parquet")
    pyarrow.csv.write_csv(table.select(["user", "item", "rating", "time"]), folder / "rows.csv")


def measure(folder: Path, name: str, num_rows: int) -> dict[str, Any]:
    """Runs one command in a process of its own, and returns its seconds, rows a second and peak memory."""
    kind, file, options = COMMANDS[name]
    arguments = ["prepare", kind, str(folder / file), "-o", str(folder / "out"), "--overwrite", *options]
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "distembed", *arguments], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    if status:
        raise SystemExit(f"distembed {' '.join(arguments)} failed.")
    processor_seconds = used.ru_utime + used.ru_stime
    return {
        "input": name,
        "seconds": seconds,
        "processor_seconds": processor_seconds,
        "rows_per_second": num_rows / seconds,
        "peak_bytes": used.ru_maxrss * 1024,
    }


def main() -> None:
    """Measures every kind of input and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--output", type=Path, help="JSON file to write.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_rows(Path(name), arguments.rows)
        results = [measure(Path(name), one, arguments.rows) for one in COMMANDS]
    table = Table("input", "seconds", "processor s", "rows/s", "peak MB", title=f"{arguments.rows:,} interactions")
    for result in results:
        seconds, processor_seconds = f"{result['seconds']:.1f}", f"{result['processor_seconds']:.1f}"
        speed, memory = f"{result['rows_per_second']:,.0f}", f"{result['peak_bytes'] / 1e6:,.0f}"
        table.add_row(result["input"], seconds, processor_seconds, speed, memory)
    Console(width=120).print(table)
    if arguments.output:
        write_json(arguments.output, {"rows": arguments.rows, "results": results})


if __name__ == "__main__":
    main()
