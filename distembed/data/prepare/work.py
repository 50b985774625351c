"""The tasks of a preparation: threads, Ray or Spark run them, and their results outlive a process that is killed.

A stage is a list of tasks. Each task writes its result to a file when it is done::

    folder/results/read/000000.json     {"bytes": 16777216, "rows": 71804, "result": ...}
    folder/results/read/000001.json

The same command, run again after it was killed, skips tasks whose file exists. Other files of a task have to be whole
when it returns, and appear by a rename, since a cluster may run a task twice at once.

=========  =====================================================  ================================================
engine     cluster                                                a lost worker
=========  =====================================================  ================================================
threads    none                                                   ends the command
ray        ``RAY_ADDRESS``, one of ``ray start``, else a new one  its tasks run again, up to 5 times
spark      ``MASTER``, ``spark-submit``, ``spark-defaults.conf``  its tasks run again, ``spark.task.maxFailures``
=========  =====================================================  ================================================

Workers of a cluster have distembed installed, and see the work folder, local inputs and a local output under equal
paths. Trade-off: each task is a Spark job of its own, some 50 ms each, so that the first error ends the stage.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import logging
import os
import pickle
import re
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from distembed.base.checksums import checksum_of
from distembed.base.errors import RunError, TemporaryFailure, UserError, one_line
from distembed.base.files import write_text
from distembed.base.units import format_bytes
from distembed.base.version import __version__
from distembed.data.prepare.options import NoteCallback, ProgressCallback, ProgressUpdate, ResourceLimits, ignore
from distembed.data.prepare.staging import STAGED, Destination, kept_folder

Task = TypeVar("Task")
Result = TypeVar("Result")
Submit = Callable[[Any], "Future[Any]"]
_LOOK_SECONDS = 0.05
_RAY_RETRIES = 5
_CONNECT_SECONDS = 10
_SPARK_JOBS = 256  # most Spark jobs at a time; the cluster's cores decide how many of them run


@dataclass(frozen=True)
class _Failed:
    """The error of a task on a worker."""

    error: Exception


def run_tasks(
    function: Callable[[Task], Result], tasks: Sequence[Task], limits: ResourceLimits, threads: int
) -> Iterator[list[Result]]:
    """Runs tasks and yields lists of results as tasks finish, an empty list if none does in 50 ms.

    The first error of a task is raised; tasks that have not begun are cancelled.
    """
    pools: dict[str, Callable[[], AbstractContextManager[Submit]]] = {
        "threads": lambda: _threads(function, min(threads, max(1, len(tasks)))),
        "ray": lambda: _ray(function, limits),
        "spark": lambda: _spark(function),
    }
    with pools[limits.engine]() as submit:
        waiting = {submit(task) for task in tasks}
        while waiting:
            finished, waiting = wait(waiting, _LOOK_SECONDS, FIRST_COMPLETED)
            results = [future.result() for future in finished]
            for result in results:
                if isinstance(result, _Failed):
                    raise result.error
            yield results


@contextmanager
def _threads(function: Callable[[Any], Any], threads: int) -> Iterator[Submit]:
    if threads == 1:  # in the caller's thread

        def call(task: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_result(function(task))
            return future

        yield call
        return
    pool = ThreadPoolExecutor(threads, "distembed-task")
    try:
        yield lambda task: pool.submit(function, task)
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _ray(function: Callable[[Any], Any], limits: ResourceLimits) -> Iterator[Submit]:
    ray = _connected_ray(limits)
    options = {"num_cpus": limits.num_threads, "memory": limits.memory_limit_bytes, "max_retries": _RAY_RETRIES}
    remote, shared = ray.remote(_attempt).options(scheduling_strategy="SPREAD", **options), ray.put(function)
    running: list[Any] = []

    def submit(task: Any) -> Future[Any]:
        running.append(remote.remote(shared, __version__, task))
        return running[-1].future()

    try:
        yield submit
    except BaseException as error:
        with suppress(Exception):  # of a cluster that is lost
            for task in running:
                ray.cancel(task, force=True)
            ray.wait(running, num_returns=len(running), timeout=10)
        if isinstance(error, ray.exceptions.RayError):
            raise _lost("Ray", error) from error
        raise


def _connected_ray(limits: ResourceLimits) -> Any:
    """Returns Ray, connected to a cluster: that of ``RAY_ADDRESS`` or ``ray start``, else a new one on loopback."""
    address = os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not address:
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # a new cluster listens on loopback only
    ray = _imported("ray")
    if not ray.is_initialized():
        try:
            ray.init(include_dashboard=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as error:
            at = f"at RAY_ADDRESS={address}" if address else "on this machine"
            raise UserError(f"engine (--engine) is ray, and there is no Ray cluster {at}: {one_line(error)}") from error
    task_resources = {"CPU": limits.num_threads, "memory": limits.memory_limit_bytes}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    has_room = any(all(node.get(name, 0) >= least for name, least in task_resources.items()) for node in nodes)
    if not address and not has_room:
        raise UserError(
            f"each task is to have {limits.num_threads} CPUs (--threads) and "
            f"{format_bytes(limits.memory_limit_bytes)} (--memory-limit), and no machine of the Ray cluster has as "
            f"much: {nodes}; ask for less"
        )
    return ray


@contextmanager
def _spark(function: Callable[[Any], Any]) -> Iterator[Submit]:
    sql, py4j, errors = (_imported(name) for name in ("pyspark.sql", "py4j.protocol", "pyspark.errors"))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_WORKER_DIR", tempfile.gettempdir())  # of local clusters: else Spark's own folder
    if sql.SparkSession.getActiveSession() is None:
        _require_master(os.environ.get("MASTER", ""))
        builder = sql.SparkSession.builder.appName("distembed prepare").config("spark.ui.showConsoleProgress", False)
        atexit.register(builder.getOrCreate().stop)
    context = sql.SparkSession.builder.getOrCreate().sparkContext
    shared = context.broadcast(function)
    pool = ThreadPoolExecutor(_SPARK_JOBS, "distembed-spark")

    def run(task: Any) -> Any:
        context.addJobTag(__name__)  # of this thread's jobs
        attempt = functools.partial(_attempt_broadcast, shared, __version__)
        return context.parallelize([task], 1).map(attempt).collect()[0]

    try:
        yield lambda task: pool.submit(run, task)
    except BaseException as error:
        pool.shutdown(wait=False, cancel_futures=True)
        with suppress(Exception):  # of a cluster that is lost
            context.cancelJobsWithTag(__name__)
        if isinstance(error, py4j.Py4JError | errors.PySparkException | ConnectionError):
            raise _lost("Spark", error) from error
        raise
    finally:
        pool.shutdown()
        with suppress(Exception):
            shared.unpersist()


def _require_master(master: str) -> None:
    """Raises a UserError if no machine of ``spark://...`` answers in 10 seconds; Spark would wait for minutes."""
    addresses = re.findall(r"(\[[^]]+\]|[^/,:]+):([0-9]+)", master) if master.startswith("spark://") else []
    for attempt, (host, port) in enumerate(addresses, 1):
        try:
            return socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
        except OSError as error:
            if attempt == len(addresses):
                raise UserError(f"engine (--engine) is spark, and MASTER={master} does not answer: {error}") from error


def _attempt_broadcast(shared: Any, version: str, task: Any) -> Any:
    return _attempt(shared.value, version, task)


def _attempt(function: Callable[[Any], Any], version: str, task: Any) -> Any:
    """Runs a task on a worker, and returns its error as _Failed: a raised one would make the engine retry the task.

    An error that cannot be pickled becomes a RunError with its text.
    """
    if version != __version__:
        return _Failed(UserError(f"a worker has distembed {__version__}, and this command {version}; install the same"))
    try:
        return function(task)
    except Exception as error:
        try:
            error.add_note(f"On the worker:\n{traceback.format_exc()}")
            return pickle.loads(pickle.dumps(_Failed(error)))
        except Exception:
            return _Failed(RunError(one_line(error)))


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        extra = "ray" if module == "ray" else "spark"
        raise UserError(
            f"engine (--engine) is '{extra}', which is not installed ({error}): `pip install 'distembed[{extra}]'`"
        ) from error


def _lost(engine: str, error: BaseException) -> TemporaryFailure:
    return TemporaryFailure(
        f"{engine} could not run a task to its end ({one_line(error)}); begin the same command again: finished tasks "
        "are kept"
    )


Advance = Callable[[int, int], None]  # reports, from within a task, how many more bytes and rows it has dealt with


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
        """Runs the tasks that have no result yet, and returns all results as JSON has them.

        Args:
            name: Name of the stage; each stage has another.
            tasks: The tasks, in the order in which they begin; the same in a command that resumes.
            do: Runs a task, given a function that takes progress; returns a value for JSON. On a cluster it is pickled.
            threads: Number of tasks that this process runs at a time; with 1 they run in the caller's thread.
            total_bytes: Sum of the bytes that all tasks advance by; None where that is not known.
        """
        folder = self.folder / "results" / name
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / f"{index:06d}.json" for index in range(len(tasks))]
        record_of_file = {file: json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()}
        progress = [sum(record[kind] for record in record_of_file.values()) for kind in ("bytes", "rows")]
        lock, caller = threading.Lock(), threading.get_ident()

        def advance(num_bytes: int, num_rows: int) -> None:
            with lock:
                progress[0] += num_bytes
                progress[1] += num_rows
            if threading.get_ident() == caller:
                self.report(ProgressUpdate(name, progress[0], total_bytes, progress[1]))

        is_cluster = self.limits.is_cluster
        run = functools.partial(_run_task, do, None if is_cluster else advance)
        waiting = [(file, task) for file, task in zip(files, tasks, strict=True) if file not in record_of_file]
        for records in run_tasks(run, waiting, self.limits, threads):
            for file, record in records:
                record_of_file[file] = record
                if is_cluster:
                    advance(record["bytes"], record["rows"])
            advance(0, 0)
        return [record_of_file[file]["result"] for file in files]


def _run_task(
    do: Callable[[Task, Advance], Any], advance: Advance | None, waiting: tuple[Path, Task]
) -> tuple[Path, dict[str, Any]]:
    """Runs a task, here or on a worker, and writes its result to its file; returns the file and the record in it.

    ``advance`` is None on a worker: the record then has the bytes and rows by which progress advances at the end.
    """
    file, task = waiting
    progress = {"bytes": 0, "rows": 0}

    def counted(num_bytes: int, num_rows: int) -> None:
        progress["bytes"] += num_bytes
        progress["rows"] += num_rows
        if advance is not None:
            advance(num_bytes, num_rows)

    result = do(task, counted)
    pa.default_memory_pool().release_unused()  # else memory that this stage has freed adds to the next one's
    text = json.dumps({**progress, "result": result}, default=asdict)
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
    """Yields the folder that becomes the dataset when the block ends, and the Work whose finished tasks are kept.

    ``purpose`` is a JSON value of everything that the results depend on: an equal one resumes an interrupted command,
    and a note says so. None, for inputs that cannot be read again as pipes, keeps nothing.
    """
    digest = None if purpose is None else checksum_of(json.dumps(purpose, sort_keys=True).encode())
    overwrite, is_moved = destination.overwrite, destination.url is not None
    with kept_folder(destination.path, digest, overwrite=overwrite, is_moved=is_moved) as work:
        destination.begin(work.is_resumed)
        if work.is_resumed:
            note(f"{destination}: this resumes the same command, which was interrupted; finished tasks are kept")
        elif work.is_anew:
            note(
                f"{destination}: this starts over, since the command that was interrupted had other inputs or options, "
                "or the machine was restarted; its finished tasks are removed"
            )
        try:
            yield work.path / STAGED, Work(work.path / "work", report, limits)
        except KeyboardInterrupt:
            if digest is not None:
                note(f"{destination}: finished tasks are kept, and the same command resumes")
            raise
