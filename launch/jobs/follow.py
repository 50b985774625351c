"""Follows a launched job to its end, prints its logs and its state, and cancels it."""

import json
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchx.runner import Runner, get_runner
from torchx.schedulers.local_scheduler import SignalException
from torchx.specs import NONE, AppState, AppStatus

from distembed.base.errors import InsufficientMemory, Interrupted, RunError, UserError
from distembed.launch.jobs.asking import asking
from distembed.launch.jobs.job import LOCAL_SCHEDULERS, Job
from distembed.launch.nodes.exit_codes import MISTAKES
from distembed.launch.schedulers.slurm.scheduler import create_scheduler
from distembed.training.run_folder.record import RunInfo, last_metrics

Say = Callable[[str], None]
"""A function that prints a line."""
ROLE = "train"
"""Name of the one role of the component that trains."""
_POLL_SECONDS = 1.0
_PATIENCE_SECONDS = 300.0
_NOT_STARTED = (AppState.PENDING, AppState.SUBMITTED, AppState.UNSUBMITTED)
_REREAD_SECONDS = 5.0
"""Seconds after which a log whose stream has broken off is read again."""
# Kubernetes puts a time before each line.
_RANK_PREFIX = re.compile(r"^(?:node \d+: )?(?:\d{4}-\S+Z )?\[rank (\d+)\]:")
# Errors of a rank whose peer has died.
_IS_CONSEQUENCE = re.compile(
    r"^(DistBackendError|DistNetworkError|DistStoreError|Rendezvous\w*|SignalException)\b"
    r"|Connection (closed|reset) by peer|Broken pipe|\bnccl\w*Error\b"
)


def submit_and_follow(job: Job, runner: Runner, *, detach: bool, say: Say) -> None:
    """Submits a job to its scheduler, and prints its log until its end unless ``detach`` is set.

    Raises:
        Interrupted: Ctrl-C, which ends a job on this machine but not on a cluster; or an interrupted job has saved.
        UserError, InsufficientMemory, RunError: The job has failed, by the exit code of the first rank to fail.
    """
    started = time.time()
    earlier_status = _run_status(job)
    job = job.submit(runner)
    say(f"submitted: {job.scheduler} {job.app_id}, run folder {job.run_dir}")
    if detach:
        say(f"follow it with `distembed logs {job.run_dir} --follow`")
        return
    try:
        end_status = follow(job, runner, say)
    except (KeyboardInterrupt, SignalException) as error:
        if job.scheduler not in LOCAL_SCHEDULERS:
            raise Interrupted(
                f"not followed any longer. The job {job.app_id} goes on: `distembed logs {job.run_dir} --follow` shows "
                f"it, `distembed cancel {job.run_dir}` ends it."
            ) from error
        say("ending the job, which saves a checkpoint first")
        runner.cancel(job.handle)
        raise Interrupted(f"the job has ended; go on with `distembed resume {job.run_dir}`.") from error
    if end_status is not None and end_status.state == AppState.SUCCEEDED:
        say(f"run {job.run_dir}")
        return
    state = "its state is not known" if end_status is None else state_text(end_status)
    remedy = f"Logs are in {job.folder / 'logs'}; go on with `distembed resume {job.run_dir}`."
    if end_status is not None and end_status.state == AppState.CANCELLED:
        raise RunError(f"the job {job.app_id} has ended: {state}. {remedy}")
    logs = job.folder / "logs"
    job_logs = logs / job.app_id.rpartition(":")[2]  # Kubernetes puts its namespace before the name
    failure = first_failure(job_logs) if job_logs.is_dir() else first_failure(logs, since=started)
    now = _run_status(job)
    if failure is None and now != earlier_status and now[1] == "interrupted":
        raise Interrupted(f"the job {job.app_id} was interrupted, and has saved its state. {remedy}")
    text = f"the job {job.app_id} has ended: {state}. {remedy}"
    if failure is not None and failure.exit_code in MISTAKES:
        raise InsufficientMemory(text) if failure.exit_code == 3 else UserError(text)  # a node has printed the reason
    if failure is not None:
        say(f"first to fail: {failure.message} ({failure.where})")
        say(failure.traceback.rstrip())
    raise RunError(text)


def _run_status(job: Job) -> tuple[int, str]:
    """Returns the time of modification and the status of ``run.json``; (0, "") without a readable one."""
    record = Path(job.run_dir) / "run.json"
    try:
        return record.stat().st_mtime_ns, RunInfo.read(record).status
    except (OSError, UserError):
        return 0, ""


def state_text(status: AppStatus | None) -> str:
    """Returns a job's state, with its scheduler's message where there is one."""
    if status is None:
        return "unknown"
    msg = "" if status.msg in ("", NONE) else f": {status.msg}"
    return f"{status.state.name.lower()}{msg}"


def follow(job: Job, runner: Runner, say: Say) -> AppStatus | None:
    """Prints the output of rank 0 and of the launchers until the job has ended.

    Returns:
        The job's last state; None where the scheduler does not know the job.
    """
    watch = Watch(runner, job.handle, say)
    printed = None
    while (status := watch.status()) is not None and status.state in _NOT_STARTED:
        if status.msg != printed:
            say(f"waiting: {status.msg or status.state.name.lower()}")
            printed = status.msg
        time.sleep(_POLL_SECONDS)
    if status is not None:  # a short job may have ended by now
        # rank 0 may be on any node: nodes are numbered anew as they meet
        for line in node_lines(job, runner, job.nodes, watch.has_ended):
            prefix = _RANK_PREFIX.match(line)
            if prefix is None:
                say(line)
            elif prefix[1] == "0":
                say(line[prefix.end() :])
    return watch.status()


class Watch:
    """The state of a job, shared by threads: the scheduler is asked once a second, and again for minutes if silent."""

    def __init__(self, runner: Runner, handle: str, say: Say) -> None:
        self._runner = runner
        self._handle = handle
        self._say = say
        self._lock = threading.Lock()
        self._last: AppStatus | None = None
        self._asked: float | None = None

    def has_ended(self) -> bool:
        """Returns whether the job has ended, or the scheduler does not know it."""
        status = self.status()
        return status is None or status.is_terminal()

    def status(self) -> AppStatus | None:
        """Returns the job's state, which may be a second old; None where the scheduler does not know the job."""
        with self._lock:
            if self._asked is None or time.monotonic() - self._asked >= _POLL_SECONDS:
                self._last = self._ask()
                self._asked = time.monotonic()
            return self._last

    def _ask(self) -> AppStatus | None:
        """Asks the scheduler, again for minutes while it fails; once where the job runs on this machine."""
        is_here = self._handle.partition("://")[0] in LOCAL_SCHEDULERS
        deadline = time.monotonic() + (0 if is_here else _PATIENCE_SECONDS)
        while True:
            try:
                return self._runner.status(self._handle)
            except SignalException:
                raise
            except Exception as error:  # each scheduler's client has its own
                if time.monotonic() > deadline:
                    raise RunError(f"nothing is known of {self._handle} any longer: {error}") from error
                self._say(f"waiting for the scheduler: {error}")
                time.sleep(10 * _POLL_SECONDS)


def node_lines(
    job: Job, runner: Runner, nodes: Sequence[int], has_ended: Callable[[], bool] | None = None
) -> Iterator[str]:
    """Yields the lines of several nodes' logs as they come, each with its node's number where there are several.

    It reads until ``has_ended`` returns True; without ``has_ended``, the lines that exist. A node whose log cannot be
    read yields its error as a line; RunError if that is so for all nodes, and without ``has_ended``.
    """
    # one thread reads each node's log into the queue; None is the end of a log
    lines = queue.Queue[tuple[str, str] | None]()

    def read(node: int) -> None:
        try:
            for line in _node_log_lines(job, runner, node, has_ended):
                lines.put(("line", f"node {node}: {line}" if len(nodes) > 1 else line))
        except Exception as error:  # a node without a log must not hide other nodes' logs
            lines.put(("error", f"node {node}: {error}" if len(nodes) > 1 else str(error)))
        finally:
            lines.put(None)

    for node in nodes:
        threading.Thread(target=read, args=(node,), daemon=True).start()
    num_open, num_failed = len(nodes), 0
    while num_open:
        message = lines.get()
        if message is None:
            num_open -= 1
            continue
        kind, line = message
        num_failed += kind == "error"
        if num_failed == len(nodes) and has_ended is None:
            raise RunError(line)
        yield line


def _node_log_lines(job: Job, runner: Runner, node: int, has_ended: Callable[[], bool] | None) -> Iterator[str]:
    """Yields the lines of one node's log, each once.

    A stream that breaks off is read again from its start, without the lines that were seen. Another first line shows
    that the job has started again: then all lines are new. Without ``has_ended``, the log is read once.
    """
    first_line, num_seen, reported = "", 0, ""
    while True:
        try:
            for number, line in enumerate(_log(job, runner, node, should_tail=has_ended is not None)):
                if number == 0 and line != first_line:
                    first_line, num_seen = line, 0
                if number >= num_seen:
                    num_seen = number + 1
                    yield line.rstrip("\n")
        except Exception as error:
            if has_ended is None or has_ended():
                raise
            if str(error) != reported:
                reported = str(error)
                yield reported
        if has_ended is None or has_ended():
            return
        time.sleep(_REREAD_SECONDS)


def _log(job: Job, runner: Runner, node: int, should_tail: bool) -> Iterable[str]:
    """Returns the lines of one node's log, as the scheduler streams them."""
    if job.scheduler == "slurm":
        # the runner has no logs of a job that Slurm has forgotten
        scheduler = create_scheduler("", log_dir=job.options.get("log_dir") or str(job.folder / "logs"))
        return scheduler.log_iter(job.app_id, ROLE, node, should_tail=should_tail)
    return runner.log_lines(job.handle, ROLE, node, should_tail=should_tail)


def job_state(job: Job, runner: Runner) -> AppStatus | None:
    """Returns the state of a job's newest submission; None where the scheduler does not know the job."""
    with asking(job.scheduler):
        return runner.status(job.handle)


def run_progress(run_dir: Path) -> list[str]:
    """Returns status and last metrics that the run's folder records, as lines; [] before the run has started."""
    try:
        status = RunInfo.read(run_dir / "run.json").status
        # "unfinished" does not tell whether it runs: the job's state, printed with these lines, does
        lines = [f"run: {'running' if status == 'unfinished' else status}"]
        newest = last_metrics(run_dir / "metrics.jsonl")
    except (OSError, UserError):
        return []
    return lines if newest is None else [*lines, f"last metrics: {json.dumps(newest)}"]


def job_log_lines(job: Job, node: int | None, *, follow: bool, say: Say) -> Iterator[str]:
    """Yields the lines that one node, or all nodes, of a submitted job have printed; until its end with ``follow``."""
    if job.scheduler in LOCAL_SCHEDULERS:
        raise UserError(f"logs of {job.scheduler} are files, in {job.folder / 'logs'}.")
    handle, nodes = job.handle, job.nodes
    if node is not None and node not in nodes:
        raise UserError(f"--node is {node}; the nodes of {job.run_dir} are 0 to {len(nodes) - 1}.")
    with get_runner() as runner:
        has_ended = Watch(runner, handle, say).has_ended if follow else None
        yield from node_lines(job, runner, nodes if node is None else [node], has_ended)


def cancel_job(job: Job) -> None:
    """Asks the scheduler to end a job; refuses jobs on this machine, and jobs that do not run."""
    if job.scheduler in LOCAL_SCHEDULERS:
        raise UserError(f"{job.run_dir} runs under the command that launched it: press Ctrl-C there.")
    with get_runner() as runner:
        state = job_state(job, runner)
        if state is None or state.is_terminal():
            raise UserError(f"{job.run_dir} runs no longer: {state_text(state)}.")
        with asking(job.scheduler):
            runner.cancel(job.handle)


def require_ended(job: Job) -> None:
    """Refuses to submit a job again whose newest submission has not ended on its cluster."""
    if not job.submissions or job.scheduler in LOCAL_SCHEDULERS:
        return
    with get_runner() as runner:
        state = job_state(job, runner)
    if state is not None and not state.is_terminal():
        raise UserError(f"{job.run_dir} is {state_text(state)} ({job.app_id}); cancel it first, or let it be.")


@dataclass(frozen=True)
class Failure:
    """The error of a rank, in the file ``where``; ``time`` is in seconds since 1970."""

    where: Path
    message: str
    traceback: str
    time: float
    exit_code: int = 1


def first_failure(logs: Path, since: float = 0.0) -> Failure | None:
    """Returns the first error after ``since`` in the last start of a job, whose nodes log into ``logs``; or None.

    Errors that follow from another rank's death, like a lost connection, come after all other errors: clocks of
    machines differ, so times alone do not tell.
    """
    files = (file for node in sorted(logs.rglob("node-*")) for file in _error_files(node))
    failures = [failure for file in files if (failure := _read(file)) and failure.time >= since]

    def order(failure: Failure) -> tuple[bool, float]:
        return bool(_IS_CONSEQUENCE.search(failure.message)), failure.time

    return min(failures, key=order, default=None)


def _error_files(node: Path) -> Iterator[Path]:
    """Yields the error files of a node's last start, as torch names them: RUN/attempt_N/RANK/error.json."""
    yield from node.glob("error.json")
    starts = [folder for folder in node.iterdir() if folder.is_dir()]
    if starts:
        attempts = max(starts, key=lambda folder: folder.stat().st_mtime).glob("attempt_*")
        last_attempt = max(attempts, key=lambda folder: int(folder.name.removeprefix("attempt_")), default=None)
        yield from last_attempt.rglob("error.json") if last_attempt else ()


def _read(file: Path) -> Failure | None:
    """Reads the error that a rank or torch has written; None where the file is damaged."""
    try:
        noted: Any = json.loads(file.read_text())["message"]
        if isinstance(noted, str):
            return Failure(file, noted, "", file.stat().st_mtime)
        extra = noted.get("extraInfo", {})
        seconds = float(extra["time_ns"]) / 1e9 if "time_ns" in extra else float(extra.get("timestamp", 0))
        code = int(extra.get("exit_code", 1))
        return Failure(file, str(noted["message"]), str(extra.get("py_callstack", "")), seconds, code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
