"""A small preparation of two stages, on any engine."""

import hashlib
import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import MANIFEST_NAME
from distembed.data.prepare.options import ResourceLimits
from distembed.data.prepare.staging import Destination
from distembed.data.prepare.work import Advance, resumable_work

TASKS = [f"part-{number}" for number in range(7)]
TROUBLED = TASKS[3]
TROUBLE: dict[str, Exception] = {
    "user": UserError("rows are bad"),
    "disk": OSError(28, "No space left on device"),
    "key": KeyError("key"),
}


def write(folder: Path, trouble: str | None, task: str, advance: Advance) -> int:
    """Writes a file in some hundredths of a second, or meets a trouble: an error, its death, or its first death."""
    if task == TROUBLED and trouble in TROUBLE:
        raise TROUBLE[trouble]
    if task == TROUBLED and trouble in ("die", "die once"):
        first = folder / ".died"
        if trouble == "die" or not first.exists():
            first.touch()
            os._exit(3)
    for _ in range(3):
        time.sleep(0.02)
        advance(10, 1)
    (folder / f".{task}.{os.getpid()}").write_bytes(task.encode() * 1000)
    (folder / f".{task}.{os.getpid()}").rename(folder / task)
    return os.getpid()


def finish(folder: Path, task: str, advance: Advance) -> dict[str, Any]:
    """Writes the hashes of all files."""
    hashes = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in TASKS}
    (folder / MANIFEST_NAME).write_text(json.dumps(hashes))
    return hashes


def prepare(
    output: Path, purpose: Any = "rows", trouble: str | None = None, engine: str = "threads", **told: Any
) -> dict[str, Any]:
    """Writes a file a task, then their hashes, and returns the results of all tasks."""
    limits = ResourceLimits(320 << 20, engine=engine)
    with resumable_work(Destination(output, None, overwrite=True), purpose, limits, **told) as (folder, work):
        do = partial(write, folder, trouble)
        written = work.run_stage("write", TASKS, do, threads=2, total_bytes=30 * len(TASKS))
        (hashes,) = work.run_stage("finish", ["manifest"], partial(finish, folder))
        return dict(zip(TASKS, written, strict=True)) | {"manifest": hashes}
