"""What can be done with a job that was launched: see its state and its logs, end it, or make sure that it has ended."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchx.runner import Runner, get_runner

from distembed.base.errors import UserError
from distembed.training.run_folder.record import RunInfo, last_metrics
from launch.jobs.asking import asking
from launch.jobs.follow import Say, Watch, node_lines, state_text
from launch.jobs.job import LOCAL_SCHEDULERS, Job


@dataclass(frozen=True)
class JobState:
    """What a scheduler knows of the newest submission of a job.

    Attributes:
        text: The state in words, with the scheduler's message where there is one.
        is_known: Whether anything is known of the job. Nothing is known of one that its scheduler has forgotten.
        is_active: Whether the scheduler says that the job waits or runs.
    """

    text: str
    is_known: bool
    is_active: bool


def job_state(job: Job) -> JobState:
    """Returns the state of a job's newest submission.

    Raises:
        UserError: The job was never submitted.
        RunError: The scheduler cannot be asked.
    """
    with get_runner() as runner:
        return _state(job, runner)


def run_progress(run_dir: Path) -> list[str]:
    """Returns lines that say how far a run has come by its own record; none where it has not started."""
    try:
        status = RunInfo.read(run_dir / "run.json").status
        # whether it goes on is what the job's own state says, which stands beside these lines
        lines = [f"run: {'running' if status == 'unfinished' else status}"]
        newest = last_metrics(run_dir / "metrics.jsonl")
    except (OSError, UserError):
        return []
    return lines if newest is None else [*lines, f"last metrics: {json.dumps(newest)}"]


def job_log_lines(job: Job, node: int | None, *, follow: bool, say: Say) -> Iterator[str]:
    """Yields the lines that the nodes of a job have printed.

    Args:
        job: The job, which was submitted.
        node: Number of the only node whose lines are read; None for every node.
        follow: Whether to continue until the job has ended.
        say: Prints the scheduler's errors while it does not answer.

    Raises:
        UserError: The job's logs are files on this machine, it was never submitted, or it has no such node.
        RunError: There are no logs.
    """
    if job.scheduler in LOCAL_SCHEDULERS:
        raise UserError(f"logs of {job.scheduler} are files, in {job.folder / 'logs'}.")
    handle, nodes = job.handle, job.nodes
    if node is not None and node not in nodes:
        raise UserError(f"--node is {node}; the nodes of {job.run_dir} are 0 to {len(nodes) - 1}.")
    with get_runner() as runner:
        has_ended = Watch(runner, handle, say).has_ended if follow else None
        yield from node_lines(job, runner, nodes if node is None else [node], has_ended)


def cancel_job(job: Job) -> None:
    """Asks the scheduler to end a job.

    Raises:
        UserError: The job ends with the command that launched it, it was never submitted, or it runs no longer.
        RunError: The scheduler cannot be asked.
    """
    if job.scheduler in LOCAL_SCHEDULERS:
        raise UserError(f"{job.run_dir} runs under the command that launched it: press Ctrl-C there.")
    with get_runner() as runner:
        state = _state(job, runner)
        if not state.is_active:
            raise UserError(f"{job.run_dir} runs no longer: {state.text}.")
        with asking(job.scheduler):
            runner.cancel(job.handle)


def require_ended(job: Job) -> None:
    """Makes sure that a job does not run, so that it may be submitted again.

    Raises:
        UserError: The scheduler says that the job waits or runs.
        RunError: The scheduler cannot be asked.
    """
    if not job.submissions or job.scheduler in LOCAL_SCHEDULERS:
        return
    state = job_state(job)
    if state.is_active:
        raise UserError(f"{job.run_dir} is {state.text} ({job.app_id}); cancel it first, or let it be.")


def _state(job: Job, runner: Runner) -> JobState:
    """Returns the state of a job's newest submission; see :func:`job_state`."""
    with asking(job.scheduler):
        status = runner.status(job.handle)
    if status is not None:
        return JobState(state_text(status), is_known=True, is_active=not status.is_terminal())
    if job.scheduler in LOCAL_SCHEDULERS:  # known only to the command that launched it
        return JobState("launched on this machine", is_known=True, is_active=False)
    return JobState("unknown", is_known=False, is_active=False)
