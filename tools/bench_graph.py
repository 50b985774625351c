"""Measures `distembed prepare graph` on random edges: seconds and peak memory of the whole command.

::

    python tools/bench_graph.py --edges 20000000 --ids 2000000 --output bench_graph.json
"""

import json
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

INPUTS: dict[str, tuple[str, list[str]]] = {
    "edges, Parquet": ("edges.parquet", []),
    "edges, CSV": ("edges.csv", []),
    "weighted edges, Parquet": ("edges.parquet", ["--weight", "weight"]),
    "shared attributes, Parquet": ("edges.parquet", ["--attribute", "attribute"]),
}


def write_edges(folder: Path, num_edges: int, num_ids: int) -> None:
    """Writes random edges with weights, and a random attribute that five ids share on average."""
    rng = np.random.default_rng(0)
    table = pa.table(
        {
            "source": rng.integers(0, num_ids, num_edges),
            "target": rng.integers(0, num_ids, num_edges),
            "weight": rng.random(num_edges) + 0.1,
            "attribute": rng.integers(0, num_edges // 5, num_edges),
        }
    )
    pyarrow.parquet.write_table(table, folder / "edges.parquet")
    pyarrow.csv.write_csv(table.select(["source", "target"]), folder / "edges.csv")


def measure(folder: Path, name: str, num_ids: int) -> dict[str, Any]:
    """Runs one command, and returns its seconds, its peak memory and the number of edges."""
    file, options = INPUTS[name]
    output = folder / "graph"
    arguments = ["prepare", "graph", str(folder / file), "--num-embeddings", str(num_ids), "-o", str(output), *options]
    taken = timed_command([sys.executable, "-m", "distembed", *arguments, "--overwrite"])
    stored = json.loads((output / "graph.json").read_text())["num_edges"]
    return {"input": name, "seconds": taken.seconds, "peak_bytes": taken.peak_bytes, "num_edges_stored": stored}


def main() -> None:
    """Measures every kind of input and prints a table."""
    parser = bench_parser(__doc__)
    parser.add_argument("--edges", type=int, default=20_000_000)
    parser.add_argument("--ids", type=int, default=2_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_edges(Path(folder), options.edges, options.ids)
        measures = {name: partial(measure, Path(folder), name, options.ids) for name in INPUTS}
        results = [*kept_rows(options, measures).values()]
    table = Table("input", "stored", "seconds", "peak memory")
    for result in results:
        stored, memory = f"{result['num_edges_stored']:,}", f"{result['peak_bytes'] / 1e9:.2f} GB"
        table.add_row(result["input"], stored, f"{result['seconds']:.1f}", memory)
    Console(width=100).print(table)
    write_output(options, results)


if __name__ == "__main__":
    main()
