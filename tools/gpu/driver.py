"""Runs the parts one after the other, each in a process with a time limit. Loads no torch.

A finished part is not repeated, and a stopped part resumes after its last row. A failed part is recorded, and the next
part runs. A lock prevents two calls at once. The process of a part ends with this process.
"""

import argparse
import fcntl
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distembed.base.files import write_text
from distembed.base.process import PARENT_VARIABLE, end_with_parent
from gpu import DRY_SECONDS, PARTS
from gpu.results import DONE, FAILED, NO_TIME, ROOT, Results, end, is_of, read
from gpu.table import markdown

DESCRIPTION = """Runs the tests marked gpu and every bench on this machine's GPU, and prints a table.

The folder of results has a JSON file for each part, and the table as table.md. A repeated call resumes where the last
call stopped. Exit status: 0 all parts are done, 1 some are not, 2 there is no usable GPU.
"""
SURROUNDINGS = "surroundings"
_LEAST_SECONDS = 20
"""Least time left at which a part starts; loading torch and TorchRec takes most of it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs everything, or one part in this process; returns the exit status."""
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="run everything on the processor, with tiny sizes")
    parser.add_argument("--fresh", action="store_true", help="delete the results of earlier calls")
    parser.add_argument("--results", type=Path, help="folder of the results (default: runs/gpu, or runs/gpu_dry)")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="parts to run")
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of all parts together (default: 9)")
    parser.add_argument("--part", choices=[SURROUNDINGS, *PARTS], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    folder = options.results or ROOT / "runs" / ("gpu_dry" if options.dry else "gpu")
    if options.part:
        return run_here(options.part, folder, options.dry)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        return run_all(folder, options)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the folder's lock within the block, once no other call holds it."""
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"another call is at work in {folder}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run_all(folder: Path, options: argparse.Namespace) -> int:
    """Runs the unfinished parts, writes and prints the table, and returns the exit status."""
    deadline = time.monotonic() + 60 * options.minutes
    if options.fresh:
        for leftover in folder.iterdir():
            if leftover.name != ".lock":
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    if _run(SURROUNDINGS, folder, options.dry, DRY_SECONDS) != 0:
        print(_tail(folder, SURROUNDINGS), file=sys.stderr)
        return 2
    surroundings = json.loads((folder / f"{SURROUNDINGS}.json").read_text())
    for name in options.only:
        path = folder / f"{name}.json"
        before = read(path)
        if is_of(before, surroundings) and before["status"] == DONE:
            _say(f"{name}: is done already")
            continue
        allowed = min(DRY_SECONDS if options.dry else PARTS[name].seconds, deadline - time.monotonic())
        if not is_of(before, surroundings):
            path.unlink(missing_ok=True)
        if allowed < _LEAST_SECONDS:
            end(path, surroundings, NO_TIME, f"the {options.minutes:g} minutes are over; call again to resume")
            _say(f"{name}: no time is left")
            continue
        _run_part(name, path, surroundings, options.dry, allowed)
    table = markdown(folder, surroundings, options.dry)
    write_text(folder / "table.md", table)
    print(table, flush=True)
    _say(f"results and logs: {folder}")
    statuses = [read(folder / f"{name}.json").get("status") for name in options.only]
    return 0 if all(status == DONE for status in statuses) else 1


def _run_part(name: str, path: Path, surroundings: Mapping[str, Any], dry: bool, seconds: float) -> None:
    """Runs one part in a process and records its end."""
    started = time.monotonic()
    _say(f"{name}: at most {seconds:.0f} s")
    code = _run(name, path.parent, dry, seconds)
    took = time.monotonic() - started
    if code is None:
        end(path, surroundings, NO_TIME, f"stopped after {seconds:.0f} s; call again to resume")
    elif code != 0 or read(path).get("status") != DONE:
        end(path, surroundings, FAILED, _tail(path.parent, name) or f"its process ended with {code}")
    _say(f"{name}: {read(path)['status']} after {took:.0f} s")


def _run(name: str, folder: Path, dry: bool, seconds: float) -> int | None:
    """Runs a part with its output in a log; returns the exit status, None if the part was stopped."""
    command = [sys.executable, str(ROOT / "tools" / "gpu_bench.py"), "--part", name, "--results", str(folder)]
    environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
    with open(folder / f"{name}.log", "w") as log:
        process = subprocess.Popen(
            [*command, *(["--dry"] if dry else [])],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:  # kills the part's whole session, also if this process is interrupted
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()


def _tail(folder: Path, name: str) -> str:
    """Returns the end of a part's log."""
    return (folder / f"{name}.log").read_text(errors="replace")[-3000:].strip()


def run_here(name: str, folder: Path, dry: bool) -> int:
    """Runs one part in this process, or writes the device and the versions; returns the exit status."""
    end_with_parent()
    from gpu.scale import CARD, DRY, here

    scale = DRY if dry else CARD
    try:
        surroundings = here(scale)
        if name == SURROUNDINGS:
            write_text(folder / f"{SURROUNDINGS}.json", json.dumps(surroundings, indent=2) + "\n")
            return 0
        results = Results(folder / f"{name}.json", surroundings)
        importlib.import_module(f"gpu.{name}").measure(results, scale)
        results.finish()
    except Exception as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _say(text: str) -> None:
    print(f"==> {text}", flush=True)
