"""Why a rank failed, in the file that ``torch.distributed.run`` reads: its summary then names the first that failed."""

import contextlib
import json
import os
import time
import traceback

from distembed.base.errors import FolderInUse, UserError

TOLD_VARIABLE = "DISTEMBED_LAUNCHER_TELLS"
"""Environment variable by which a launcher says that it tells the user's mistakes itself, once for all ranks."""
MISTAKES = (2, 3)
"""Exit codes of wrong input and of what does not fit: every rank says the same, and starting again does not mend it."""


def user_exit_code(error: UserError) -> int:
    """Returns the exit code of a user's mistake: 2, or 1 where a launcher of ours starts the process again.

    It does so for a folder in use, which is free some time: a mistake would end the whole job.
    """
    return 1 if isinstance(error, FolderInUse) and TOLD_VARIABLE in os.environ else 2


def record_error(error: BaseException, code: int = 1) -> bool:
    """Writes an error with its traceback into the launcher's file; does nothing without a launcher.

    The file is the one that ``TORCHELASTIC_ERROR_FILE`` names.

    Args:
        error: The error.
        code: The exit code with which the process ends of it.

    Returns:
        Whether the launcher tells the user of it.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return False
    now = time.time_ns()
    extra = {
        "py_callstack": "".join(traceback.format_exception(error)),
        "timestamp": str(now // 10**9),  # the launcher reads whole seconds
        "time_ns": str(now),
        "exit_code": code,
    }
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": message}, file)
        return TOLD_VARIABLE in os.environ and code in MISTAKES
    return False
