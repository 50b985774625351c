"""The kinds of failure that a user sees, and the exit code by which the command line ends for each.

Raise :class:`UserError` for mistakes that the user can mend by changing the input (exit code 2), and
:class:`RunError` for failures of a correct request (exit code 1). The message names the field, the value received, the
allowed values and the remedy; the command line prints it without a traceback.
"""

import re


class UserError(ValueError):
    """Wrong input: a setting, a file or an argument that cannot be accepted as it is."""


class FolderInUse(UserError):
    """A folder that another process owns; once that process has ended, the command works."""


class DamagedCheckpoint(UserError):
    """A checkpoint that is not as it was written; an earlier one may be whole."""


class RunError(RuntimeError):
    """A failure of a correct request, for example a loss that is not finite."""


class Interrupted(RunError):
    """Ctrl-C, SIGTERM or SIGUSR1, after everything was saved that is needed to resume (exit code 75)."""


class TemporaryFailure(RunError):
    """A failure that may pass, as of a silent server or a killed process; finished work is kept."""


class InsufficientMemory(RunError):
    """A request that takes more memory than there is, in every allowed way (exit code 3)."""


def one_line(error: BaseException, most: int = 300) -> str:
    """Returns the type of an error of someone else's code, and at most ``most`` characters of its message."""
    message = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split()).rstrip(".")  # without colours
    shown = message if len(message) <= most else f"{message[:most]}..."
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__
