"""What a worker of a sweep does of a run: it builds the model without its weights, to find mistakes, or trains it.

A worker is a process without the terminal: what a run prints, errors with their tracebacks included, goes to a log of
its own. Nothing is kept from run to run but imported modules and what the system has cached of the dataset's files, so
that a run has the weights that it has when it is trained alone.
"""

import gc
import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

from distembed.base.errors import InsufficientMemory, Interrupted, RunError, UserError, one_line
from distembed.base.process import PARENT_VARIABLE, end_with_parent
from distembed.training.sweeps.planned import PlannedRun

RunStatus = Literal["finished", "failed", "interrupted"]
Job = Literal["check", "train"]


@dataclass(frozen=True)
class Outcome:
    """How a run of a sweep ended.

    Attributes:
        status: How.
        error: Why it did not finish.
        described: The metrics of the final evaluation as a line; None where there are none.
        seconds: How long the worker was at it.
    """

    status: RunStatus
    error: str | None = None
    described: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class WorkerPlace:
    """A worker among all of a sweep.

    Attributes:
        index: Its number, from 0, by which workers share CUDA devices.
        cores: The cores that it runs on, each with one thread that computes; empty for all, with as many threads as
            ``OMP_NUM_THREADS`` says.
        logs: Folder for a log of each run.
    """

    index: int
    cores: tuple[int, ...]
    logs: Path


def share_of_cores(index: int, workers: int) -> tuple[int, ...]:
    """Returns the cores of one of some workers, among which those that this process may run on are divided evenly.

    Returns none where the user has set ``OMP_NUM_THREADS``, which then holds for each worker on all cores.

    Args:
        index: Number of the worker, from 0.
        workers: Number of workers; where there are more of them than cores, several have the same.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return ()
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // workers)
    return tuple(cores[(index * each + place) % len(cores)] for place in range(each))


def work(place: WorkerPlace, connection: Connection, others: Sequence[Connection]) -> None:
    """Does one job after the other until there are no more; the process is the worker's own.

    Args:
        place: This worker among all.
        connection: Where jobs come from, a job and its run, and outcomes go to.
        others: Ends of connections that this process has taken over from the one that started it, and has no use for.
    """
    for other in others:
        other.close()
    parent = os.getppid()
    os.setsid()  # Ctrl-C goes to the sweep, which ends its workers
    os.environ[PARENT_VARIABLE] = str(parent)
    end_with_parent()
    if place.cores:
        os.sched_setaffinity(0, place.cores)
        os.environ["OMP_NUM_THREADS"] = str(len(place.cores))
    while True:
        try:
            job, run = connection.recv()
        except EOFError:
            return
        _print_to(place.logs / f"{run.name}.log")
        connection.send(_outcome(place, job, run))
        if os.getppid() != parent:
            return


def _print_to(log: Path) -> None:
    """Has this process print to a file from now on."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)


def _outcome(place: WorkerPlace, job: Job, run: PlannedRun) -> Outcome:
    """Does a job and returns how it ended, whatever happens."""
    started = time.perf_counter()
    status: RunStatus = "failed"
    described = None
    try:
        if job == "train":
            described = _train(place, run)
        else:
            _check(place, run)
        status, error = "finished", None
    except (Interrupted, KeyboardInterrupt) as interrupted:
        status, error = "interrupted", str(interrupted) or "interrupted"
    except (UserError, RunError, InsufficientMemory) as failure:
        error = str(failure)
        print(f"failed: {error}", flush=True)
    except Exception as failure:
        error = one_line(failure)
        traceback.print_exc()
    gc.collect()  # a sharded model is in circles of references
    return Outcome(status, error, described, time.perf_counter() - started)


def _train(place: WorkerPlace, run: PlannedRun) -> str | None:
    """Trains a run and returns the metrics of its final evaluation as a line."""
    import torch
    from rich.console import Console

    from distembed.base.ranks import process_group
    from distembed.training.run import train_run

    if place.cores:
        torch.set_num_threads(len(place.cores))  # a script may have loaded torch before it called this command
    console = Console(width=140)
    with process_group(run.config.train.device, place.index) as ranks:
        finished = train_run(run.config, run.options, ranks, console, _say)
    if finished.described is not None:
        _say(finished.described)
    return finished.described


def _check(place: WorkerPlace, run: PlannedRun) -> None:
    """Builds a run's model without the weights of its tables.

    Raises:
        UserError: The model cannot be built.
        InsufficientMemory: The networks do not fit into this machine.
    """
    from distembed.base.ranks import process_group
    from distembed.planning.networks import require_networks_fit
    from distembed.training.build import Blueprint
    from distembed.training.start import find_start

    with process_group(run.config.train.device, place.index) as ranks:
        start = find_start(run.config, run.options, lambda function: function(), _say)
        blueprint = Blueprint.for_ranks(start.config, start.manifest.schema, ranks, start.sse)
        require_networks_fit(blueprint.config.model, blueprint.model_inputs, 1)
        blueprint.build_plannable()


def _say(text: str) -> None:
    print(text, flush=True)
