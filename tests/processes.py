"""Ranks of their own for a test, forked from ones that have loaded what :mod:`tests.loaded` names, which takes seconds.

They are forked from two such servers in turn. Each has a seed of its own for the hash of strings, as the ranks of a
real run have, so that what depends on the order of a set differs between neighbouring ranks.
"""

import itertools
import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import redirect_stdout
from multiprocessing import forkserver
from multiprocessing.forkserver import ForkServer
from typing import Any
from unittest import mock

import torch.multiprocessing as mp

SERVERS = [ForkServer(), ForkServer()]
"""They start when they are first needed, and end with this process."""
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
