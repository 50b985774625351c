"""Lines of a log that a job on other machines writes into a folder which this machine sees as well."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from distembed.errors import RunError

ASK_SECONDS = 3.0
"""How often it is asked whether the job has ended."""
LOOK_SECONDS = 0.2
"""How often the log is looked at."""
LATE_SECONDS = 2.0
"""How long after the job's end what it has written may take to be seen here."""


def log_lines(path: Path, has_ended: Callable[[], bool] | None, remedy: str) -> Iterator[str]:
    """Yields the lines of a log, each with its end; the last may have none.

    Args:
        path: The log. It need not be there yet, or not for a while: a job may wait long.
        has_ended: Whether the job has ended; None to read only what is there now.
        remedy: What to say to someone whose log is nowhere.

    Raises:
        RunError: There is no log, and there will be none.
    """
    goes_on = iter([False, False]) if has_ended is None else _goes_on(has_ended)
    while not path.is_file() and next(goes_on):
        time.sleep(LOOK_SECONDS)
    if not path.is_file():
        raise RunError(f"there is no log {path}. {remedy}")
    # newline: a progress bar's carriage returns are handed on
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        begun = ""
        # Asked before it is read: what a job has written before its end is read after that end.
        for more in goes_on:
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


def _goes_on(has_ended: Callable[[], bool]) -> Iterator[bool]:
    """True until the job has ended, which is asked only now and then: each time is a request to a busy scheduler."""
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
