"""Measures the rows a second of synthesizing, preparing and reading in batches: one JSON object and one table.

::

    python tools/bench_data.py                        # 2 million synthetic rows
    python tools/bench_data.py --rows 200000          # fewer
    python tools/bench_data.py --output bench.json    # writes the JSON to a file

Preparing is timed from the first byte read to the rename, checksums and flushing included. The result is the best of
several runs, since other work on the machine only adds time. The reader is timed over a whole epoch, with one thread of
torch.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from bench_commands import bench_parser, write_output
from rich.console import Console
from rich.table import Table

from distembed.base.checksums import checksum_of
from distembed.data.dataset import row_groups
from distembed.data.prepare import ProgressUpdate, ResourceLimits, prepare_criteo, synthesize_criteo
from distembed.data.reader import BatchOrder, BatchReader, Decoding

BATCH_SIZES = (128, 2048, 8192)


def bench_synthesize(source: Path, num_rows: int) -> dict[str, Any]:
    """Writes the rows that are prepared and read, and returns the speed."""
    start = time.perf_counter()
    summary = synthesize_criteo(source, num_rows=num_rows, seed=0)
    seconds = time.perf_counter() - start
    return {"rows_per_second": num_rows / seconds, "bytes_per_row": summary.bytes / num_rows}


def bench_prepare(source: Path, output: Path, num_rows: int, threads: int) -> dict[str, Any]:
    """Prepares the rows once, and returns the seconds by the clock, by stage and of the processors."""
    ends: dict[str, float] = {}
    start, processor_start = time.perf_counter(), time.process_time()

    def note(update: ProgressUpdate) -> None:
        ends[update.stage] = time.perf_counter() - start

    prepare_criteo([source], output, limits=ResourceLimits(threads=threads), overwrite=True, progress=note)
    seconds = time.perf_counter() - start
    ends["flush"] = seconds
    stages = {stage: end - before for (stage, end), before in zip(ends.items(), [0.0, *ends.values()], strict=False)}
    return {
        "rows_per_second": num_rows / seconds,
        "seconds": seconds,
        "processor_seconds": time.process_time() - processor_start,
        "stage_seconds": stages,
        "bytes_per_row": sum(file.stat().st_size for file in output.rglob("*.parquet")) / num_rows,
    }


def bench_reader(dataset: Path, batch_size: int, prefetch_batches: int, decode_threads: int = 0) -> tuple[float, float]:
    """Returns the rows per second and per processor second over one epoch of the training split."""
    order = BatchOrder(batch_size)
    reader = BatchReader(dataset, "train", order, prefetch_batches=prefetch_batches, decoding=Decoding(decode_threads))
    start, processor_start = time.perf_counter(), time.process_time()
    num_rows = sum(len(batch["labels"]) for batch in reader)
    return num_rows / (time.perf_counter() - start), num_rows / (time.process_time() - processor_start)


def bench_reader_threads(dataset: Path, batch_size: int, repeats: int) -> dict[str, dict[str, float]]:
    """Returns the best speeds of the reader for each set of threads."""
    threads = {"not_prefetching": (0, 0), "prefetching": (4, 0)}
    threads |= {f"{count}_decode_threads": (4, count) for count in (1, 2)}
    speeds = {}
    for name, (prefetch_batches, decode_threads) in threads.items():
        found = [bench_reader(dataset, batch_size, prefetch_batches, decode_threads) for _ in range(repeats)]
        speeds[name] = {
            "rows_per_second": max(wall for wall, _ in found),
            "rows_per_processor_second": max(processor for _, processor in found),
        }
    return speeds


def bench_checksums(dataset: Path) -> float:
    """Returns the checksums' share of the reader's processor time."""
    seconds = 0.0

    def timed(data: bytes) -> str:
        nonlocal seconds
        start = time.thread_time()
        checksum = checksum_of(data)
        seconds += time.thread_time() - start
        return checksum

    with mock.patch.object(row_groups, "checksum_of", timed):
        start = time.thread_time()
        bench_reader(dataset, 2048, 0)
        return seconds / (time.thread_time() - start)


def run(num_rows: int, threads: int, repeats: int, folder: Path) -> dict[str, Any]:
    """Measures synthesizing, preparing and reading."""
    source, dataset = folder / "rows.tsv", folder / "dataset"
    synthesized = bench_synthesize(source, num_rows)
    prepared = [bench_prepare(source, dataset, num_rows, threads) for _ in range(repeats)]
    reader = {str(batch_size): bench_reader_threads(dataset, batch_size, repeats) for batch_size in BATCH_SIZES}
    return {
        "rows": num_rows,
        "threads": threads,
        "processors": len(os.sched_getaffinity(0)),
        "machine": platform.processor() or platform.machine(),
        "synthesize": synthesized,
        "prepare": max(prepared, key=lambda one: one["rows_per_second"]),
        "prepare_all_rows_per_second": [one["rows_per_second"] for one in prepared],
        "reader": reader,
        "reader_checksum_shares": [bench_checksums(dataset) for _ in range(repeats)],
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def make_table(result: dict[str, Any]) -> Table:
    """Returns the figures as a table."""
    table = Table("what", "krow/s", "notes", title=f"{result['rows']:,} rows, {result['threads']} threads")
    prepare = result["prepare"]
    stages = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in prepare["stage_seconds"].items())
    table.add_row("synthesize", f"{result['synthesize']['rows_per_second'] / 1e3:.0f}", "one thread")
    table.add_row("prepare", f"{prepare['rows_per_second'] / 1e3:.0f}", stages)
    for batch_size, speeds in result["reader"].items():
        for how, speed in speeds.items():
            processor = f"{speed['rows_per_processor_second'] / 1e3:.0f} krow/s of a processor"
            note = f"{how.replace('_', ' ')}; {processor}"
            table.add_row(f"reader, batch {batch_size}", f"{speed['rows_per_second'] / 1e3:.0f}", note)
    shares = ", ".join(f"{share:.1%}" for share in result["reader_checksum_shares"])
    table.add_row("checksums", "", f"{shares} of the reader's time")
    return table


def main() -> None:
    """Parses the arguments, measures and prints."""
    parser = bench_parser(__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--threads", type=int, default=2, help="threads of prepare (default 2)")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="distembed-bench-") as folder:
        result = run(arguments.rows, arguments.threads, arguments.repeats, Path(folder))
    if arguments.output is None:
        print(json.dumps(result, indent=2))
    write_output(arguments, result)
    Console(width=120).print(make_table(result))


if __name__ == "__main__":
    main()
