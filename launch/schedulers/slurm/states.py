"""Follows a job: TorchX's words for Slurm's states, answers while the controller is silent, and the job's log."""

import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from torchx.schedulers import slurm_scheduler
from torchx.specs import AppState, is_terminal

from distembed.base.errors import RunError
from launch.schedulers.slurm import queries
from launch.schedulers.slurm.queries import JobRecord, query_job

ASK_SECONDS = 3.0
"""Seconds between two questions whether the job has ended."""
LOOK_SECONDS = 0.2
"""Seconds between two looks at the log."""
LATE_SECONDS = 2.0
"""Seconds that lines may take to be seen here after the job has ended."""
FOLLOW_PATIENCE_SECONDS = 600.0
"""How long a job is followed while the controller does not answer; then accounting is believed."""

STATES = {
    **slurm_scheduler.SLURM_STATES,
    # Unknown to TorchX. A completing job's processes are still being ended.
    "COMPLETING": AppState.RUNNING,
    "SIGNALING": AppState.RUNNING,
    "STAGE_OUT": AppState.RUNNING,
    "CONFIGURING": AppState.PENDING,
    "REQUEUE_FED": AppState.PENDING,
    "REQUEUE_HOLD": AppState.PENDING,
    "RESV_DEL_HOLD": AppState.PENDING,
    "SPECIAL_EXIT": AppState.PENDING,
    "STOPPED": AppState.PENDING,
}
"""TorchX's state of each of Slurm's."""


def app_state(state: str) -> AppState:
    """Returns TorchX's state for one of Slurm's, as "CANCELLED by 0" or "COMPLETING+"; UNKNOWN for any other word."""
    word = re.match(r"[A-Z_]+", state.strip())
    return STATES.get(word[0], AppState.UNKNOWN) if word else AppState.UNKNOWN


@dataclass(frozen=True)
class Answer:
    """An answer of Slurm about a job.

    Attributes:
        record: Slurm's record of the job; None where it surely knows no such job.
        time: When it answered, in seconds of the monotonic clock.
        heard: When the controller answered last; where it never did, when accounting did first.
    """

    record: JobRecord | None
    time: float
    heard: float

    @property
    def is_certain(self) -> bool:
        """Whether the controller has answered, or accounting about a job that the controller has forgotten."""
        return self.record is None or self.record.is_certain

    @property
    def silent_seconds(self) -> float:
        """How long the controller has not answered, in seconds."""
        return self.time - self.heard

    @property
    def state(self) -> AppState:
        """TorchX's state of the job; UNKNOWN for an end that only accounting knows of, until it is believed."""
        if self.record is None:
            return AppState.UNKNOWN
        state = app_state(self.record.state)
        is_believed = self.is_certain or self.silent_seconds >= FOLLOW_PATIENCE_SECONDS
        return state if is_believed or not is_terminal(state) else AppState.UNKNOWN

    @property
    def has_ended(self) -> bool:
        """Whether the job has surely ended."""
        return self.record is None or is_terminal(self.state)


class FollowedJobs:
    """Slurm's answers about jobs, shared by all threads that read their logs.

    An answer holds for :data:`ASK_SECONDS`, and so does a failure to answer. While the controller is silent a job
    counts as running, even if accounting says that it has ended; after :data:`FOLLOW_PATIENCE_SECONDS` accounting is
    believed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: dict[str, Answer] = {}
        self._failures: dict[str, tuple[float, RunError]] = {}
        self._host_names: dict[str, list[str]] = {}

    def answer(self, job_id: str) -> Answer:
        """Returns Slurm's answer about a job, which may be some seconds old."""
        with self._lock:
            now = time.monotonic()
            failed, failure = self._failures.get(job_id, (-math.inf, None))
            if failure is not None and now - failed < ASK_SECONDS:
                raise RunError(str(failure)) from failure
            last = self._answers.get(job_id)
            if last is None or now - last.time >= ASK_SECONDS:
                try:
                    self._answers[job_id] = _ask(job_id, last)
                except RunError as error:
                    self._failures[job_id] = (time.monotonic(), error)
                    raise
            return self._answers[job_id]

    def has_ended(self, job_id: str) -> bool:
        """Returns whether a job has surely ended; raises as :meth:`answer` does."""
        return self.answer(job_id).has_ended

    def host_names(self, nodes: str) -> list[str]:
        """Returns names of nodes from their short form, for which Slurm is asked once; [] where it does not know."""
        with self._lock:
            if not self._host_names.get(nodes):
                self._host_names[nodes] = queries.host_names(nodes)
            return self._host_names[nodes]


def _ask(job_id: str, last: Answer | None) -> Answer:
    """Asks Slurm about a job, after the answer ``last``; None for none before."""
    if last is None:
        record = query_job(job_id)
        now = time.monotonic()
        return Answer(record, now, heard=now)
    # an end of which the controller has spoken stays one while it is silent
    is_over = last.is_certain and last.has_ended
    try:
        record = query_job(job_id, patience_seconds=0)
    except RunError:
        if last.silent_seconds >= FOLLOW_PATIENCE_SECONDS and not is_over:
            raise
        silence = "the controller does not answer"
        record = None if last.record is None else replace(last.record, reason=silence, is_certain=False)
    now = time.monotonic()
    if record is None or record.is_certain:
        return Answer(record, now, heard=now)
    return replace(last, time=now) if is_over else Answer(record, now, last.heard)


followed_jobs = FollowedJobs()
"""The answers that this process has: TorchX gives each thread that follows a job a scheduler of its own."""


def log_lines(path: Path, has_ended: Callable[[], bool] | None, remedy: str) -> Iterator[str]:
    """Yields the lines of a log, each with its end; the last may have none.

    Args:
        path: The log, which need not be there yet: a job may wait long.
        has_ended: Whether the job has ended; None to read only the present lines.
        remedy: End of the error where there is no log.
    """
    running = iter([False, False]) if has_ended is None else _is_running(has_ended)
    while not path.is_file() and next(running):
        time.sleep(LOOK_SECONDS)
    if not path.is_file():
        raise RunError(f"there is no log {path}. {remedy}")
    # newline: a progress bar's carriage returns are handed on
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        begun = ""
        # Asked before the log is read: lines that a job has written before its end are read after that end.
        for more in running:
            for text in file:
                begun += text
                if begun.endswith("\n"):
                    yield begun
                    begun = ""
            if not more:
                break
            time.sleep(LOOK_SECONDS)
        if begun:
            yield begun


def _is_running(has_ended: Callable[[], bool]) -> Iterator[bool]:
    """Yields True until the job has ended, then False; it asks only now and then, which is work for the scheduler."""
    asked = None
    while True:
        if asked is None or time.monotonic() - asked >= ASK_SECONDS:
            if has_ended():
                break
            asked = time.monotonic()
        yield True
    time.sleep(LATE_SECONDS)
    while True:
        yield False
