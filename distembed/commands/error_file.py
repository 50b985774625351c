"""Why a rank failed, where ``torch.distributed.run`` looks for it: then its summary names the first one that did."""

import contextlib
import json
import os
import time
import traceback


def record_error(error: BaseException) -> None:
    """Writes an error with its traceback into the file that the launcher named, where there is a launcher."""
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
