"""This process: it ends with its parent, and keeps logs of libraries that no user can act on out of the output.

A process in a session of its own, as TorchX and ``torch.distributed.run`` start theirs, hears nothing of the death of
its parent. The parent names itself in an environment variable; the kernel then tells the child when the parent is gone.
"""

import ctypes
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

PARENT_VARIABLE = "DISTEMBED_PARENT_PID"
"""Environment variable that holds the process id of the parent with which a process ends."""

_PR_SET_PDEATHSIG = 1
_NOISY_LOGGERS = ("torchrec", "torch.fx._symbolic_trace")


def end_with_parent() -> None:
    """Has the kernel send SIGTERM to this process once its parent is gone; does nothing where no parent is named.

    SIGTERM as from a scheduler: a training run saves its state first. The variable is taken out of the environment, so
    that this process's own children do not see it.
    """
    parent_id = os.environ.pop(PARENT_VARIABLE, "")
    if not parent_id.isdecimal():
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # The parent may have died before the kernel was told.
    if os.getppid() != int(parent_id):
        os.kill(os.getpid(), signal.SIGTERM)


def silence_loggers() -> None:
    """Silences TorchRec's and torch's loggers for the rest of the process, as commands do."""
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger().addFilter(_concerns_user)


@contextmanager
def silenced_loggers() -> Iterator[None]:
    """Silences TorchRec's and torch's loggers within the block."""
    levels = {name: logging.getLogger(name).level for name in _NOISY_LOGGERS}
    was_filtered = _concerns_user in logging.getLogger().filters
    silence_loggers()
    try:
        yield
    finally:
        if not was_filtered:
            logging.getLogger().removeFilter(_concerns_user)
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def _concerns_user(record: logging.LogRecord) -> bool:
    """Returns False for messages to the root logger that no user can act on.

    TorchRec warns of each data-parallel table that it has no shards; FBGEMM 1.6, that it does not know this torch.
    """
    message = str(record.msg)
    return not (message.startswith("Sharding spec not found") or "_fbgemm_torch_compat_table has no entry" in message)
