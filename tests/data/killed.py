"""Preparations that are killed at random moments, and begun again until they are done."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from glob import glob
from pathlib import Path
from typing import Any

from tests.processes import start_processes

ResultFiles = dict[str, tuple[int, int]]


Process = Any
"""A :class:`subprocess.Popen`, or a :class:`Forked`, which has the methods that are called here."""


class Forked:
    """A function in a process of its own, forked from one that has loaded the package."""

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        self._context = start_processes(1, _apply, function, arguments)
        self._process = self._context.processes[0]

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def communicate(self, *, timeout: float) -> tuple[None, bytes]:
        """Waits for its end, and returns the error that it ended with."""
        self._process.join(timeout)
        assert self.poll() is not None
        file = Path(self._context.error_files[0])
        return None, file.read_bytes() if file.exists() else b""


def _apply(_: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    function(*arguments)


def wait_for_ever(source: Path) -> None:
    """Says by a file beside the source that this process waits for its end."""
    source.with_name("stuck").touch()
    time.sleep(600)


@contextmanager
def hanging(source: Path, function: Callable[..., None], *arguments: Any) -> Iterator[None]:
    """Within the block a process has called :func:`wait_for_ever`; at the end it is killed."""
    process, stuck = Forked(function, *arguments), source.with_name("stuck")
    try:
        while not stuck.exists():
            assert process.poll() is None
            time.sleep(0.01)
        stuck.unlink()
        yield
    finally:
        process.kill()


def start(code: str, *arguments: object) -> "subprocess.Popen[bytes]":
    """Starts an interpreter with a program and arguments."""
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


def prepare_with_kills(begin: Callable[[], Process], output: Path, draw: random.Random, kills: int) -> tuple[int, int]:
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
            if process.poll() is None:
                process.kill()
                killed += 1
        said = process.communicate(timeout=120)[1].decode(errors="replace")
        if output.exists():
            break
        assert killed, said
        found = result_files(output)
        assert found.items() >= done.items(), f"done twice: {done.items() - found.items()}"
        done = found
    return killed, len(done)


def _await_moment(process: Process, output: Path, done: int, draw: random.Random) -> None:
    """Waits until some more tasks are done, or none, and for a moment after that."""
    wanted = done + draw.choice([0, 0, 1, 3])
    while process.poll() is None and not output.exists() and len(result_files(output)) < wanted:
        time.sleep(0.005)
    time.sleep(draw.choice([0.0, 0.01, 0.05, 0.3]))
