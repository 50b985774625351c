"""The work of a preparation, cut into stages and these into tasks whose results outlive whoever is killed.

A stage is a list of tasks, which an engine runs (``engine.py``). Whoever has run a task writes its result to a file::

    folder/results/read/000000.json     {"task": "part-0", "bytes": 16777216, "rows": 71804, "result": ...}
    folder/results/read/000001.json

The same command, run again after it was killed, skips tasks whose file exists. Any other file that a task writes has to
be whole when the task returns, and to replace the one of an attempt that was killed. On a cluster a task may even run
twice at the same time, so that its files have to appear by a rename.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from distembed import __version__
from distembed.checksums import checksum_of
from distembed.data.prepare.base import Base
from distembed.data.prepare.blocks import RawInput, RowSource
from distembed.data.prepare.destination import Destination
from distembed.data.prepare.engine import run_tasks
from distembed.data.prepare.limits import ResourceLimits
from distembed.data.prepare.options import PrepareOptions
from distembed.data.prepare.progress import NoteCallback, ProgressCallback, ProgressUpdate, ignore
from distembed.data.prepare.staging import STAGED, kept_folder
from distembed.errors import UserError
from distembed.files import write_text


class Advance(Protocol):
    """Reports, from within a task, how many more bytes and rows it has dealt with."""

    def __call__(self, num_bytes: int = 0, num_rows: int = 0) -> None: ...


class _Progress:
    """How far a stage is, or a task; threads add to it, and ``report`` is called in the thread that has made it."""

    def __init__(self, report: Callable[[int, int], object] = lambda *_: None) -> None:
        self.num_bytes = self.num_rows = 0
        self._report, self._thread, self._lock = report, threading.get_ident(), threading.Lock()

    def advance(self, num_bytes: int = 0, num_rows: int = 0) -> None:
        with self._lock:
            self.num_bytes += num_bytes
            self.num_rows += num_rows
        self.report()

    def report(self) -> None:
        if threading.get_ident() == self._thread:
            self._report(self.num_bytes, self.num_rows)


class Work:
    """The work folder of a preparation.

    Args:
        folder: Folder for files that are needed only meanwhile, made where it is missing.
        report: Function that is called with the progress, in the caller's thread.
        limits: Who runs the tasks, and the memory and threads of each task of a cluster.

    Attributes:
        folder: The folder; all names in it but ``results`` are the caller's.
    """

    def __init__(self, folder: Path, report: ProgressCallback = ignore, limits: ResourceLimits | None = None) -> None:
        self.folder = folder
        self._report = report
        self._limits = limits or ResourceLimits()

    def run_stage(
        self,
        name: str,
        tasks: Sequence[str],
        do: Callable[[str, Advance], Any],
        *,
        threads: int = 1,
        total_bytes: int | None = None,
        local: bool = False,
    ) -> dict[str, Any]:
        """Runs the tasks that have no result yet.

        Args:
            name: Name of the stage; each stage has another.
            tasks: Names of the tasks, each once, in the order in which they begin.
            do: Runs a task and returns its result, a value that JSON can hold, floats exactly. It is given a function
                that takes progress. On a cluster it is pickled.
            threads: Number of tasks that this process runs at a time; with 1 they run in the caller's thread.
            total_bytes: Sum of the bytes that all tasks advance by; None where that is not known.
            local: Whether the tasks run in this process on a cluster too.

        Returns:
            The result of each task, in the order of the tasks, as JSON has it: tuples are lists, and keys are texts.

        Raises:
            Exception: The error of ``do``; then no further task begins.
            TemporaryFailure: A cluster has lost too many workers.
        """
        folder = self.folder / "results" / name
        folder.mkdir(parents=True, exist_ok=True)
        stage = _Progress(lambda *done: self._report(ProgressUpdate(name, done[0], total_bytes, done[1])))
        found = set(os.listdir(folder))
        finished = [index for index in range(len(tasks)) if _file(folder, index).name in found]
        waiting = [(index, task) for index, task in enumerate(tasks) if index not in set(finished)]
        records = [json.loads(_file(folder, index).read_text(encoding="utf-8")) for index in finished]
        for record in records:
            stage.num_bytes += record["bytes"]
            stage.num_rows += record["rows"]
        engine = "threads" if local else self._limits.engine
        if engine == "threads" and (threads == 1 or len(waiting) < 2):
            for each in waiting:
                records.append(_run_task(do, folder, each, stage.advance))
                stage.report()
        else:
            advance = stage.advance if engine == "threads" else None
            run = functools.partial(_run_task, do, folder, advance=advance)
            for done in run_tasks(engine, run, waiting, self._limits, threads):
                records += done
                for record in done if advance is None else ():
                    stage.advance(record["bytes"], record["rows"])
                stage.report()
        results = {record["task"]: record["result"] for record in records}
        return {task: results[task] for task in tasks}


def _file(folder: Path, index: int) -> Path:
    """Returns the file of a task's result."""
    return folder / f"{index:06d}.json"


def _run_task(
    do: Callable[[str, Advance], Any], folder: Path, numbered: tuple[int, str], advance: Advance | None = None
) -> dict[str, Any]:
    """Runs a task, here or on a worker, and writes its result."""
    index, task = numbered
    own = _Progress()

    def counted(num_bytes: int = 0, num_rows: int = 0) -> None:
        own.advance(num_bytes, num_rows)
        if advance is not None:
            advance(num_bytes, num_rows)

    result = do(task, counted)
    pa.default_memory_pool().release_unused()  # else the next stage works beside what this one has freed
    text = json.dumps({"task": task, "bytes": own.num_bytes, "rows": own.num_rows, "result": result})
    write_text(_file(folder, index), text, flush=False)  # after a power cut the work is not resumed anyway
    return json.loads(text)  # as after a kill


@contextmanager
def resumable_work(
    destination: Destination,
    purpose: Any | None,
    limits: ResourceLimits | None = None,
    *,
    report: ProgressCallback = ignore,
    note: NoteCallback = ignore,
) -> Iterator[tuple[Path, Work]]:
    """Yields the folder that becomes the dataset when the block ends, and the work.

    The block makes its other files and folders anew when it runs again after a kill, or finds them.

    Args:
        destination: Where the dataset goes; the block uploads the files of a remote one.
        purpose: All that tasks and their results depend on, such as inputs with their sizes and times, options and
            sizes of parts, as a value that JSON can hold. None where the inputs cannot be read again, as pipes: then
            nothing is kept.
        limits: Who runs the tasks, and with how much memory.
        report: Function that is called with the progress.
        note: Function that is told whether this resumes or starts over.

    Raises:
        UserError: The output is there and may not be replaced, cannot be made, or another command makes it.
        TemporaryFailure: A cluster has lost too many workers; finished tasks are kept.
    """
    digest = None if purpose is None else checksum_of(json.dumps(purpose, sort_keys=True).encode())
    output, is_remote = destination.path, destination.is_remote
    with kept_folder(output, digest, overwrite=destination.overwrite, is_moved=is_remote) as kept:
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


def work_purpose(
    source: RowSource, options: PrepareOptions, limits: ResourceLimits, part_bytes: int, base: Base | None
) -> dict[str, Any] | None:
    """Returns all that the tasks of a preparation and their results depend on, as a value that JSON can hold.

    Args:
        source: The inputs, and how their rows are parsed.
        options: What the dataset's bytes depend on besides.
        limits: Memory and threads, by which blocks are cut.
        part_bytes: About how many bytes of a plain input are a part.
        base: Dataset whose ids are applied, if there is one.

    Returns:
        The value; None where an input can be read once only.

    Raises:
        UserError: A cluster is to read such an input.
    """
    once = [each for each in source.inputs if each.num_bytes is None]
    if once and limits.is_cluster:
        raise UserError(
            f"engine (--engine) is {limits.engine}, and {once[0].place} has no known size, as pipes have none: its "
            "workers cannot read it; use --engine threads, or name a file"
        )
    if once:
        return None
    return {
        "version": __version__,
        "inputs": [asdict(each) | {"version": _version(each)} for each in source.inputs],
        "layout": repr(source.layout),
        "options": repr(options),
        "base": None if base is None else base.to_json(),
        "block_bytes": limits.block_bytes,
        "part_bytes": part_bytes,
    }


def _version(described: RawInput) -> str:
    """Returns a text that changes when an input does."""
    try:
        return described.version or str(os.stat(described.place).st_mtime_ns)
    except OSError:
        return ""  # a server that does not say
