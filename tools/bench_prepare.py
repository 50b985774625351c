"""Times preparing Criteo rows beside scripts that do the same work with PyArrow, polars and duckdb, in turns.

::

    pip install polars                                 # or: pip install -e '.[bench]'
    python tools/bench_prepare.py                      # 2 million synthetic rows, as TSV and as CSV with a header
    python tools/bench_prepare.py --rows 300000 --rounds 2 --output bench.json

Every contender is a process of its own, timed from its start to its end, imports included, with two threads; the
results are medians of the rounds. The peers hold all rows in memory, check nothing and write no checksums. Before any
time is given, what all have written is compared: the labels and ids of the rows, which may be in any order, exactly,
and the dense numbers up to rounding.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from distembed.base.files import write_json
from distembed.data.dataset.schema import CRITEO_CATEGORICAL, CRITEO_DENSE
from distembed.data.hashing import mix64_array
from distembed.data.prepare import synthesize_criteo

SPLITS = ("train", "validation", "test")
PEERS = Path(__file__).parent / "peers"


@dataclass(frozen=True)
class Contender:
    """A program that prepares a file.

    Attributes:
        name: Its name in the table.
        command: Its arguments, in which ``{input}`` and ``{output}`` stand for the paths.
        suffix: Kind of the file that it is timed on.
    """

    name: str
    command: tuple[str, ...]
    suffix: str


def contenders() -> list[Contender]:
    """Returns ours and the peers', for both kinds of files."""
    ours = (sys.executable, "-m", "distembed", "prepare")
    options = ("{input}", "--output", "{output}", "--threads", "2")
    found = [
        Contender("distembed prepare criteo", (*ours, "criteo", *options), ".tsv"),
        Contender("distembed prepare table", (*ours, "table", *options, "--schema", "{schema}"), ".csv"),
    ]
    for suffix in (".tsv", ".csv"):
        for peer in ("pyarrow", "polars", "duckdb"):
            script = str(PEERS / f"prepare_{peer}.py")
            found.append(Contender(peer, (sys.executable, script, "{input}", "{output}"), suffix))
    return found


def make_inputs(folder: Path, num_rows: int) -> None:
    """Writes the rows as TSV without a header and as CSV with one, and a schema of the CSV: texts and integers."""
    synthesize_criteo(folder / "rows.tsv", num_rows=num_rows, seed=0)
    names = ("label", *CRITEO_DENSE, *CRITEO_CATEGORICAL)
    with open(folder / "rows.tsv") as tsv, open(folder / "rows.csv", "w") as csv:
        csv.write(",".join(names) + "\n")
        for line in tsv:
            csv.write(line.replace("\t", ","))
    lines = ["label: {column: label}", "dense:", *(f"  {name}: {{transform: log}}" for name in CRITEO_DENSE)]
    lines += ["categorical:", *(f"  {name}: {{kind: string}}" for name in CRITEO_CATEGORICAL)]
    (folder / "schema.yaml").write_text("\n".join(lines) + "\n")


@dataclass(frozen=True)
class Timing:
    """What one process took.

    Attributes:
        seconds: From its start to its end.
        peak_bytes: Its largest resident memory.
    """

    seconds: float
    peak_bytes: int


def timed(contender: Contender, folder: Path, output: Path) -> Timing:
    """Runs a contender once."""
    places = {"input": f"{folder}/rows{contender.suffix}", "output": str(output), "schema": f"{folder}/schema.yaml"}
    shutil.rmtree(output, ignore_errors=True)
    start = time.perf_counter()
    process = subprocess.Popen([part.format(**places) for part in contender.command], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{contender.name} ended with {process.returncode}")
    return Timing(time.perf_counter() - start, usage.ru_maxrss * 1024)


def read_split(output: Path, split: str) -> pa.Table:
    """Returns the rows of a split, which is a file or a folder of files."""
    folder = output / split
    paths = sorted(folder.glob("*.parquet")) if folder.is_dir() else [output / f"{split}.parquet"]
    return pa.concat_tables([pq.read_table(path) for path in paths])


def summary(output: Path) -> list[tuple[int, list[float]]]:
    """Returns, of each split, the sum of hashes of the rows' labels and ids, and the sums of the numbers."""
    found = []
    for split in SPLITS:
        rows = read_split(output, split)
        hashes = rows["label"].to_numpy().astype(np.uint64)
        for name in CRITEO_CATEGORICAL:
            hashes = mix64_array(hashes ^ rows[name].to_numpy().astype(np.uint64))
        sums = [float(rows[name].to_numpy().sum(dtype=np.float64)) for name in CRITEO_DENSE]
        found.append((int(hashes.sum(dtype=np.uint64)), sums))
    return found


def summary_elsewhere(output: Path) -> list[tuple[int, list[float]]]:
    """Returns the summary, taken in another process: what this one holds would count as its children's memory."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(summary, output).result()


def require_equal(name: str, own: Sequence[tuple[int, list[float]]], others: Sequence[tuple[int, list[float]]]) -> None:
    """Ends the bench where two contenders have written different rows."""
    for split, (own_hash, own_sums), (hash_, sums) in zip(SPLITS, own, others, strict=True):
        if own_hash != hash_ or not np.allclose(own_sums, sums, rtol=1e-5):
            raise SystemExit(f"{name} has written other rows of {split}")


def main() -> None:
    """Runs all contenders in turns, and prints their medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="file for the figures as JSON")
    options = parser.parse_args()
    timings: dict[Contender, list[Timing]] = {contender: [] for contender in contenders()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder, options.rows)
        own: dict[str, list[tuple[int, list[float]]]] = {}
        for turn in range(options.rounds):
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
        best = max(each["rows_per_second"] for each in rows if each["file"] == row["file"] and each["name"] in _PEERS)
        row["of_best_peer"] = row["rows_per_second"] / best
        table.add_row(
            row["name"],
            row["file"],
            f"{row['rows_per_second']:,.0f}",
            f"{row['of_best_peer']:.2f}",
            f"{row['peak_bytes'] / 1e6:,.0f} MB",
        )
    Console(width=120).print(table)
    if options.output is not None:
        write_json(options.output, rows)
    else:
        print(json.dumps(rows))


_PEERS = ("pyarrow", "polars", "duckdb")

if __name__ == "__main__":
    main()
