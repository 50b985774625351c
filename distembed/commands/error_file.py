"""Why a rank failed, in the file that ``torch.distributed.run`` reads: its summary then names the first that failed."""

import contextlib
import json
import os
import time
import traceback


def record_error(error: BaseException) -> None:
    """Writes an error with its traceback into the launcher's file; does nothing without a launcher.

    The file is the one that ``TORCHELASTIC_ERROR_FILE`` names.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    now = time.time_ns()
    extra = {
        "py_callstack": "".join(traceback.format_exception(error)),
        "timestamp": str(now // 10**9),  # the launcher reads whole seconds
        "time_ns": str(now),
    }
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": message}, file)
