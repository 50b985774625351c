"""Asks schedulers about jobs: the package that each needs, its errors, and jobs found by their names.

Before a job is submitted its run folder notes a name that no other job of the scheduler has. A process that submits a
job may die before the scheduler answers; the next process finds the job by its name.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from torchx import specs
from torchx.runner import Runner

from distembed.base.errors import RunError, UserError
from distembed.launch.schedulers.slurm.queries import find_job

_PACKAGES = {"kubernetes": "kubernetes", "aws_batch": "boto3", "ray": "ray"}
"""The package that only one scheduler needs; distembed's extra of the scheduler's name installs it."""


def require_package(scheduler: str, *, dry_run: bool) -> None:
    """Makes sure that the package of this scheduler is installed; a dry run for AWS Batch needs none."""
    package = _PACKAGES.get(scheduler)
    if package and not (dry_run and scheduler == "aws_batch") and find_spec(package) is None:
        raise UserError(
            f"--scheduler {scheduler} needs the package {package}, which is not installed: run "
            f"{sys.executable} -m pip install 'distembed[{scheduler}]'."
        )


@contextmanager
def asking(scheduler: str) -> Iterator[None]:
    """Turns errors of a scheduler's client in the block into UserError (refused job) or RunError (any other)."""
    try:
        yield
    except (UserError, RunError):
        raise
    except specs.InvalidRunConfigException as error:
        raise UserError(f"the scheduler {scheduler} does not take this job: {error}") from error
    except Exception as error:
        raise RunError(f"{scheduler} cannot be used: {type(error).__name__}: {error}") from error


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
    """Returns the name by which a scheduler finds a job that is being submitted: Slurm's name, or TorchX's id.

    It is None for schedulers of this machine, whose jobs end with the process that submits them.
    """
    return _NAMES[scheduler](dryrun_info) if scheduler in _NAMES else None


def find_handle(scheduler: str, name: str, runner: Runner) -> str | None:
    """Returns TorchX's handle of the job of a name; None where the scheduler has no job of this name."""
    app_id = find_job(name) if scheduler == "slurm" else name
    handle = None if app_id is None else str(specs.make_app_handle(scheduler, "torchx", app_id))
    return handle if handle is None or scheduler == "slurm" or runner.status(handle) is not None else None
