"""Runs a function on several gloo ranks, each a process of its own on this machine."""

import os
import random
import socket
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.processes import run_processes


def free_port() -> int:
    """A port below those that the system gives to connections, which might take it before it is listened on."""
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", random.SystemRandom().randrange(15_000, 32_000)))
            except OSError:
                continue
            return int(probe.getsockname()[1])


def run_on_ranks(world_size: int, function: Callable[..., None], *arguments: Any) -> None:
    """Calls ``function(rank, world_size, *arguments)`` on every rank; raises what any of them raises."""
    run_processes(world_size, start, world_size, free_port(), function, arguments)


def run_cases(world_size: int, check: Callable[..., None], cases: Iterable[Any]) -> None:
    """Calls ``check(rank, world_size, *case)`` for all cases in one start of the ranks; names the case that fails."""
    run_on_ranks(world_size, check_cases, check, list(cases))


def check_cases(rank: int, world_size: int, check: Callable[..., None], cases: Iterable[Any]) -> None:
    """Calls the function for one case after the other; a case is a tuple of arguments, or a single argument."""
    for case in cases:
        try:
            check(rank, world_size, *(case if isinstance(case, tuple) else (case,)))
        except (Exception, pytest.fail.Exception) as error:
            raise AssertionError(f"{case} on rank {rank} of {world_size}: {error}") from error


def start(rank: int, world_size: int, port: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Joins the group as one of the ranks of :func:`run_on_ranks`, calls the function, and ends the process."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    try:
        function(rank, world_size, *arguments)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    # A thread of gloo's that is late with its last message would ask for an interpreter that has ended, and abort.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
