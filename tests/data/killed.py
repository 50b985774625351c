"""Preparations that are killed at random moments, and begun again until they are done."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from glob import glob
from pathlib import Path

ResultFiles = dict[str, tuple[int, int]]


def start(code: str, *arguments: object) -> "subprocess.Popen[bytes]":
    """Starts Python with a program and arguments."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)


def result_files(output: Path) -> ResultFiles:
    """Returns the finished tasks of an interrupted preparation, each with what changes when it is done again."""
    found = {}
    # unlike pathlib's, this glob may be called while folders go
    results = output.with_name(f".{output.name}.preparing") / "*" / "work" / "results"
    for file in map(Path, glob(str(results / "*" / "[!.]*.json"))):
        with suppress(FileNotFoundError):  # the preparation is done, and clears up
            found[f"{file.parent.name}/{file.name}"] = file.stat().st_ino, file.stat().st_mtime_ns
    return found


def prepare_with_kills(
    begin: Callable[[], "subprocess.Popen[bytes]"], output: Path, draw: random.Random, kills: int
) -> tuple[int, int]:
    """Begins a preparation again after each kill, until it is done, and makes sure that no task is done twice.

    Args:
        begin: Starts the preparation.
        output: Folder that it makes, which is not there.
        draw: Says when it is killed.
        kills: Most kills.

    Returns:
        The number of kills, and the number of tasks that were done before one of them.
    """
    done: ResultFiles = {}
    killed = 0
    while not output.exists():
        process = begin()
        if killed < kills:
            _await_moment(process, output, len(done), draw)
            killed += _kill(process)
        said = process.communicate(timeout=120)[1].decode()
        if output.exists():
            break
        assert killed, said
        found = result_files(output)
        assert found.items() >= done.items(), f"done twice: {done.items() - found.items()}"
        done = found
    return killed, len(done)


def _await_moment(process: "subprocess.Popen[bytes]", output: Path, done: int, draw: random.Random) -> None:
    """Waits until some more tasks are done, or none, and for a moment after that."""
    wanted = done + draw.choice([0, 0, 1, 3])
    while process.poll() is None and not output.exists() and len(result_files(output)) < wanted:
        time.sleep(0.005)
    time.sleep(draw.choice([0.0, 0.01, 0.05, 0.3]))


def _kill(process: "subprocess.Popen[bytes]") -> int:
    """Kills a process, and returns whether it was alive."""
    if process.poll() is not None:
        return 0
    process.kill()
    return 1
