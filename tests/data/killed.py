"""Preparations that are killed at random moments, and begun again until they are done."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from glob import glob
from pathlib import Path

ResultFiles = dict[str, tuple[int, int]]


def start(code: str, *arguments: object) -> "subprocess.Popen[bytes]":
    """Starts Python with a program and arguments, in a process group of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.PIPE)


def result_files(output: Path) -> ResultFiles:
    """Returns the finished tasks of an interrupted preparation, each with what changes when it is done again."""
    found = {}
    # unlike pathlib's, this glob may be called while folders go
    for file in map(
        Path, glob(str(output.with_name(f".{output.name}.preparing-*") / "work" / "results" / "*" / "[!.]*.json"))
    ):
        with suppress(FileNotFoundError):  # the preparation is done, and clears up
            found[f"{file.parent.name}/{file.name}"] = file.stat().st_ino, file.stat().st_mtime_ns
    return found


def prepare_with_kills(
    begin: Callable[[], "subprocess.Popen[bytes]"], output: Path, draw: random.Random, kills: int
) -> tuple[int, int]:
    """Begins a preparation again after each kill, until it is done, and makes sure that no task is done twice.

    Args:
        begin: Starts the preparation, in a process group of its own.
        output: Folder that it makes, which is not there.
        draw: Says when it is killed, and whether all processes are or one.
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
            killed += _kill(process, draw)
        said = process.communicate(timeout=120)[1].decode()
        _await_end_of_group(process.pid)
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


def _kill(process: "subprocess.Popen[bytes]", draw: random.Random) -> int:
    """Kills all processes of a group, or one of them, and returns whether there were any."""
    if process.poll() is not None:
        return 0
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if draw.random() < 0.5:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            os.kill(draw.choice([process.pid, *map(int, children)]), signal.SIGKILL)
    except (ProcessLookupError, FileNotFoundError):
        return 0  # it has just ended
    return 1


def _await_end_of_group(group: int) -> None:
    """Waits until no process of a group is left: the others end with the one that started them."""
    for _ in range(1000):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)
    raise AssertionError("a process outlives the command")
