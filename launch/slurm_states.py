"""What Slurm's states mean to TorchX, and what is known of jobs that are followed, while the controller may be busy."""

import re
import threading
import time
from dataclasses import dataclass

from torchx.schedulers import slurm_scheduler
from torchx.specs import AppState, is_terminal

from distembed.errors import RunError
from launch import slurm_commands
from launch.log_lines import ASK_SECONDS
from launch.slurm_commands import JobRecord

STATES = {
    **slurm_scheduler.SLURM_STATES,
    # Those that TorchX does not know. A completing job's processes are still being ended.
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

FOLLOW_PATIENCE_SECONDS = 600.0
"""How long a job is followed while the controller does not answer; then accounting has the word."""


def app_state(state: str) -> AppState:
    """TorchX's state for one of Slurm's, such as "CANCELLED by 0" or "COMPLETING+"; UNKNOWN for any other word."""
    word = re.match(r"[A-Z_]+", state.strip())
    return STATES.get(word[0], AppState.UNKNOWN) if word else AppState.UNKNOWN


class FollowedJobs:
    """What Slurm says of jobs whose logs are read: all who read together ask once in :data:`ASK_SECONDS`.

    A job that cannot be asked after has not ended, as far as is known; neither has one of which only accounting speaks.
    After :data:`FOLLOW_PATIENCE_SECONDS` accounting is believed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: dict[str, _Answer] = {}

    def record(self, job_id: str) -> JobRecord | None:
        """What is known of a job, which may be some seconds old; None where there is no such job.

        Raises:
            RunError: Slurm has not answered for minutes.
        """
        return self._answer(job_id).record

    def has_ended(self, job_id: str) -> bool:
        """Whether a job has surely ended.

        Raises:
            RunError: Slurm has not answered for minutes.
        """
        answer = self._answer(job_id)
        is_believed = answer.is_certain or answer.silent_seconds >= FOLLOW_PATIENCE_SECONDS
        return is_believed and (answer.record is None or is_terminal(app_state(answer.record.state)))

    def _answer(self, job_id: str) -> "_Answer":
        with self._lock:
            last = self._answers.get(job_id)
            if last is None or time.monotonic() - last.time >= ASK_SECONDS:
                self._answers[job_id] = self._ask(job_id, last)
            return self._answers[job_id]

    def _ask(self, job_id: str, last: "_Answer | None") -> "_Answer":
        try:
            record = slurm_commands.find_job(job_id, None if last is None else 0)
            is_certain = record is None or record.is_certain
        except RunError:
            if last is None or last.silent_seconds >= FOLLOW_PATIENCE_SECONDS:
                raise
            record, is_certain = last.record, False
        now = time.monotonic()
        return _Answer(now, record, is_certain, heard=now if is_certain or last is None else last.heard)


@dataclass(frozen=True)
class _Answer:
    """What was said of a job, when, whether by the controller, and when that was heard last."""

    time: float
    record: JobRecord | None
    is_certain: bool
    heard: float

    @property
    def silent_seconds(self) -> float:
        """How long the controller has not answered."""
        return self.time - self.heard


followed_jobs = FollowedJobs()
"""Of this process: TorchX gives threads that follow one job schedulers of their own."""
