"""Compares ``distembed prepare`` of Criteo rows with scripts for PyArrow, polars and duckdb, in turns.

::

    pip install polars                                 # or: pip install -e '.[bench]'
    python tools/bench_prepare.py                      # 2 million synthetic rows, as TSV and as CSV with a header
    python tools/bench_prepare.py --rows 300000 --rounds 2 --output bench.json

Each contender is a separate process with two threads, timed from its start to its end, imports included. Results are
medians of the rounds. The peers hold all rows in memory, check nothing and write no checksums. The first round compares
the outputs: labels and ids, in any order of the rows, exactly, and dense numbers up to rounding.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from bench_commands import Taken, bench_parser, timed_command, told, write_output
from rich.console import Console
from rich.table import Table

from distembed.data.dataset.schema import CRITEO_CATEGORICAL, CRITEO_DENSE
from distembed.data.hashing import mix64_array
from distembed.data.prepare import synthesize_criteo

SPLITS = ("train", "validation", "test")
PEERS = ("pyarrow", "polars", "duckdb")


@dataclass(frozen=True)
class Contender:
    """A program that prepares a file.

    Attributes:
        name: The name in the table.
        command: The program's arguments, with the placeholders ``{input}``, ``{output}`` and ``{schema}``.
        suffix: Suffix of the input file.
    """

    name: str
    command: tuple[str, ...]
    suffix: str


def contenders() -> list[Contender]:
    """Returns distembed's commands and the peers, for TSV and CSV."""
    ours = (sys.executable, "-m", "distembed", "prepare")
    options = ("{input}", "--output", "{output}", "--threads", "2")
    found = [
        Contender("distembed prepare criteo", (*ours, "criteo", *options), ".tsv"),
        Contender("distembed prepare table", (*ours, "table", *options, "--schema", "{schema}"), ".csv"),
    ]
    for suffix in (".tsv", ".csv"):
        for peer in PEERS:
            script = str(Path(__file__).parent / "peers" / f"prepare_{peer}.py")
            found.append(Contender(peer, (sys.executable, script, "{input}", "{output}"), suffix))
    return found


def make_inputs(folder: Path, num_rows: int) -> None:
    """Writes the rows as TSV without a header and as CSV with a header, and a schema of the CSV's columns."""
    synthesize_criteo(folder / "rows.tsv", num_rows=num_rows, seed=0)
    names = ("label", *CRITEO_DENSE, *CRITEO_CATEGORICAL)
    with open(folder / "rows.tsv") as tsv, open(folder / "rows.csv", "w") as csv:
        csv.write(",".join(names) + "\n")
        for line in tsv:
            csv.write(line.replace("\t", ","))
    lines = ["label: {column: label}", "dense:", *(f"  {name}: {{transform: log}}" for name in CRITEO_DENSE)]
    lines += ["categorical:", *(f"  {name}: {{kind: string}}" for name in CRITEO_CATEGORICAL)]
    (folder / "schema.yaml").write_text("\n".join(lines) + "\n")


def timed(contender: Contender, folder: Path, output: Path) -> Taken:
    """Runs a contender once."""
    places = {"input": f"{folder}/rows{contender.suffix}", "output": str(output), "schema": f"{folder}/schema.yaml"}
    shutil.rmtree(output, ignore_errors=True)
    return timed_command([part.format(**places) for part in contender.command])


def summary(output: Path) -> list[tuple[int, list[float]]]:
    """Returns two values for each split: the sum of hashes of the rows' labels and ids, and the sums of the numbers."""
    found = []
    for split in SPLITS:
        folder = output / split  # of distembed; the peers write one file
        paths = sorted(folder.glob("*.parquet")) if folder.is_dir() else [output / f"{split}.parquet"]
        rows = pa.concat_tables([pq.read_table(path) for path in paths])
        hashes = rows["label"].to_numpy().astype(np.uint64)
        for name in CRITEO_CATEGORICAL:
            hashes = mix64_array(hashes ^ rows[name].to_numpy().astype(np.uint64))
        sums = [float(rows[name].to_numpy().sum(dtype=np.float64)) for name in CRITEO_DENSE]
        found.append((int(hashes.sum(dtype=np.uint64)), sums))
    return found


def summary_elsewhere(output: Path) -> list[tuple[int, list[float]]]:
    """Returns the summary, computed in another process: this process's memory counts towards the contenders' peaks."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(summary, output).result()


def require_equal(name: str, own: Sequence[tuple[int, list[float]]], others: Sequence[tuple[int, list[float]]]) -> None:
    """Ends the bench if two contenders have written different rows."""
    for split, (own_hash, own_sums), (hash_, sums) in zip(SPLITS, own, others, strict=True):
        if own_hash != hash_ or not np.allclose(own_sums, sums, rtol=1e-5):
            raise SystemExit(f"{name} has written different rows of {split}")


def main() -> None:
    """Runs all contenders in turns, and prints their medians."""
    parser = bench_parser(__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    timings: dict[Contender, list[Taken]] = {contender: [] for contender in contenders()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder, options.rows)
        own: dict[str, list[tuple[int, list[float]]]] = {}
        for turn in told(range(options.rounds), "rounds"):
            for contender in timings:
                timings[contender].append(timed(contender, folder, folder / "output"))
                if turn == 0:
                    written = summary_elsewhere(folder / "output")
                    require_equal(contender.name, own.setdefault(contender.suffix, written), written)
    rows = [
        {
            "name": contender.name,
            "file": contender.suffix,
            "rows_per_second": options.rows / statistics.median(timing.seconds for timing in own_timings),
            "peak_bytes": max(timing.peak_bytes for timing in own_timings),
        }
        for contender, own_timings in timings.items()
    ]
    table = Table("contender", "file", "rows/s", "of the best peer", "peak memory", box=None)
    for row in rows:
        best = max(each["rows_per_second"] for each in rows if each["file"] == row["file"] and each["name"] in PEERS)
        row["of_best_peer"] = row["rows_per_second"] / best
        speed, memory = f"{row['rows_per_second']:,.0f}", f"{row['peak_bytes'] / 1e6:,.0f} MB"
        table.add_row(row["name"], row["file"], speed, f"{row['of_best_peer']:.2f}", memory)
    Console(width=120).print(table)
    if options.output is None:
        print(json.dumps(rows))
    write_output(options, rows)


if __name__ == "__main__":
    main()
