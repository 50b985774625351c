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
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distembed.data.prepare.progress import ProgressCallback, ProgressUpdate, ignore
from distembed.files import write_text


@dataclass
class _Done:
    """How far tasks are."""

    num_bytes: int = 0
    num_rows: int = 0


@dataclass
class _Stage:
    """A stage that is being done, and how far each of its tasks is."""

    name: str
    folder: Path
    tasks: Sequence[str]
    total_bytes: int | None
    done: dict[str, _Done] = field(default_factory=dict)

    def file(self, index: int) -> Path:
        """Returns the file that holds the result of a task."""
        return self.folder / f"{index:06d}.json"


class Work:
    """The work folder of a preparation.

    Args:
        folder: Folder for what is needed only meanwhile, made where it is missing; shared by all processes.
        report: Function that is called with the progress of all processes, by process 0 and in the caller's thread.

    Attributes:
        folder: The folder; names in it other than ``results`` are the caller's.
    """

    def __init__(self, folder: Path, report: ProgressCallback = ignore) -> None:
        self.folder = folder
        self._report = report
        self._thread = threading.get_ident()
        self._stage = _Stage("", folder, (), None)

    def run_stage(
        self,
        name: str,
        tasks: Sequence[str],
        do: Callable[[str], Any],
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
            Exception: What ``do`` raised; then no further task is begun.
        """
        self._stage = _Stage(name, self.folder / "results" / name, tasks, total_bytes)
        self._stage.folder.mkdir(parents=True, exist_ok=True)
        results: dict[str, Any] = {}
        waiting = []
        for index, task in enumerate(tasks):
            if self._stage.file(index).exists():
                results[task] = self._read(index)
            else:
                waiting.append((index, task))
        if threads == 1 or len(waiting) < 2:
            for index, task in waiting:
                results[task] = self._do(index, task, do)
                self._say_progress()
        else:
            results |= self._do_side_by_side(waiting, do, threads)
        return {task: results[task] for task in tasks}

    def advance(self, task: str, num_bytes: int = 0, num_rows: int = 0) -> None:
        """Says, from within a task and in its thread, that it has dealt with so many more bytes and rows."""
        done = self._stage.done[task]
        done.num_bytes += num_bytes
        done.num_rows += num_rows
        if threading.get_ident() == self._thread:
            self._say_progress()

    def _do(self, index: int, task: str, do: Callable[[str], Any]) -> Any:
        """Does a task and writes down its result."""
        self._stage.done[task] = _Done()
        result = do(task)
        done = self._stage.done[task]
        record = {"task": task, "bytes": done.num_bytes, "rows": done.num_rows, "result": result}
        text = json.dumps(record)
        write_text(self._stage.file(index), text)
        return json.loads(text)["result"]  # as it is for the other processes, and after a kill

    def _do_side_by_side(
        self, waiting: Sequence[tuple[int, str]], do: Callable[[str], Any], threads: int
    ) -> dict[str, Any]:
        """Does tasks in several threads, of which, when one fails, none begins anything more."""
        results: dict[str, Any] = {}
        pool = ThreadPoolExecutor(threads, "distembed-task")
        try:
            futures: dict[Future[Any], str] = {pool.submit(self._do, index, task, do): task for index, task in waiting}
            for future in as_completed(futures):
                results[futures[future]] = future.result()
                self._say_progress()
        finally:
            pool.shutdown(cancel_futures=True)
        return results

    def _read(self, index: int) -> Any:
        """Returns the result of a task that is done."""
        record = json.loads(self._stage.file(index).read_text(encoding="utf-8"))
        self._stage.done[record["task"]] = _Done(record["bytes"], record["rows"])
        return record["result"]

    def _say_progress(self) -> None:
        done = list(self._stage.done.values())
        num_bytes, num_rows = sum(one.num_bytes for one in done), sum(one.num_rows for one in done)
        self._report(ProgressUpdate(self._stage.name, num_bytes, self._stage.total_bytes, num_rows))
