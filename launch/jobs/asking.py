"""What is said of a scheduler that cannot be asked, or not from here."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from torchx import specs

from distembed.base.errors import RunError, UserError

_PACKAGES = {
    "kubernetes": ("kubernetes", "tools/setup.sh kubernetes"),
    "aws_batch": ("boto3", "tools/setup.sh aws_batch"),
    "ray": ("ray", f"{sys.executable} -m pip install 'ray[default]'"),
}
"""The package that only one scheduler needs, and the command that installs it."""


def require_package(scheduler: str, *, dry_run: bool) -> None:
    """Makes sure that the package is installed which only this scheduler needs; AWS Batch needs its to submit only.

    Raises:
        UserError: It is not; the message has the command that installs it.
    """
    package, command = _PACKAGES.get(scheduler, ("", ""))
    if package and not (dry_run and scheduler == "aws_batch") and find_spec(package) is None:
        raise UserError(f"--scheduler {scheduler} needs the package {package}, which is not installed: run {command}.")


@contextmanager
def asking(scheduler: str) -> Iterator[None]:
    """Names the scheduler in whatever its client raises: each has errors of its own, and no common one.

    Raises:
        UserError: The scheduler refuses the job.
        RunError: The scheduler cannot be used.
    """
    try:
        yield
    except (UserError, RunError):
        raise
    except specs.InvalidRunConfigException as error:
        raise UserError(f"the scheduler {scheduler} does not take this job: {error}") from error
    except Exception as error:
        raise RunError(f"{scheduler} cannot be used: {type(error).__name__}: {error}") from error
