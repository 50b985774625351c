"""Contenders that step in turn, each in a separate process: the seconds and the memory of their steps.

Memory is the peak of the process minus its memory before the first step. It includes gradients and the optimizer states
that the first step creates.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from bench_common import Step, wait_for

_WARM_UP = 2


@dataclass
class Measured:
    """One contender's seconds of each step, and the peak memory of its steps in bytes."""

    seconds: list[float] = field(default_factory=list)
    bytes: int = 0

    @property
    def median(self) -> float:
        """The median of the seconds."""
        return statistics.median(self.seconds)


def take_turns_in_processes(
    makers: Mapping[str, Callable[[], Step]], num_steps: int, device: torch.device, threads: int = 1
) -> dict[str, Measured]:
    """Returns the measurements of every contender by name.

    Args:
        makers: Functions that build a contender's step in its process; they can be pickled.
        num_steps: Number of steps of each contender, after two steps to warm up.
        device: The device to wait for.
        threads: Number of threads of each contender.
    """
    context, running = get_context("spawn"), {}
    for name, make in makers.items():
        here, there = context.Pipe()
        process = context.Process(target=_contend, args=(make, device, threads, there), daemon=True)
        process.start()
        running[name] = process, here
    found = {name: Measured() for name in running}
    for number in range(num_steps + _WARM_UP):
        for name, (_, pipe) in running.items():
            pipe.send(True)
            taken = pipe.recv()
            if number >= _WARM_UP:
                found[name].seconds.append(taken)
    for name, (process, pipe) in running.items():
        pipe.send(False)
        found[name].bytes = pipe.recv()
        process.join()
    return found


def _contend(make: Callable[[], Step], device: torch.device, threads: int, results: Connection) -> None:
    """Takes a step for each request and sends its seconds; sends the peak memory at the end."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    step = make()
    before = _start_counting(device)
    while results.recv():
        started = time.perf_counter()
        step()
        wait_for(device)
        results.send(time.perf_counter() - started)
    results.send(_most_bytes(device) - before)


def _start_counting(device: torch.device) -> int:
    """Starts the count of the peak; returns the memory in use on a CPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return 0
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    return _memory("VmRSS")


def _most_bytes(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else _memory("VmHWM")


def _memory(name: str) -> int:
    """Returns a field of this process's status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024
