"""A small preparation of two stages, in several processes."""

import hashlib
import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any, Literal

from distembed.data.dataset.manifest import MANIFEST_NAME
from distembed.data.prepare.destination import Destination
from distembed.data.prepare.processes import Worker, run_in_processes
from distembed.data.prepare.progress import NoteCallback, ProgressCallback
from distembed.data.prepare.resumable import resumable_work

Trouble = Exception | Literal["die"] | None
TASKS = [f"part-{number}" for number in range(7)]


def prepare(
    output: Path, purpose: Any, trouble: Trouble, worker: Worker, progress: ProgressCallback, note: NoteCallback
) -> dict[str, Any]:
    """Writes a file a task, then one of their hashes, each task in some hundredths of a second.

    Args:
        output: Folder to make.
        purpose: What the work is for.
        trouble: What befalls process 1 in its second task: nothing, its death, or an error.
        worker: This process.
        progress: Function that is called with the progress.
        note: Function that is told what should be known.
    """
    destination = Destination(output, None, overwrite=True)
    with resumable_work(destination, purpose, worker, report=progress, note=note) as (folder, work):

        def write(task: str) -> list[int]:
            if task == TASKS[3] and trouble == "die":
                os._exit(3)
            if task == TASKS[3] and isinstance(trouble, Exception):
                raise trouble
            for piece in range(3):
                time.sleep(0.02)
                work.advance(task, num_bytes=10, num_rows=1)
                (folder / task).write_bytes(bytes([piece]) * 1000)
            return [worker.count]

        written = work.run_stage("write", TASKS, write, total_bytes=30 * len(TASKS))

        def finish(_: str) -> dict[str, Any]:
            hashes = {task: hashlib.sha256((folder / task).read_bytes()).hexdigest() for task in TASKS}
            (folder / MANIFEST_NAME).write_text(json.dumps(hashes))
            return hashes

        results = work.run_stage("finish", ["manifest"], finish)
    return {"written": written, **results}


def prepare_in(
    processes: int, output: Path, purpose: Any = "rows", trouble: Trouble = None, **told: Any
) -> dict[str, Any]:
    """Runs it in several processes of this machine."""
    return run_in_processes(partial(prepare, output, purpose, trouble), processes, 0, 1, **told)
