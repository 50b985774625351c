"""What a job says while it runs, and why it failed: the traceback of the rank that failed first."""

import json
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchx.runner import Runner
from torchx.schedulers.local_scheduler import SignalException
from torchx.specs import NONE, AppState, AppStatus

from distembed.errors import Interrupted, RunError
from launch.job import LOCAL, Job
from launch.shape import parse_shape

Say = Callable[[str], None]
"""Prints a line."""
ROLE = "train"
"""Of the component that trains."""
_POLL_SECONDS = 1.0
_PATIENCE_SECONDS = 300.0
_NOT_STARTED = (AppState.PENDING, AppState.SUBMITTED, AppState.UNSUBMITTED)
_OF_RANK_0 = re.compile(r"^(node \d+: )?\[rank 0\]:")
_OF_OTHER_RANKS = re.compile(r"\[rank [1-9]\d*\]:")
# What a rank says when another one has gone.
_IS_CONSEQUENCE = re.compile(
    r"^(DistBackendError|DistNetworkError|DistStoreError|Rendezvous\w*|SignalException)\b"
    r"|Connection (closed|reset) by peer|Broken pipe|\bnccl\w*Error\b"
)


@dataclass(frozen=True)
class Failure:
    """How the rank that failed first did.

    Attributes:
        where: file that says so; its folder is that of the node's logs.
        message: the error.
        traceback: of Python; "" where there is none.
        time: seconds since 1970.
    """

    where: Path
    message: str
    traceback: str
    time: float


def submit_and_follow(job: Job, runner: Runner, *, detach: bool, say: Say) -> None:
    """Hands a job to its scheduler, and follows it unless that is not wanted.

    Raises:
        RunError: It has failed.
        Interrupted: Ctrl-C. A job on this machine has ended with it, any other goes on.
    """
    started = time.time()
    job = job.submit(runner)
    say(f"submitted: {job.scheduler} {job.app_id}, run folder {job.run_dir}")
    if detach:
        say(f"follow it with `distembed logs {job.run_dir} --follow`")
        return
    try:
        ended = follow(runner, job.handle, ROLE, parse_shape(job.j).max_nodes, say)
    except (KeyboardInterrupt, SignalException) as error:
        if job.scheduler not in LOCAL:
            raise Interrupted(
                f"not followed any longer. The job {job.app_id} goes on: `distembed logs {job.run_dir} --follow` shows "
                f"it, `distembed cancel {job.run_dir}` ends it."
            ) from error
        say("ending the job, which saves a checkpoint first")
        runner.cancel(job.handle)
        raise Interrupted(f"the job has ended; go on with `distembed resume {job.run_dir}`.") from error
    if ended is not None and ended.state == AppState.SUCCEEDED:
        say(f"run {job.run_dir}")
        return
    if ended is None or ended.state != AppState.CANCELLED:
        _say_failure(job, started, say)
    raise RunError(
        f"the job {job.app_id} has ended: {'its state is not known' if ended is None else state_text(ended)}. Logs are "
        f"in {job.folder / 'logs'}; go on with `distembed resume {job.run_dir}`."
    )


def _say_failure(job: Job, started: float, say: Say) -> None:
    logs = job.folder / "logs"
    own = logs / job.app_id.rpartition(":")[2]  # Kubernetes puts its namespace before the name
    failure = first_failure(own) if own.is_dir() else first_failure(logs, since=started)
    if failure is not None:
        say(f"first to fail: {failure.message} ({failure.where})")
        say(failure.traceback.rstrip())


def state_text(status: AppStatus) -> str:
    """A job's state, with what its scheduler says of it."""
    msg = "" if status.msg in ("", NONE) else f": {status.msg}"
    return f"{status.state.name.lower()}{msg}"


def follow(runner: Runner, handle: str, role: str, num_nodes: int, say: Say) -> AppStatus | None:
    """Prints what rank 0 and the launchers print until the job has ended; its state then, None where none is known.

    Args:
        runner: of TorchX.
        handle: of the job.
        role: whose replicas are followed.
        num_nodes: how many there are. Rank 0 may be on any of them: nodes are numbered anew as they meet.
        say: takes a line.
    """
    said = None
    while (status := _status(runner, handle, say)) is not None and status.state in _NOT_STARTED:
        if status.msg != said:
            say(f"waiting: {status.msg or status.state.name.lower()}")
            said = status.msg
        time.sleep(_POLL_SECONDS)
    while status is not None and not status.is_terminal():
        for line in node_lines(runner, handle, role, range(num_nodes), should_tail=True):
            if not _OF_OTHER_RANKS.search(line):
                say(_OF_RANK_0.sub("", line))
        time.sleep(_POLL_SECONDS)
        status = _status(runner, handle, say)
    return status


def _status(runner: Runner, handle: str, say: Say) -> AppStatus | None:
    """The job's state; a scheduler elsewhere that does not answer is asked again for some minutes."""
    is_here = handle.partition("://")[0] in LOCAL
    deadline = time.monotonic() + (0 if is_here else _PATIENCE_SECONDS)
    while True:
        try:
            return runner.status(handle)
        except Exception as error:  # each scheduler's client has its own
            if time.monotonic() > deadline:
                raise RunError(f"nothing is known of {handle} any longer: {error}") from error
            say(f"waiting for the scheduler: {error}")
            time.sleep(10 * _POLL_SECONDS)


def node_lines(runner: Runner, handle: str, role: str, nodes: Sequence[int], should_tail: bool) -> Iterator[str]:
    """Lines of several nodes' logs as they come, each with its node's number where there are several.

    Args:
        runner: of TorchX.
        handle: of the job.
        role: whose replicas they are.
        nodes: their numbers.
        should_tail: whether to go on until the job has ended.
    """
    lines = queue.Queue[str | None]()

    def read(node: int) -> None:
        prefix = f"node {node}: " if len(nodes) > 1 else ""
        try:
            for line in runner.log_lines(handle, role, node, should_tail=should_tail):
                lines.put(prefix + line.rstrip("\n"))
        except Exception as error:  # a node without a log is no reason to lose sight of the others
            lines.put(f"{prefix}{error}")
        finally:
            lines.put(None)

    for node in nodes:
        threading.Thread(target=read, args=(node,), daemon=True).start()
    num_open = len(nodes)
    while num_open:
        line = lines.get()
        if line is None:
            num_open -= 1
        else:
            yield line


def first_failure(logs: Path, since: float = 0.0) -> Failure | None:
    """The error that ranks have noted in a run's logs first; None where none has.

    One that only says that another rank has gone comes after all others: clocks of machines differ.

    Args:
        logs: folder of all nodes' logs.
        since: seconds since 1970; errors of earlier starts are left out.
    """
    found = [failure for file in logs.rglob("error.json") if (failure := _read(file)) and failure.time >= since]
    return min(found, key=lambda one: (bool(_IS_CONSEQUENCE.search(one.message)), one.time), default=None)


def _read(file: Path) -> Failure | None:
    try:
        noted: Any = json.loads(file.read_text())["message"]
        if isinstance(noted, str):
            return Failure(file, noted, "", file.stat().st_mtime)
        extra = noted.get("extraInfo", {})
        seconds = float(extra["time_ns"]) / 1e9 if "time_ns" in extra else float(extra.get("timestamp", 0))
        return Failure(file, str(noted["message"]), str(extra.get("py_callstack", "")), seconds)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
