"""The work of a preparation, cut into stages and these into tasks that are done once, whatever is killed meanwhile.

Every process of a preparation runs the same program, and calls :meth:`Work.run_stage` with the same stages in the same
order. A stage is a list of tasks: process 0 of 2 does the first, the third ..., process 1 the second, the fourth ...,
and both get the results of all. A task's result is a file, which appears when the task is done::

    folder/results/read/000000.json     {"task": "part-0", "bytes": 16777216, "rows": 71804, "result": ...}
    folder/results/read/000001.json

A preparation that was killed is begun again with the same folder, by any number of processes: tasks whose results are
there are not done again. What else a task writes has to be whole when it returns, and to replace what it wrote before
it was killed.

Trade-off: which process does a task is fixed, so that it needs neither locks nor messages and is right on any file
system; a process whose tasks are small waits for the others at the end of a stage.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from distembed.data.prepare.beats import Beats
from distembed.data.prepare.processes import Worker
from distembed.data.prepare.progress import ProgressCallback, ProgressUpdate, ignore

_LOOK_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 0.5


@dataclass
class _Done:
    """How far tasks are."""

    num_bytes: int = 0
    num_rows: int = 0


@dataclass
class _Stage:
    """A stage that is being done, how far each task of this process is, and what is known of those of the others."""

    name: str
    folder: Path
    tasks: Sequence[str]
    total_bytes: int | None
    done: dict[str, _Done] = field(default_factory=dict)
    done_by_others: dict[str, _Done] = field(default_factory=dict)

    def file(self, index: int) -> Path:
        """Returns the file that holds the result of a task."""
        return self.folder / f"{index:06d}.json"


class Work:
    """The work folder of a preparation.

    Args:
        folder: Folder for what is needed only meanwhile, made where it is missing; shared by all processes.
        report: Function that is called with the progress of all processes, in the caller's thread.
        worker: This process among the others.

    Attributes:
        folder: The folder; names in it other than ``results`` and ``processes`` are the caller's.
    """

    def __init__(self, folder: Path, report: ProgressCallback = ignore, worker: Worker | None = None) -> None:
        self.folder = folder
        self._worker = worker or Worker()
        self._beats = Beats(folder / "processes", self._worker)
        self._report = report
        self._thread = threading.get_ident()
        self._stage = _Stage("", folder, (), None)

    def run_stage(
        self,
        name: str,
        tasks: Sequence[str],
        do: Callable[[str, Callable[[int, int], None]], Any],
        *,
        threads: int = 1,
        total_bytes: int | None = None,
    ) -> dict[str, Any]:
        """Does the tasks that are not done yet; every process calls it with the same arguments.

        Args:
            name: Name of the stage; each stage has another.
            tasks: Names of the tasks, each once; they are begun in this order.
            do: Does a task and returns its result, a value that JSON can hold, floats exactly. It runs in one process,
                and once however often the preparation is killed. It says how far it is by :meth:`advance`.
            threads: Number of tasks that this process does at a time; with 1 they are done in the caller's thread.
            total_bytes: Sum of the bytes that all tasks advance by; None where that is not known.

        Returns:
            The result of each task, in the order of the tasks, as JSON has it: tuples are lists, and keys are texts.

        Raises:
            Exception: What ``do`` raised, here or in another process; then no further task is begun.
            TemporaryFailure: Another process has died.
        """
        self._stage = _Stage(name, self.folder / "results" / name, tasks, total_bytes)
        self._stage.folder.mkdir(parents=True, exist_ok=True)
        own = range(self._worker.index, len(tasks), self._worker.count)
        results = self._finished(own)
        waiting = [(index, tasks[index]) for index in own if index not in results]
        if threads == 1 or len(waiting) < 2:
            for index, task in waiting:
                results[index] = self._do(index, task, do)
                self._say_progress()
        else:
            results |= self._do_side_by_side(waiting, do, threads)
        others = [index for index in range(len(tasks)) if index not in results]
        results |= self._await_others(others)
        return {task: results[index] for index, task in enumerate(tasks)}

    def begin(self) -> None:
        """Lets the other processes know that this one works; :meth:`end` is called however the work ends."""
        self._beats.begin()

    def end(self, error: BaseException | None = None) -> None:
        """Lets the other processes know that this one has left, or by what error it failed.

        Process 0 waits for the others before it goes on to put the dataset in place.

        Raises:
            RunError: Another process has failed or died.
        """
        if error is None and self._worker.is_first:
            self._beats.await_others()
        elif error is None:
            self._worker.await_started()
        self._beats.end(error)

    def advance(self, task: str, num_bytes: int = 0, num_rows: int = 0) -> None:
        """Says, from within a task and in its thread, that it has dealt with so many more bytes and rows."""
        done = self._stage.done[task]
        done.num_bytes += num_bytes
        done.num_rows += num_rows
        if threading.get_ident() == self._thread:
            self._say_progress()
        else:
            self._beats.check()

    def _do(self, index: int, task: str, do: Callable[[str, Callable[[int, int], None]], Any]) -> Any:
        """Does a task and writes down its result."""
        self._stage.done[task] = _Done()
        result = do(task, partial(self.advance, task))
        done = self._stage.done[task]
        record = {"task": task, "bytes": done.num_bytes, "rows": done.num_rows, "result": result}
        text = json.dumps(record)
        file = self._stage.file(index)
        temporary = file.with_suffix(".new")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)  # without a flush: after a power cut, what is kept is of no use anyway
        return json.loads(text)["result"]  # as it is for the other processes, and after a kill

    def _do_side_by_side(
        self, waiting: Sequence[tuple[int, str]], do: Callable[[str, Callable[[int, int], None]], Any], threads: int
    ) -> dict[int, Any]:
        """Does tasks in several threads, of which, when one fails, none begins anything more."""
        results: dict[int, Any] = {}
        pool = ThreadPoolExecutor(threads, "distembed-task")
        try:
            futures: dict[Future[Any], int] = {pool.submit(self._do, index, task, do): index for index, task in waiting}
            while futures:
                for future in wait(futures, _LOOK_SECONDS, FIRST_COMPLETED).done:
                    results[futures.pop(future)] = future.result()
                self._say_progress()
        finally:
            pool.shutdown(cancel_futures=True)
        return results

    def _await_others(self, missing: Sequence[int]) -> dict[int, Any]:
        """Returns the results of the other processes' tasks, once they are there."""
        results: dict[int, Any] = {}
        pause = _LOOK_SECONDS
        while missing := [index for index in missing if index not in results]:
            results |= (found := self._finished(missing))
            if not found:
                time.sleep(pause)
            pause = _LOOK_SECONDS if found else min(2 * pause, _LONGEST_PAUSE_SECONDS)
            self._say_progress()
        return results

    def _finished(self, indices: Sequence[int]) -> dict[int, Any]:
        """Returns the results of those tasks that are done."""
        found = set(os.listdir(self._stage.folder))
        return {index: self._read(index) for index in indices if self._stage.file(index).name in found}

    def _read(self, index: int) -> Any:
        """Returns the result of a task that is done."""
        record = json.loads(self._stage.file(index).read_text(encoding="utf-8"))
        is_own = index % self._worker.count == self._worker.index
        done = self._stage.done if is_own else self._stage.done_by_others
        done[record["task"]] = _Done(record["bytes"], record["rows"])
        return record["result"]

    def _say_progress(self) -> None:
        """Says how far all processes are, and finds out whether one has failed."""
        done = _sum(self._stage.done.values())
        self._beats.say(self._stage.name, done.num_bytes, done.num_rows)
        self._beats.check()
        said, found = self._beats.done_by_others(self._stage.name), _sum(self._stage.done_by_others.values())
        num_bytes = done.num_bytes + max(said[0], found.num_bytes)
        num_rows = done.num_rows + max(said[1], found.num_rows)
        self._report(ProgressUpdate(self._stage.name, num_bytes, self._stage.total_bytes, num_rows))


def _sum(done: Iterable[_Done]) -> _Done:
    all_done = list(done)
    return _Done(sum(one.num_bytes for one in all_done), sum(one.num_rows for one in all_done))
