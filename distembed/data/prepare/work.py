"""The work of a preparation, cut into stages and these into tasks whose results outlive whoever is killed.

A stage is a list of tasks, which an engine runs (``engine.py``). Whoever has run a task writes its result to a file::

    folder/results/read/000000.json     {"bytes": 16777216, "rows": 71804, "result": ...}
    folder/results/read/000001.json

The same command, run again after it was killed, skips tasks whose file exists. Any other file that a task writes has to
be whole when the task returns, and to replace the one of an attempt that was killed. On a cluster a task may even run
twice at the same time, so that its files have to appear by a rename.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from distembed.base.checksums import checksum_of
from distembed.base.files import write_text
from distembed.data.prepare.destination import Destination
from distembed.data.prepare.engine import run_tasks
from distembed.data.prepare.options import ResourceLimits
from distembed.data.prepare.progress import NoteCallback, ProgressCallback, ProgressUpdate, ignore
from distembed.data.prepare.staging import STAGED, kept_folder

Task = TypeVar("Task")
Advance = Callable[[int, int], None]
"""Reports, from within a task, how many more bytes and rows it has dealt with."""


@dataclass(frozen=True)
class Work:
    """The work folder of a preparation."""

    folder: Path  # for files that are needed only meanwhile; all names in it but ``results`` are the caller's
    report: ProgressCallback = ignore  # called with the progress, in the caller's thread
    limits: ResourceLimits = ResourceLimits()  # who runs the tasks, with the memory and threads of each on a cluster

    def run_stage(
        self,
        name: str,
        tasks: Sequence[Task],
        do: Callable[[Task, Advance], Any],
        *,
        threads: int = 1,
        total_bytes: int | None = None,
    ) -> list[Any]:
        """Runs the tasks that have no result yet.

        Args:
            name: Name of the stage; each stage has another.
            tasks: The tasks, in the order in which they begin; the same in a command that resumes.
            do: Runs a task and returns its result: a value that JSON can hold, floats exactly, or a dataclass of such
                values. It is given a function that takes progress. On a cluster both are pickled.
            threads: Number of tasks that this process runs at a time; with 1 they run in the caller's thread.
            total_bytes: Sum of the bytes that all tasks advance by; None where that is not known.

        Returns:
            The result of each task, as JSON has it: tuples are lists, dataclasses dictionaries, and keys texts.

        Raises:
            Exception: The error of ``do``; then no further task begins.
            TemporaryFailure: A cluster has lost too many workers.
        """
        folder = self.folder / "results" / name
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / f"{index:06d}.json" for index in range(len(tasks))]
        found = {file: json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()}
        done = [sum(record[kind] for record in found.values()) for kind in ("bytes", "rows")]
        lock, caller = threading.Lock(), threading.get_ident()

        def advance(num_bytes: int, num_rows: int) -> None:
            with lock:
                done[0] += num_bytes
                done[1] += num_rows
            if threading.get_ident() == caller:
                self.report(ProgressUpdate(name, done[0], total_bytes, done[1]))

        is_cluster = self.limits.is_cluster
        run = functools.partial(_run_task, do, None if is_cluster else advance)
        waiting = [(file, task) for file, task in zip(files, tasks, strict=True) if file not in found]
        for records in run_tasks(run, waiting, self.limits, threads):
            for file, record in records:
                found[file] = record
                if is_cluster:
                    advance(record["bytes"], record["rows"])
            advance(0, 0)
        return [found[file]["result"] for file in files]


def _run_task(
    do: Callable[[Task, Advance], Any], advance: Advance | None, waiting: tuple[Path, Task]
) -> tuple[Path, dict[str, Any]]:
    """Runs a task, here or on a worker, and writes its result to its file."""
    file, task = waiting
    done = {"bytes": 0, "rows": 0}

    def counted(num_bytes: int, num_rows: int) -> None:
        done["bytes"] += num_bytes
        done["rows"] += num_rows
        if advance is not None:
            advance(num_bytes, num_rows)

    result = do(task, counted)
    pa.default_memory_pool().release_unused()  # else the next stage works beside what this one has freed
    text = json.dumps({**done, "result": result}, default=asdict)
    write_text(file, text, flush=False)  # after a power cut the work is not resumed anyway
    return file, json.loads(text)  # as after a kill


@contextmanager
def resumable_work(
    destination: Destination,
    purpose: Any | None,
    limits: ResourceLimits,
    *,
    report: ProgressCallback = ignore,
    note: NoteCallback = ignore,
) -> Iterator[tuple[Path, Work]]:
    """Yields the folder that becomes the dataset when the block ends, and the work.

    The block makes its other files and folders anew when it runs again after a kill, or finds them; it uploads the
    files of a remote destination. The purpose is a JSON value of all that tasks and their results depend on, such as
    inputs with their sizes and times, options and sizes of parts. It is None where the inputs cannot be read again, as
    pipes: then nothing is kept.

    Raises:
        UserError: The output is there and may not be replaced, cannot be made, or another command makes it.
        TemporaryFailure: A cluster has lost too many workers; finished tasks are kept.
    """
    digest = None if purpose is None else checksum_of(json.dumps(purpose, sort_keys=True).encode())
    overwrite, is_moved = destination.overwrite, destination.url is not None
    with kept_folder(destination.path, digest, overwrite=overwrite, is_moved=is_moved) as kept:
        destination.begin(kept.is_resumed)
        if kept.is_resumed:
            note(f"{destination}: this resumes the same command, which was interrupted; finished tasks are kept")
        elif kept.is_anew:
            note(
                f"{destination}: this starts over, since the command that was interrupted had other inputs or options, "
                "or the machine was restarted; its finished tasks are removed"
            )
        try:
            yield kept.path / STAGED, Work(kept.path / "work", report, limits)
        except KeyboardInterrupt:
            if digest is not None:
                note(f"{destination}: finished tasks are kept, and the same command resumes")
            raise
