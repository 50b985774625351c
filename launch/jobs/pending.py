"""A submission of which it is not known whether its scheduler has it: the process that submitted it has died.

Before a job is submitted its run folder notes the name that it will have there, which no other job has. So whoever asks
about the run later, finds the job again, or learns that there is none.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from torchx.runner import Runner, get_runner
from torchx.specs import make_app_handle

from distembed.base.errors import RunError
from launch.schedulers.slurm.queries import find_job

if TYPE_CHECKING:
    from launch.jobs.job import Job

SETTLE_SECONDS = 60
"""How long a submission may still be on its way to the scheduler after the process that began it has died."""


def _kubernetes_name(dryrun_info: Any) -> str:
    namespace = dryrun_info._cfg.get("namespace") or "default"
    return f"{namespace}:{dryrun_info.request.resource['metadata']['name']}"


_NAMES: dict[str, Callable[[Any], str]] = {
    "slurm": lambda info: info.request.full_name,
    "kubernetes": _kubernetes_name,
    "aws_batch": lambda info: f"{info.request.queue}:{info.request.name}",
    "ray": lambda info: f"{info.request.dashboard_address}-{info.request.app_id}",
}


def planned_name(scheduler: str, dryrun_info: Any) -> str | None:
    """Returns the name by which a scheduler can be asked for a job that is about to be submitted.

    Args:
        scheduler: Name of the scheduler.
        dryrun_info: What TorchX is about to submit.

    Returns:
        Slurm's name of the job, or TorchX's id of it; None where the scheduler cannot be asked by a name, or its jobs
        end with the process that submits them.
    """
    return _NAMES[scheduler](dryrun_info) if scheduler in _NAMES else None


def find_handle(scheduler: str, name: str, runner: Runner) -> str | None:
    """Returns TorchX's handle of the job of a name; None where the scheduler has no such job.

    Raises:
        RunError: Slurm does not answer. Clients of other schedulers have errors of their own.
    """
    app_id = find_job(name) if scheduler == "slurm" else name
    handle = None if app_id is None else str(make_app_handle(scheduler, "torchx", app_id))
    return handle if handle is None or scheduler == "slurm" or runner.status(handle) is not None else None


def settled(job: "Job") -> "Job":
    """Returns the job with what has become of a submission whose process has died before it could note it.

    Raises:
        UserError: The process has not died: the job is being submitted.
        RunError: The scheduler cannot be asked, or the submission may still be on its way.
    """
    if not job.submissions or job.submissions[-1].handle:
        return job
    with job.locked():
        job = job.reread()
        last = job.submissions[-1]
        if last.handle:
            return job
        with get_runner() as runner:
            handle = job.find_pending(runner)
        seconds = (datetime.now(UTC) - datetime.fromisoformat(last.time)).total_seconds()
        if handle is None and seconds < SETTLE_SECONDS:
            raise RunError(
                f"{job.run_dir} was being submitted {seconds:.0f} s ago by a process that is gone, and {job.scheduler} "
                f"has no such job yet; try again in {SETTLE_SECONDS - seconds:.0f} s."
            )
        return job.with_outcome(handle)
