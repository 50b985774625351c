"""Processes that run one ``distembed`` command after another, as ranks of each: only their first takes seconds.

They are replaced for the next command where a command failed on several ranks, ended otherwise than by an exit code,
imported a plugin, which adds names for good, or used S3, whose address is kept.
"""

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn

from tests.processes import start_processes
from tests.ranks import free_port

GRACE_SECONDS = 30
"""How long the other ranks have to say by themselves why they end, once one has failed."""
Run = Callable[[int, Sequence[str], Path, int, int], None]
"""Runs a command as a rank: it is given the rank, the arguments, a folder for its output, the ranks and a port."""
_kept: dict[int, "CommandRanks"] = {}


def run_on_command_ranks(count: int, run: Run, arguments: Sequence[object], folder: Path) -> int:
    """Runs a command on the ranks that are kept for it; returns the exit code of the first rank that failed, or 0."""
    if count not in _kept:
        _kept[count] = CommandRanks(count)
    code, are_usable = _kept[count].run(run, [str(argument) for argument in arguments], folder)
    if not are_usable:
        _kept.pop(count).end()
    return code


class CommandRanks:
    """The processes of one number of ranks."""

    def __init__(self, count: int) -> None:
        pipes = [multiprocessing.Pipe() for _ in range(count)]
        self._connections = [own for own, _ in pipes]
        self._processes = start_processes(count, _serve, [theirs for _, theirs in pipes]).processes
        for _, theirs in pipes:
            theirs.close()

    def run(self, run: Run, arguments: list[str], folder: Path) -> tuple[int, bool]:
        """Returns the exit code of the first rank that failed, or 0, and whether the processes can run another one."""
        count, port = len(self._processes), free_port()
        for connection in self._connections:
            connection.send((run, arguments, folder, count, port, dict(os.environ)))
        waiting = dict(zip(self._connections, self._processes, strict=True))
        codes, are_usable, deadline = list[int](), True, float("inf")
        while waiting and (seconds := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), None if deadline == float("inf") else seconds):
                assert isinstance(connection, Connection)
                process = waiting.pop(connection)
                try:
                    code, is_usable = connection.recv()
                except EOFError:
                    process.join()
                    code, is_usable = process.exitcode, False
                codes.append(code)
                are_usable &= is_usable and (code == 0 or count == 1)
                if code != 0:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return next((code for code in codes if code != 0), 0), are_usable and not waiting

    def end(self) -> None:
        for connection, process in zip(self._connections, self._processes, strict=True):
            connection.close()
            process.kill()
            process.join()


def _serve(rank: int, connections: list[Connection]) -> None:
    from distembed.base import plugins
    from distembed.commands import cli

    for connection in {*connections} - {connections[rank]}:
        connection.close()  # so that the end of its rank is noticed
    cli._leave = _leave  # which else ends one of several ranks at once
    known = set(plugins._imported)
    while True:
        try:
            run, arguments, folder, count, port, environment = connections[rank].recv()
        except EOFError:
            os._exit(0)
        os.environ.clear()
        os.environ.update(environment)
        code, is_usable = 0, True
        try:
            run(rank, arguments, folder, count, port)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:
            traceback.print_exc()
            code, is_usable = 1, False
        sys.stdout.flush()
        sys.stderr.flush()
        is_clean = plugins._imported == known and "s3fs" not in sys.modules
        connections[rank].send((code, is_usable and is_clean))


def _leave(code: int) -> NoReturn:
    raise SystemExit(code)
