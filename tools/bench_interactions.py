"""Measures `distembed prepare ratings` and `prepare sequences`: seconds and peak memory of the whole command.

::

    python tools/bench_interactions.py --rows 1000000 --output bench_interactions.json
"""

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from bench_commands import bench_parser, kept_rows, timed_command, write_output
from rich.console import Console
from rich.table import Table

_ATTRIBUTES = ["--categorical", "genre", "--dense", "price"]
COMMANDS: dict[str, tuple[str, str, list[str]]] = {
    "ratings, CSV": ("ratings", "rows.csv", []),
    "ratings, Parquet": ("ratings", "rows.parquet", []),
    "ratings, Parquet, 5-core, two attributes": ("ratings", "rows.parquet", ["--k-core", "5", *_ATTRIBUTES]),
    "sequences, CSV": ("sequences", "rows.csv", []),
    "sequences, Parquet, all windows, two attributes": (
        "sequences",
        "rows.parquet",
        ["--windows", "all", *_ATTRIBUTES],
    ),
}
"""Kind of the dataset, input file and options by the name of a case."""
ROWS_A_USER, ROWS_AN_ITEM = 20, 50


def write_rows(folder: Path, num_rows: int) -> None:
    """Writes random interactions: users drawn uniformly, items by a law of Zipf."""
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
    """Runs one command, and returns its seconds, rows a second and peak memory."""
    kind, file, options = COMMANDS[name]
    arguments = ["prepare", kind, str(folder / file), "-o", str(folder / "out"), "--overwrite", "--time", "time"]
    taken = timed_command([sys.executable, "-m", "distembed", *arguments, *options])
    return {"input": name, **vars(taken), "rows_per_second": num_rows / taken.seconds}


def main() -> None:
    """Measures every kind of input and prints a table."""
    parser = bench_parser(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_rows(Path(name), arguments.rows)
        measures = {one: partial(measure, Path(name), one, arguments.rows) for one in COMMANDS}
        results = [*kept_rows(arguments, measures).values()]
    table = Table("input", "seconds", "processor s", "rows/s", "peak MB", title=f"{arguments.rows:,} interactions")
    for result in results:
        seconds, processor_seconds = f"{result['seconds']:.1f}", f"{result['processor_seconds']:.1f}"
        speed, memory = f"{result['rows_per_second']:,.0f}", f"{result['peak_bytes'] / 1e6:,.0f}"
        table.add_row(result["input"], seconds, processor_seconds, speed, memory)
    Console(width=120).print(table)
    write_output(arguments, {"rows": arguments.rows, "results": results})


if __name__ == "__main__":
    main()
