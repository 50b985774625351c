"""Ranks of their own for a test, forked from ones that have loaded what :mod:`tests.loaded` names, which takes seconds.

They are forked from two such servers in turn. Each has a seed of its own for the hash of strings, as the ranks of a
real run have, so that what depends on the order of a set differs between neighbouring ranks. All workers of a run of
pytest share both servers.
"""

import fcntl
import itertools
import json
import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import redirect_stdout
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

import torch.multiprocessing as mp

SHARED_FOLDER = "DISTEMBED_TEST_SERVERS"
"""Variable of the environment with the folder in which processes find servers; without it they share none."""


class SharedServer(ForkServer):
    """A server that processes share: the first that needs it starts it, and it ends with the last of them.

    A file named ``name`` in the shared folder has its address, and the pipe that it watches to see whether any process
    is left: a process number and a descriptor.
    """

    _forkserver_address: str | None
    _forkserver_pid: int | None
    _forkserver_alive_fd: int | None

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def ensure_running(self) -> None:
        """Starts the server, or finds the one that another process has started."""
        folder = os.environ.get(SHARED_FOLDER)
        if folder is None or self._forkserver_pid is not None:  # not shared, or started here
            super().ensure_running()
        elif self._forkserver_address is None:
            with Path(folder, self._name).open("a+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                self._find_or_start(file)

    def _find_or_start(self, file: TextIO) -> None:
        file.seek(0)
        try:
            process, descriptor, address = json.loads(file.read())
            self._forkserver_alive_fd = os.open(f"/proc/{process}/fd/{descriptor}", os.O_WRONLY)
        except (ValueError, FileNotFoundError):  # none has been started, or its process has ended
            own_address = tempfile.mktemp(dir=Path(file.name).parent)  # which outlives this process
            with mock.patch.object(connection, "arbitrary_address", lambda family: own_address):
                super().ensure_running()
            file.truncate(0)
            json.dump([os.getpid(), self._forkserver_alive_fd, self._forkserver_address], file)
        else:
            self._forkserver_address = address
            resource_tracker.ensure_running()


SERVERS = [SharedServer("even"), SharedServer("odd")]
"""They start when they are first needed, and end with the processes that use them."""
_STARTING = threading.Lock()


def run_processes(count: int, function: Callable[..., None], *arguments: Any, others_end: float | None = None) -> None:
    """Calls ``function(i, *arguments)`` in each process; raises what :func:`torch.multiprocessing.spawn` raises.

    Args:
        count: Processes.
        function: Named at the top of its file.
        arguments: Of every process.
        others_end: Seconds in which the others end by themselves after one has failed; at once they are terminated
            unless given.
    """
    started = start_processes(count, function, *arguments)
    while not started.join(grace_period=others_end):
        pass


def output_of(function: Callable[..., object], *arguments: Any) -> str:
    """Returns what ``function(*arguments)`` prints in a process of its own, which may change its environment."""
    with tempfile.NamedTemporaryFile("r") as output:
        run_processes(1, _print_to, output.name, function, arguments)
        return output.read()


def _print_to(_: int, output: str, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    with open(output, "w") as file, redirect_stdout(file):
        function(*arguments)


def start_processes(count: int, function: Callable[..., None], *arguments: Any) -> mp.ProcessContext:
    """The same without waiting for them; they end with this process at the latest."""
    servers = SERVERS[:count]
    for server in servers:
        server.set_forkserver_preload(["tests.loaded"])
        server.ensure_running()
    turns = itertools.cycle(servers)

    def connect(fds: Any) -> Any:
        return next(turns).connect_to_new_process(fds)

    # multiprocessing knows of one server
    with _STARTING, mock.patch.object(forkserver, "connect_to_new_process", connect):
        return mp.start_processes(
            _call, (dict(os.environ), function, arguments), count, join=False, daemon=True, start_method="forkserver"
        )


def _call(number: int, environment: dict[str, str], function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    # a server's is that of when it was started
    os.environ.clear()
    os.environ.update(environment)
    function(number, *arguments)
