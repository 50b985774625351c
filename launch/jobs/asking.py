"""What is said of a scheduler that cannot be asked."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torchx import specs

from distembed.errors import RunError, UserError

_INSTALLED_BY = {
    "kubernetes": "tools/setup.sh kubernetes",
    "aws_batch": "tools/setup.sh aws_batch",
    "ray": f"{sys.executable} -m pip install 'ray[default]'",
}
"""Commands that install what only one scheduler needs."""


@contextmanager
def asking(scheduler: str) -> Iterator[None]:
    """Names the scheduler in whatever its client raises: each has errors of its own, and no common one.

    Raises:
        UserError: The scheduler refuses the job, or a package that it needs is missing here.
        RunError: The scheduler cannot be used.
    """
    try:
        yield
    except (UserError, RunError):
        raise
    except ModuleNotFoundError as error:
        if scheduler not in _INSTALLED_BY:
            raise
        raise UserError(
            f"--scheduler {scheduler} needs a package that is not installed ({error}): run {_INSTALLED_BY[scheduler]}."
        ) from error
    except specs.InvalidRunConfigException as error:
        raise UserError(f"the scheduler {scheduler} does not take this job: {error}") from error
    except Exception as error:
        raise RunError(f"{scheduler} cannot be used: {type(error).__name__}: {error}") from error
