"""Many commands in little time: each is forked from a process that has loaded all of the product already."""

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from tests.processes import start_processes
from tests.small_runs import run_command

SECONDS = 60.0
"""After them a command counts as one that hangs."""


@dataclass(frozen=True)
class Done:
    """How a command ended.

    Attributes:
        code: Its exit code; minus the number of the signal that killed it; None where it had to be killed for hanging.
        output: What it printed.
        errors: What it printed to standard error.
    """

    code: int | None
    output: str
    errors: str


class Commands:
    """A process that waits to run commands, one after the other, in a folder.

    Args:
        folder: The working directory of the commands.
        notes: A folder for what they print.
    """

    def __init__(self, folder: Path, notes: Path) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self._notes = notes
        self._count = 0
        self._processes = start_processes(1, serve, theirs, folder)
        theirs.close()

    def run(self, *arguments: object) -> Done:
        notes = self._notes / str(self._count)
        self._count += 1
        notes.mkdir(parents=True)
        self._connection.send(([str(argument) for argument in arguments], notes))
        code = self._connection.recv()
        output, errors = ((notes / name).read_text(errors="replace") for name in ("output", "errors"))
        return Done(code, output, errors)

    def close(self) -> None:
        self._connection.close()
        self._processes.join()


def serve(_: int, connection: Connection, folder: Path) -> None:
    # what takes long, so that it is loaded once
    import distembed.commands.cli
    import distembed.data.prepare
    import distembed.graph.prepare
    import distembed.reports.plan.run_plan
    import distembed.reports.report
    import distembed.training.inference
    import distembed.training.materialise
    import distembed.training.run  # noqa: F401

    while True:
        try:
            arguments, notes = connection.recv()
        except EOFError:
            return
        child = os.fork()
        if child == 0:
            os.chdir(folder)
            run_and_leave(arguments, notes)
        connection.send(wait_for(child))


def run_and_leave(arguments: Sequence[str], notes: Path) -> None:
    """Does what ``python -m distembed`` does, without what the process that forked it would do at its end."""
    code = 1
    try:
        run_command(0, tuple(arguments), notes)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait_for(child: int) -> int | None:
    """Returns the exit code of a process; kills one that hangs and returns None."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None
