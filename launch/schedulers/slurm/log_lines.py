"""Reads a log that a job on other machines writes into a folder which this machine sees as well."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from distembed.base.errors import RunError

ASK_SECONDS = 3.0
"""Seconds between two questions whether the job has ended."""
LOOK_SECONDS = 0.2
"""Seconds between two looks at the log."""
LATE_SECONDS = 2.0
"""Seconds that lines may take to be seen here after the job has ended."""


def log_lines(path: Path, has_ended: Callable[[], bool] | None, remedy: str) -> Iterator[str]:
    """Yields the lines of a log, each with its end; the last may have none.

    Args:
        path: The log, which need not be there yet: a job may wait long.
        has_ended: Whether the job has ended; None to read only what is there now.
        remedy: End of the error where there is no log.

    Raises:
        RunError: There is no log, and there will be none.
    """
    running = iter([False, False]) if has_ended is None else _is_running(has_ended)
    while not path.is_file() and next(running):
        time.sleep(LOOK_SECONDS)
    if not path.is_file():
        raise RunError(f"there is no log {path}. {remedy}")
    # newline: a progress bar's carriage returns are handed on
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        begun = ""
        # Asked before it is read: what a job has written before its end is read after that end.
        for more in running:
            for text in file:
                begun += text
                if begun.endswith("\n"):
                    yield begun
                    begun = ""
            if not more:
                break
            time.sleep(LOOK_SECONDS)
        if begun:
            yield begun


def _is_running(has_ended: Callable[[], bool]) -> Iterator[bool]:
    """Yields True until the job has ended, then False; it asks only now and then, which is work for the scheduler."""
    asked = None
    while True:
        if asked is None or time.monotonic() - asked >= ASK_SECONDS:
            if has_ended():
                break
            asked = time.monotonic()
        yield True
    time.sleep(LATE_SECONDS)
    while True:
        yield False
