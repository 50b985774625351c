"""The processes that prepare a dataset together: several on one machine, on one or more machines.

The command on each machine starts the others of its machine, which run the same function with other numbers; of 2 nodes
with 3 processes each, node 1 has the processes 3, 4 and 5. They share nothing but the work folder (``work.py``), and
end with the command that started them, however that ends.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from distembed.data.prepare.progress import NoteCallback, ProgressCallback, ignore
from distembed.errors import RunError, UserError
from distembed.parent import PARENT_VARIABLE, end_with_parent

T = TypeVar("T")


@dataclass(frozen=True)
class Worker:
    """A process of a preparation.

    Attributes:
        index: Its number, from 0.
        count: Number of processes on all machines.
        others: The processes of this machine that this one has started, by number.
        start: Starts them, given the token of the attempt; they are needed once there is a work folder.
        attempt: Token of the attempt that this process takes part in, if it was started with one.
    """

    index: int = 0
    count: int = 1
    others: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    start: Callable[[str], None] = field(default=lambda _: None)
    attempt: str | None = None

    @property
    def is_first(self) -> bool:
        """Whether it is the one that makes the folders and says how far all are."""
        return self.index == 0

    def await_started(self) -> None:
        """Waits until the processes that this one has started have ended."""
        for process in self.others.values():
            process.wait()


Program = Callable[[Worker, ProgressCallback, NoteCallback], T]
"""What every process runs, with what it is among the others; it can be pickled."""


def run_in_processes(
    program: Program[T],
    processes: int,
    node: int,
    num_nodes: int,
    progress: ProgressCallback = ignore,
    note: NoteCallback = ignore,
) -> T:
    """Runs a program in this process and, on this machine, in others.

    Args:
        program: What every process runs. Of the errors of other processes it has to learn through the work folder.
        processes: Number of processes on this machine, and on each of the others.
        node: Number of this machine, from 0.
        num_nodes: Number of machines, on each of which the same is called.
        progress: Function that is called with the progress in process 0.
        note: Function that is told what a user should know, in process 0.

    Returns:
        What the program returns in this process.
    """
    first, count = node * processes, num_nodes * processes
    others: dict[int, subprocess.Popen[bytes]] = {}

    def start(attempt: str) -> None:
        for index in range(first + 1, first + processes):
            others[index] = _start(program, Worker(index, count, attempt=attempt))

    worker = Worker(first, count, others, start)
    try:
        return program(worker, progress if worker.is_first else ignore, note if worker.is_first else ignore)
    finally:
        for process in others.values():
            process.kill()
        for process in others.values():
            process.wait()


def _start(program: Program[T], worker: Worker) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), PARENT_VARIABLE: str(os.getpid())}
    command = [sys.executable, "-c", f"from {__name__} import serve; serve()"]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)
    assert process.stdin is not None
    with process.stdin as pipe:
        pickle.dump((program, worker.index, worker.count, worker.attempt), pipe)
    return process


def serve() -> None:
    """Runs the program that standard input has, as a process of a preparation, and ends this process.

    Ctrl-C is for the command that started it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    program, index, count, attempt = pickle.load(sys.stdin.buffer)
    try:
        program(Worker(index, count, attempt=attempt), ignore, ignore)
    except (UserError, RunError):
        os._exit(1)  # the command says it
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
