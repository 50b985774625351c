"""Submitting a job to Slurm, and cancelling it so that it can save its state first."""

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from distembed.base.errors import RunError, UserError
from launch.schedulers.slurm.client import Completed, failure_reason, retry, run_command, without_prefixes
from launch.schedulers.slurm.queries import JobRecord, ask_controller
from launch.schedulers.slurm.script import CANCEL_SECONDS

_RUNNING = ("RUNNING", "SIGNALING", "RESIZING")
"""States in which a batch script receives a signal; the last two pass within moments."""
_OUTCOME_UNKNOWN = re.compile(r"timed out|Zero Bytes|reset by peer", re.IGNORECASE)
"""What a command prints that has put its question and got no answer."""


class OutcomeUnknown(RunError):
    """Slurm was handed a job, and has not said whether it has taken it."""


def submit(command: Sequence[str], script: str, name: str) -> str:
    """Submits a script and returns the number of its job.

    Args:
        command: The command ``sbatch`` with its options.
        script: The batch script, which the command reads from its standard input.
        name: Name of the job, to look for it where Slurm does not say whether it has accepted it.

    Raises:
        UserError: Slurm does not accept the job; the message holds its reason.
        RunError: Slurm cannot be reached.
        OutcomeUnknown: It has not answered.
    """
    remedy = f"It may have taken the job: look with `squeue --name={name}` before you try again"
    # "123;cluster" where there are several clusters
    return _sbatch(command, script, remedy).stdout.strip().partition(";")[0]


def expected_start(command: Sequence[str], script: str) -> str:
    """Returns what Slurm says of when and where it would start a job, which it does not submit.

    Raises:
        UserError: Slurm would not accept the job; the message holds its reason.
        RunError: Slurm cannot be reached, or has not answered.
    """
    printed = without_prefixes(_sbatch([*command, "--test-only"], script, "Try again later").stderr)
    return re.sub(r"^Job \d+ ", "", printed)


def cancel(job_id: str) -> int:
    """Cancels a job; one that has ended already is left as it is.

    A running job of :mod:`launch.schedulers.slurm.script` that needs time to save its state is only sent a signal:
    Slurm would kill it after the cluster's KillWait, half a minute as a rule. Its batch script cancels it when it has
    saved, or :data:`CANCEL_SECONDS` after its grace period. Cancelling it once more ends it at once.

    Returns:
        Seconds within which it ends; 0 where Slurm ends it at once.

    Raises:
        RunError: Slurm does not cancel it, or has not answered for :data:`~.client.PATIENCE_SECONDS`: the job goes on.
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
    """Signals a running job to save its state and to end.

    Returns:
        Seconds within which it ends; 0 where it cannot be signalled, or was signalled before.

    Raises:
        RunError: Slurm does not answer. As far as is known the job was not signalled; a second signal does no harm.
    """
    record = ask_controller(job_id)
    if record is None or record.state not in _RUNNING or record.output is None:
        return 0
    grace_seconds = _grace_seconds(job_id)
    return grace_seconds + CANCEL_SECONDS if grace_seconds and _signal(job_id, record.output) else 0


def _grace_seconds(job_id: str) -> int:
    """Returns how long a job may take to save its state, from its batch script; 0 for one that takes no signal.

    Raises:
        RunError: Slurm does not answer.
    """
    answer = run_command(["scontrol", "write", "batch_script", job_id, "-"])
    # A failure has no script and may still end with code 0. Of these, asking again would change nothing.
    if not answer.stdout and not re.search(r"Invalid|denied|not specified", answer.stderr):
        raise RunError(failure_reason(answer))
    found = re.search(r"^grace=(\d+)$", answer.stdout, re.MULTILINE)
    return int(found[1]) if found else 0


def _signal(job_id: str, output: Path) -> bool:
    """Signals a batch script to end its job, and leaves a file that says so.

    Returns:
        False where it was signalled before, or where the file cannot be written.

    Raises:
        RunError: Slurm does not deliver the signal. The file is removed then, so that it can be tried again.
    """
    # For the script that has not begun yet, as while Slurm prepares the node: that does not receive the signal.
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
    """Returns the file that lies beside a job's output while the job is being cancelled."""
    return output.with_suffix(".cancelled")


def _sbatch(command: Sequence[str], script: str, remedy: str) -> Completed:
    """Runs ``sbatch``; ``remedy`` ends the error where Slurm has not answered.

    Raises:
        UserError: Slurm does not accept the job.
        RunError: Slurm cannot be reached, or has not answered.
    """
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
    """Returns the environment without what describes the job that this process runs in; None where it runs in no job.

    Its limits, as SLURM_MEM_PER_CPU, would contradict those of the new job.
    """
    if "SLURM_JOB_ID" not in os.environ:
        return None
    kept = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT"}
    return {name: value for name, value in os.environ.items() if name in kept or not name.startswith("SLURM_")}
