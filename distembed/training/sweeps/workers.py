"""Workers of a sweep: processes that take runs in turn, and what happens when one dies, or the sweep is to end.

They are forked from the sweep's process, so that a model or a task that a script has registered is known to them. The
first Ctrl-C, SIGTERM or SIGUSR1 goes to each once, as SIGTERM: a run that is being trained saves a checkpoint. The
second ends them at once.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any

from distembed.training.sweeps.planned import PlannedRun
from distembed.training.sweeps.worker import Job, Outcome, WorkerPlace, share_of_cores, work

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclass
class _Worker:
    """A worker's process, the end of its connection that is here, and the run that it is at."""

    process: Any
    connection: Connection
    run: PlannedRun | None = None


class Workers:
    """A context manager that owns the workers of a sweep.

    Args:
        count: Number of workers; there are never more than runs.
        logs: Folder for a log of each run.
    """

    def __init__(self, count: int, logs: Path) -> None:
        self._count = count
        self._logs = logs
        self._workers: dict[int, _Worker] = {}
        self._stops = False

    @property
    def stopped(self) -> bool:
        """Whether a signal came, after which no more runs are begun."""
        return self._stops

    def __enter__(self) -> "Workers":
        self._previous = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.connection.close()
        for worker in self._workers.values():
            worker.process.join(timeout=5)
            worker.process.kill()
            worker.process.join()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        """Passes the first signal on to the workers; ends them at a second one."""
        how = signal.SIGKILL if self._stops else signal.SIGTERM
        self._stops = True
        for worker in self._workers.values():
            with suppress(ProcessLookupError):
                os.kill(worker.process.pid, how)

    def do(
        self,
        job: Job,
        runs: Sequence[PlannedRun],
        begun: Callable[[PlannedRun], None] = lambda run: None,
    ) -> Iterator[tuple[PlannedRun, Outcome]]:
        """Yields each run with how it ended, as they end; those that a signal kept from being begun are left out.

        Args:
            job: What is done of the runs.
            runs: The runs, which are begun in this order.
            begun: Is called with each run that is begun.
        """
        waiting = list(reversed(runs))
        while True:
            while waiting and not self._stops and (worker := self._free(len(runs))) is not None:
                worker.run = waiting.pop()
                begun(worker.run)
                with _signals_held():  # a run is handed over, or it is not
                    if not self._stops:
                        with suppress(BrokenPipeError):  # which is found out below
                            worker.connection.send((job, worker.run))
            busy = {worker.connection: worker for worker in self._workers.values() if worker.run is not None}
            if not busy:
                return
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                yield self._ended(busy[ready])

    def _free(self, most: int) -> _Worker | None:
        """Returns a worker that has no run, started if need be; None where all are busy."""
        self._workers = {
            i: each for i, each in self._workers.items() if each.run is not None or each.process.is_alive()
        }
        for worker in self._workers.values():
            if worker.run is None:
                return worker
        index = next((i for i in range(min(self._count, most)) if i not in self._workers), None)
        return None if index is None else self._start(index)

    def _start(self, index: int) -> _Worker:
        """Starts a worker."""
        context = multiprocessing.get_context("fork")
        own, theirs = context.Pipe()
        others = [own, *(worker.connection for worker in self._workers.values())]
        place = WorkerPlace(index, share_of_cores(index, self._count), self._logs)
        with _signals_held():  # until it is among those that signals are passed on to
            process = context.Process(target=_work_with_signals, args=(place, theirs, others), daemon=True)
            process.start()
            worker = self._workers[index] = _Worker(process, own)
        theirs.close()
        return worker

    def _ended(self, worker: _Worker) -> tuple[PlannedRun, Outcome]:
        """Returns the run that a worker was at, and how it ended; a worker that died is gone then."""
        run, worker.run = worker.run, None
        assert run is not None
        try:
            return run, worker.connection.recv()
        except (EOFError, OSError):
            worker.connection.close()
            worker.process.join()
            self._workers = {index: each for index, each in self._workers.items() if each is not worker}
        code = worker.process.exitcode
        if self._stops:
            return run, Outcome("interrupted", "it was ended before it could save a checkpoint")
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return run, Outcome("failed", f"its process ended with {how}")


def _work_with_signals(place: WorkerPlace, connection: Connection, others: Sequence[Connection]) -> None:
    """Works in a process that was begun with the sweep's signals held back."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    work(place, connection, others)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Holds back the signals of this process until the end of the block."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
