"""Exit codes of a node, by which the scheduler acts; and the signals that ask a node to end.

====================  ===========================================================================
0                     done
2, 3                  a mistake of the user's: starting again does not mend it, so the job ends
70                    failed as often as the job may be started again: it ends
75                    interrupted, with everything saved: start it again, which counts as no failure
any other             failed: start it again, as often as the job may be
====================  ===========================================================================
"""

import signal
from types import FrameType
from typing import NoReturn

from distembed.commands import error_file

MISTAKES = error_file.MISTAKES
"""Wrong input, and a model that does not fit; the exit codes of ``distembed train``."""
RETRIES_USED = 70
"""The job has failed, and may not be started again; ``EX_SOFTWARE`` of sysexits.h."""
INTERRUPTED = 75
"""Interrupted, can resume; ``EX_TEMPFAIL`` of sysexits.h, and the exit code of ``distembed train``."""
FAILED = 1
"""Failed for any other reason."""
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
"""Signals that ask a node to end: ``torch.distributed.run``'s, and SIGUSR1, which Slurm sends before a time limit."""
RETRIES_VARIABLE = "DISTEMBED_MAX_RETRIES"
"""Environment variable: how often the job may be started again, where the nodes count (``nodes/run.py``)."""
AGAIN_VARIABLE = "DISTEMBED_START_AGAIN"
"""Environment variable: that the nodes start again themselves, where the scheduler starts no job again."""


class ToldToEnd(BaseException):
    """A signal has asked this node to end; ``has_saved`` unless ranks were killed while they saved their state."""

    def __init__(self, has_saved: bool = True) -> None:
        self.has_saved = has_saved


def raise_when_told() -> None:
    """Makes the first signal that asks this node to end raise :class:`ToldToEnd`, and further ones do nothing."""
    for name in SIGNALS.split(","):
        signal.signal(signal.Signals[name], _raise)


def ignore_signals() -> None:
    """Makes signals that ask this node to end do nothing; the scheduler kills slow processes."""
    for name in SIGNALS.split(","):
        # not SIG_IGN: Python prints a warning about a signal that arrives meanwhile
        signal.signal(signal.Signals[name], _do_nothing)


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    """Ignores a signal."""


def _raise(_number: int, _frame: FrameType | None) -> NoReturn:
    ignore_signals()
    raise ToldToEnd
