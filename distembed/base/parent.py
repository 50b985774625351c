"""A process that ends with the process which started it, also where that one is killed.

A process in a session of its own, as TorchX and ``torch.distributed.run`` start theirs, hears nothing of the death of
its parent. The parent names itself in an environment variable; the kernel then tells the child when the parent is gone.
"""

import os
import signal

PARENT_VARIABLE = "DISTEMBED_PARENT_PID"
"""Environment variable that holds the process id of the parent with which a process ends."""

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Has the kernel send SIGTERM to this process once its parent is gone; does nothing where no parent is named.

    SIGTERM as from a scheduler: what a training run has is saved first. The variable is taken out of the environment,
    for it does not speak of this process's own children.
    """
    named = os.environ.pop(PARENT_VARIABLE, "")
    if not named.isdecimal():
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # It may have died before the kernel was told.
    if os.getppid() != int(named):
        os.kill(os.getpid(), signal.SIGTERM)
