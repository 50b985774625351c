"""Running Slurm's commands: what they answer, their own reason where they fail, and how long to ask again.

A busy controller, or one that starts again, does not answer for a while: that says nothing of a job.
"""

import re
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from distembed.base.errors import RunError, UserError

PATIENCE_SECONDS = 30.0
"""How long a question is put to a controller that does not answer."""
RETRY_SECONDS = 3.0
"""Seconds between two attempts to put the same question."""

Completed = subprocess.CompletedProcess[str]
_Answer = TypeVar("_Answer")


def run_command(
    command: Sequence[str], stdin: str | None = None, environment: dict[str, str] | None = None
) -> Completed:
    """Runs one of Slurm's commands to its end, whatever its exit code is.

    Args:
        command: The command and its arguments.
        stdin: Text that it reads; None for nothing.
        environment: Its environment variables; None for those of this process.

    Raises:
        UserError: Slurm is not installed on this machine.
    """
    try:
        return subprocess.run(
            command,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
        )
    except FileNotFoundError:
        raise UserError(
            f"there is no {command[0]} on PATH; run this where Slurm's commands are, such as a cluster's login node, "
            "or try it on a Slurm on this machine: tests/launch/mini_slurm.sh up"
        ) from None


def failure_reason(completed: Completed) -> str:
    """Returns what a command that failed has printed about it, or its exit code where it has printed nothing."""
    return without_prefixes(completed.stderr) or f"{completed.args[0]} ended with code {completed.returncode}"


def without_prefixes(stderr: str) -> str:
    """Returns the lines that a command has printed as one line, without ``sbatch: error:`` and the like before each."""
    return "; ".join(re.sub(r"^\w+: (?:error: |fatal: )?", "", line) for line in stderr.strip().splitlines())


def retry(ask: Callable[[], _Answer], patience_seconds: float | None = None) -> _Answer:
    """Returns the answer to a question that is put again for a while where there is none.

    Args:
        ask: Puts the question, and raises RunError where there is no answer.
        patience_seconds: For how long it is put again; :data:`PATIENCE_SECONDS` unless given.

    Raises:
        RunError: There was no answer in that time.
    """
    end = time.monotonic() + (PATIENCE_SECONDS if patience_seconds is None else patience_seconds)
    while True:
        try:
            return ask()
        except RunError:
            if time.monotonic() >= end:
                raise
        time.sleep(RETRY_SECONDS)
