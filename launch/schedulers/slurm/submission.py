"""Submitting a job to Slurm, and cancelling it so that it can save its state first."""

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from distembed.base.errors import RunError, UserError
from distembed.launch.schedulers.slurm.queries import (
    Completed,
    JobRecord,
    ask_controller,
    failure_reason,
    retry,
    run_command,
    without_prefixes,
)
from distembed.launch.schedulers.slurm.script import CANCEL_SECONDS

_RUNNING = ("RUNNING", "SIGNALING", "RESIZING")
"""States in which a batch script receives a signal; the last two pass within moments."""
_OUTCOME_UNKNOWN = re.compile(r"timed out|Zero Bytes|reset by peer", re.IGNORECASE)
"""Messages of a command without an answer of the controller."""


class OutcomeUnknown(RunError):
    """Slurm has not answered whether it has taken a job."""


def submit(command: Sequence[str], script: str, name: str) -> str:
    """Submits a script by the command ``sbatch``, and returns the number of the job, whose name is for the error.

    Raises:
        UserError: Slurm does not accept the job; the message holds its reason.
        RunError: Slurm cannot be reached.
        OutcomeUnknown: Slurm has not answered.
    """
    remedy = f"It may have taken the job: look with `squeue --name={name}` before you try again"
    # "123;cluster" where there are several clusters
    return _sbatch(command, script, remedy).stdout.strip().partition(";")[0]


def expected_start(command: Sequence[str], script: str) -> str:
    """Returns Slurm's text on when and where it would start a job, and submits nothing."""
    printed = without_prefixes(_sbatch([*command, "--test-only"], script, "Try again later").stderr)
    return re.sub(r"^Job \d+ ", "", printed)


def cancel(job_id: str) -> int:
    """Cancels a job, unless it has ended; returns the seconds within which it ends, 0 for at once.

    A running job of :mod:`~distembed.launch.schedulers.slurm.script` that needs time to save its state is only sent a
    signal: by ``scancel`` Slurm would kill it after the cluster's KillWait, usually 30 seconds. Its batch script
    cancels it when it has saved, or :data:`CANCEL_SECONDS` after its grace period. A second call ends it at once.
    """
    try:
        seconds = retry(lambda: _request_end(job_id))
    except RunError as error:
        raise RunError(
            f"job {job_id} was not cancelled, because Slurm does not answer: {error}. Try again, or "
            f"`scancel {job_id}` ends it without saving"
        ) from error
    if seconds:
        return seconds
    answer = run_command(["scancel", job_id])
    if answer.returncode and "already completing or completed" not in answer.stderr:
        raise RunError(f"job {job_id} was not cancelled: {failure_reason(answer)}")
    return 0


def is_being_cancelled(record: JobRecord) -> bool:
    """Returns whether a job was cancelled by :func:`cancel` and is still saving its state."""
    return record.output is not None and os.path.exists(_cancelled_file(record.output))


def _request_end(job_id: str) -> int:
    """Signals a running job to save its state, and returns the seconds that it has.

    0 means that nothing was sent: the job does not run, has nothing to save, or was signalled before.
    """
    record = ask_controller(job_id)
    if record is None or record.state not in _RUNNING or record.output is None:
        return 0
    grace_seconds = _grace_seconds(job_id)
    return grace_seconds + CANCEL_SECONDS if grace_seconds and _signal(job_id, record.output) else 0


def _grace_seconds(job_id: str) -> int:
    """Returns how long a job may take to save its state, from its batch script; 0 for one that takes no signal."""
    answer = run_command(["scontrol", "write", "batch_script", job_id, "-"])
    # Without a script the command has failed, also with code 0. After these messages it would fail again.
    if not answer.stdout and not re.search(r"Invalid|denied|not specified", answer.stderr):
        raise RunError(failure_reason(answer))
    matched = re.search(r"^grace=(\d+)$", answer.stdout, re.MULTILINE)
    return int(matched[1]) if matched else 0


def _signal(job_id: str, output: Path) -> bool:
    """Signals a batch script to end its job; returns False where it was signalled before, or a file cannot be written.

    The file ``slurm-JOB.cancelled`` records the request: it reaches a script that has not begun yet, and makes a second
    call return False. It is removed where Slurm does not deliver the signal.
    """
    cancelled = _cancelled_file(output)
    try:
        cancelled.touch(exist_ok=False)
    except OSError:
        return False
    is_sent = False
    try:
        answer = run_command(["scancel", "--batch", "--signal=USR2", job_id])
        is_sent = not answer.returncode
    finally:
        if not is_sent:
            with contextlib.suppress(OSError):
                cancelled.unlink(missing_ok=True)
    if not is_sent:
        raise RunError(failure_reason(answer))
    return True


def _cancelled_file(output: Path) -> Path:
    """Returns the file next to a job's output that exists while the job is being cancelled."""
    return output.with_suffix(".cancelled")


def _sbatch(command: Sequence[str], script: str, remedy: str) -> Completed:
    """Runs ``sbatch``; ``remedy`` ends the error where Slurm has not answered."""
    answer = run_command(command, stdin=script, environment=_environment_outside_jobs())
    if answer.returncode:
        reason = failure_reason(answer)
        if "ontact slurm controller" in reason or "Connection refused" in reason:
            raise RunError(f"the job was not submitted, because Slurm cannot be reached: {reason}")
        if _OUTCOME_UNKNOWN.search(reason):
            raise OutcomeUnknown(f"Slurm has not answered: {reason}. {remedy}")
        raise UserError(f"Slurm does not accept the job: {reason}")
    return answer


def _environment_outside_jobs() -> dict[str, str] | None:
    """Returns the environment without variables of the job that this process runs in; None outside of jobs.

    Limits like SLURM_MEM_PER_CPU would contradict the new job's.
    """
    if "SLURM_JOB_ID" not in os.environ:
        return None
    for_clients = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT"}
    return {name: value for name, value in os.environ.items() if name in for_clients or not name.startswith("SLURM_")}
