"""The dataset folder and the work of a preparation that several processes share, and that outlives their death.

Beside the output there is meanwhile::

    .criteo.preparing-3f0c2a91d7be/    its name says which inputs and options it is for
        dataset/                       becomes criteo/
        work/results/...               what is done (work.py); other names are the preparation's own
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distembed.checksums import checksum_of
from distembed.data.prepare.destination import Destination
from distembed.data.prepare.processes import Worker
from distembed.data.prepare.progress import NoteCallback, ProgressCallback, ignore
from distembed.data.prepare.staging import DATASET, KeptFolder, kept_folder, kept_path
from distembed.data.prepare.work import Work

_WORK = "work"


@contextmanager
def resumable_work(
    destination: Destination,
    purpose: Any | None,
    worker: Worker | None = None,
    *,
    report: ProgressCallback = ignore,
    note: NoteCallback = ignore,
) -> Iterator[tuple[Path, Work]]:
    """Gives the folder that becomes the dataset when the block ends, and the work that its processes share.

    What a block makes of files and folders it has to make anew, or to find, when it runs again after a kill. Process 0
    alone may write outside of tasks.

    Args:
        destination: Where the dataset goes; files of a remote one are the block's to move.
        purpose: All that tasks and their results depend on, such as inputs with their sizes and times, options and
            sizes of parts, as a value that JSON can hold. None where the inputs cannot be read again, as pipes: then
            nothing is kept.
        worker: This process; alone unless given.
        report: Function that is called with the progress.
        note: Function that is told whether this goes on with what was done, or begins anew.

    Raises:
        UserError: The output is there and may not be replaced, cannot be made, or another command makes it.
        TemporaryFailure: Another process has died; what was done is kept.
    """
    worker = worker or Worker()
    digest = None if purpose is None else checksum_of(json.dumps(purpose, sort_keys=True).encode())[:12]
    if not worker.is_first:
        assert digest is not None, "what can be read once is read by one process"
        with _taking_part(kept_path(destination.path, digest), worker, report) as (folder, work):
            yield folder, work
        return
    path, is_moved = destination.path, destination.is_remote
    with kept_folder(path, digest, overwrite=destination.overwrite, is_moved=is_moved) as kept:
        destination.begin(kept.is_resumed)
        _say_what_is_kept(kept, destination, note)
        (kept.path / _WORK / "processes").mkdir(parents=True, exist_ok=True)
        try:
            with _taking_part(kept.path, worker, report) as (folder, work):
                yield folder, work
        except KeyboardInterrupt:
            if digest is not None:
                note(f"{destination}: what is done is kept, and the same command goes on with it")
            raise


@contextmanager
def _taking_part(folder: Path, worker: Worker, report: ProgressCallback) -> Iterator[tuple[Path, Work]]:
    work = Work(folder / _WORK, report, worker)
    try:
        work.begin()
        yield folder / DATASET, work
        work.end()
    except BaseException as error:
        work.end(error)
        raise


def _say_what_is_kept(kept: KeptFolder, output: Destination, note: NoteCallback) -> None:
    if kept.is_resumed:
        note(f"{output}: this goes on with what was done before the same command was interrupted")
    elif kept.is_anew:
        note(
            f"{output}: this begins anew, since the command that was interrupted had other inputs or options; what it "
            "had done is removed"
        )
