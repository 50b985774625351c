"""The file with the error of a rank, from which ``torch.distributed.run`` names the first rank that failed."""

import contextlib
import json
import os
import time
import traceback

from distembed.base.errors import FolderInUse, UserError

TOLD_VARIABLE = "DISTEMBED_LAUNCHER_TELLS"
"""Environment variable of a launcher that prints the user's mistakes itself, once for all ranks."""
MISTAKES = (2, 3)
"""Exit codes of wrong input and of a model that does not fit: a restart mends neither."""


def user_exit_code(error: UserError) -> int:
    """Returns the exit code of a user's mistake: 2; 1 for a folder in use where our launcher restarts the process."""
    return 1 if isinstance(error, FolderInUse) and TOLD_VARIABLE in os.environ else 2


def record_error(error: BaseException, code: int = 1) -> bool:
    """Writes an error, its traceback and the exit code into the file that ``TORCHELASTIC_ERROR_FILE`` names, if any.

    Returns:
        Whether the launcher prints the error.
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
