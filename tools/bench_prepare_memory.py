"""Measures the memory and the processor time of ``distembed prepare criteo`` against its memory limit.

::

    python tools/bench_prepare_memory.py                            # 5 million synthetic rows, limits of 1 and 4 GB
    python tools/bench_prepare_memory.py --rows 20000000 --limits 1GB 4GB --threads 1 2
    python tools/bench_prepare_memory.py --input train.txt          # your own rows

The resident memory is summed over the command and its processes every 10 ms.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from bench_commands import bench_parser, kept_rows, write_output
from rich.console import Console
from rich.table import Table

from distembed.base.units import parse_bytes

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def tree(root: int) -> list[int]:
    """Returns a process and all of its descendants."""
    found = [root]
    for process in found:
        try:
            found += map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())
        except OSError:
            pass  # the process has ended
    return found


def resident_bytes(process: int) -> int:
    """Returns the resident memory of a process, 0 once it has ended."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def measure(source: Path, output: Path, limit: str, threads: int) -> dict[str, Any]:
    """Prepares once with a limit and a number of threads, and returns the time and the memory."""
    command = [sys.executable, "-m", "distembed", "prepare", "criteo", str(source), "--output", str(output)]
    command += ["--memory-limit", limit, "--threads", str(threads), "--overwrite"]
    start, stage, before = time.perf_counter(), "", _processor_seconds()
    peak: dict[str, int] = {}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=said)
        while process.poll() is None:
            stage = _stage(output) or stage
            peak[stage] = max(peak.get(stage, 0), sum(map(resident_bytes, tree(process.pid))))
            time.sleep(0.01)
        assert process.returncode == 0
    return {
        "limit": limit,
        "threads": threads,
        "limit_bytes": parse_bytes("--limits", limit),
        "peak_bytes": max(peak.values()),
        "peak_bytes_by_stage": peak,
        "seconds": time.perf_counter() - start,
        "processor_seconds": _processor_seconds() - before,
    }


def _processor_seconds() -> float:
    """Returns the processor time of all descendants that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _stage(output: Path) -> str:
    """Returns the stage of the preparation, by its work folder."""
    try:
        stages = list(output.parent.glob(str(Path(f".{output.name}.preparing", "*", "work", "results", "*"))))
        return max(stages, key=lambda stage: stage.stat().st_mtime_ns, default=Path("")).name
    except OSError:
        return ""  # the preparation has ended and removed its folder


def main() -> None:
    """Measures, and prints a table."""
    parser = bench_parser(__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000, help="synthetic rows (default 5 million)")
    parser.add_argument("--input", type=Path, help="file of Criteo rows instead of synthetic rows")
    parser.add_argument("--limits", nargs="+", default=["1GB", "4GB"], help="memory limits (default 1GB 4GB)")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="numbers of threads (default 1 2)")
    arguments = parser.parse_args()
    table = Table("limit", "threads", "peak MB", "of the limit", "by stage, MB", "processor s")
    with tempfile.TemporaryDirectory() as folder:
        source = arguments.input or Path(folder) / "rows.tsv"
        if arguments.input is None:
            command = [sys.executable, "-m", "distembed", "synthesize", str(source), "--rows", str(arguments.rows)]
            subprocess.run(command, check=True)
        measures = {
            f"{limit}, {threads} threads": partial(measure, source, Path(folder) / "dataset", limit, threads)
            for limit in arguments.limits
            for threads in arguments.threads
        }
        results = kept_rows(arguments, measures)
        for limit in arguments.limits:
            for threads in arguments.threads:
                found = results[f"{limit}, {threads} threads"]
                stages = ", ".join(f"{name} {peak / 1e6:.0f}" for name, peak in found["peak_bytes_by_stage"].items())
                share = found["peak_bytes"] / found["limit_bytes"]
                peak = f"{found['peak_bytes'] / 1e6:,.0f}"
                used = f"{found['processor_seconds']:.1f}"
                table.add_row(limit, str(threads), peak, f"{share:.0%}", stages, used)
    Console(width=140).print(table)
    write_output(arguments, [*results.values()])


if __name__ == "__main__":
    main()
