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
from distembed.launch.schedulers.slurm import queries
from distembed.launch.schedulers.slurm.queries import JobRecord, query_job

ASK_SECONDS = 3.0
"""Seconds between two questions whether the job has ended."""
LOOK_SECONDS = 0.2
"""Seconds between two looks at the log."""
LATE_SECONDS = 2.0
"""Seconds that the last lines may take to reach this machine."""
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
    """Returns TorchX's state for Slurm's, like "CANCELLED by 0" or "COMPLETING+"; UNKNOWN for any other word."""
    word = re.match(r"[A-Z_]+", state.strip())
    return STATES.get(word[0], AppState.UNKNOWN) if word else AppState.UNKNOWN


@dataclass(frozen=True)
class Answer:
    """An answer of Slurm about a job.

    Attributes:
        record: Slurm's record of the job; None where the job surely does not exist.
        time: When Slurm answered, in seconds of the monotonic clock.
        heard: When the controller answered last; before its first answer, when accounting answered first.
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
        """TorchX's state of the job; UNKNOWN for an end that accounting alone reports while the controller is silent.

        After :data:`FOLLOW_PATIENCE_SECONDS` of silence, accounting is believed.
        """
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

    An answer, or a failure to answer, holds for :data:`ASK_SECONDS`. While the controller is silent a job counts as
    running; after :data:`FOLLOW_PATIENCE_SECONDS` accounting is believed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: dict[str, Answer] = {}
        self._failures: dict[str, tuple[float, RunError]] = {}
        self._host_names: dict[str, list[str]] = {}

    def answer(self, job_id: str) -> Answer:
        """Returns Slurm's answer about a job, or raises its RunError, from at most :data:`ASK_SECONDS` ago."""
        with self._lock:
            now = time.monotonic()
            failed, failure = self._failures.get(job_id, (-math.inf, None))
            if failure is not None and now - failed < ASK_SECONDS:
                raise RunError(str(failure)) from failure
            last_answer = self._answers.get(job_id)
            if last_answer is None or now - last_answer.time >= ASK_SECONDS:
                try:
                    self._answers[job_id] = _ask(job_id, last_answer)
                except RunError as error:
                    self._failures[job_id] = (time.monotonic(), error)
                    raise
            return self._answers[job_id]

    def has_ended(self, job_id: str) -> bool:
        """Returns whether a job has surely ended."""
        return self.answer(job_id).has_ended

    def host_names(self, nodes: str) -> list[str]:
        """Returns names of nodes from their short form, and asks Slurm once; [] where Slurm fails."""
        with self._lock:
            if not self._host_names.get(nodes):
                self._host_names[nodes] = queries.host_names(nodes)
            return self._host_names[nodes]


def _ask(job_id: str, last_answer: Answer | None) -> Answer:
    """Returns a new answer of Slurm about a job, given the ``last_answer`` one, None at the first question.

    A silent controller leaves the last record, marked as uncertain; RunError after :data:`FOLLOW_PATIENCE_SECONDS` of
    silence, unless the controller has reported the job's end before.
    """
    if last_answer is None:
        record = query_job(job_id)
        now = time.monotonic()
        return Answer(record, now, heard=now)
    # an end that the controller has reported remains while it is silent
    is_over = last_answer.is_certain and last_answer.has_ended
    try:
        record = query_job(job_id, patience_seconds=0)
    except RunError:
        if last_answer.silent_seconds >= FOLLOW_PATIENCE_SECONDS and not is_over:
            raise
        silence = "the controller does not answer"
        record = None if last_answer.record is None else replace(last_answer.record, reason=silence, is_certain=False)
    now = time.monotonic()
    if record is None or record.is_certain:
        return Answer(record, now, heard=now)
    return replace(last_answer, time=now) if is_over else Answer(record, now, last_answer.heard)


followed_jobs = FollowedJobs()
"""The answers of this process: TorchX gives each thread that follows a job a scheduler of its own."""


def log_lines(path: Path, has_ended: Callable[[], bool] | None, remedy: str) -> Iterator[str]:
    """Yields the lines of a log with their ends, until ``has_ended`` returns True; only the present lines without it.

    The log need not exist yet: a job may wait long. ``remedy`` ends the error where it never does.
    """
    running = iter([False, False]) if has_ended is None else _is_running(has_ended)
    while not path.is_file() and next(running):
        time.sleep(LOOK_SECONDS)
    if not path.is_file():
        raise RunError(f"there is no log {path}. {remedy}")
    # newline: the carriage returns of a progress bar are kept
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        line = ""
        # the end is asked for before each reading: after the end, the log is read once more
        for is_running in running:
            for text in file:
                line += text
                if line.endswith("\n"):
                    yield line
                    line = ""
            if not is_running:
                break
            time.sleep(LOOK_SECONDS)
        if line:
            yield line


def _is_running(has_ended: Callable[[], bool]) -> Iterator[bool]:
    """Yields True until the job has ended, then False; calls ``has_ended`` every :data:`ASK_SECONDS` at most.

    Before the first False it waits :data:`LATE_SECONDS`, in which the last lines of a log reach this machine.
    """
    last_asked = None
    while True:
        if last_asked is None or time.monotonic() - last_asked >= ASK_SECONDS:
            if has_ended():
                break
            last_asked = time.monotonic()
        yield True
    time.sleep(LATE_SECONDS)
    while True:
        yield False
