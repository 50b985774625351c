"""How the processes of a preparation hear of each other: each has a file in the work folder, which it renews.

A file says which stage its process is in, how far it is, and whether it has failed or is done; and it has a number that
grows with each beat, so that a process which was killed is told from one with a long task, on machines whose clocks
differ too. The files of an attempt that was killed carry another token than those of this one.
"""

from __future__ import annotations

import errno
import json
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distembed.data.prepare.processes import Worker
from distembed.errors import RunError, TemporaryFailure, UserError, one_line
from distembed.files import write_text

PATIENCE_SECONDS = 300.0
"""How long nothing may be heard of a process; network file systems show what is new after up to a minute."""
_BEAT_SECONDS = 0.5
_LOOK_SECONDS = 0.2
_WORKS, _FAILED, _LEFT = "works", "failed", "left"


@dataclass
class _Beat:
    """What the file of a process says.

    Attributes:
        attempt: Token of the attempt that process 0 began.
        number: Number of the beat.
        state: Whether the process works, has failed or has left.
        stage: Name of its stage.
        num_bytes: Bytes of the stage that it has done.
        num_rows: Rows of the stage that it has done.
        error: The error by which it failed, if it did.
    """

    attempt: str
    number: int = 0
    state: str = _WORKS
    stage: str = ""
    num_bytes: int = 0
    num_rows: int = 0
    error: dict[str, Any] | None = None


class Beats:
    """The beats of this process, and those of the others.

    Args:
        folder: Folder of the processes' files; process 0 has made it.
        worker: This process.
    """

    def __init__(self, folder: Path, worker: Worker) -> None:
        self._folder, self._worker = folder, worker
        self._others = [index for index in range(worker.count) if index != worker.index]
        self._heard: dict[int, tuple[_Beat | None, float]] = {i: (None, time.monotonic()) for i in self._others}
        self._looked = 0.0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._own = _Beat(uuid.uuid4().hex if worker.is_first else worker.attempt or self._await_first())
        self._thread = threading.Thread(target=self._beat_on, name="distembed-beats", daemon=True)

    def begin(self) -> None:
        """Begins to beat, where there are others to hear it, and starts those of this machine."""
        if self._others:
            self._write()
            self._thread.start()
            self._worker.start(self._own.attempt)

    def end(self, error: BaseException | None = None) -> None:
        """Says that this process has left or failed, and beats no more."""
        if not self._others:
            return
        self._ended.set()
        self._thread.join()
        self._own.state = _LEFT if error is None else _FAILED
        self._own.error = None if error is None else _as_json(error)
        with suppress(RunError):  # the folder may have gone with process 0, or the disk be full
            self._write()

    def say(self, stage: str, num_bytes: int, num_rows: int) -> None:
        """Says how far this process is, with the next beat."""
        self._own.stage, self._own.num_bytes, self._own.num_rows = stage, num_bytes, num_rows

    def done_by_others(self, stage: str) -> tuple[int, int]:
        """Returns the bytes and rows of a stage that the others have said to have done."""
        beats = [beat for beat, _ in self._heard.values() if beat is not None and beat.stage == stage]
        return sum(beat.num_bytes for beat in beats), sum(beat.num_rows for beat in beats)

    def check(self) -> None:
        """Looks at the others, if the last look was not just now; any thread may call it.

        Raises:
            UserError: A process has failed by such an error; likewise RunError and OSError.
            TemporaryFailure: A process has died, or nothing is heard of it any more.
        """
        if not self._others or not self._lock.acquire(blocking=False):
            return
        try:
            now = time.monotonic()
            if now - self._looked < _LOOK_SECONDS:
                return
            self._looked = now
            for index in self._others:
                self._look_at(index, now)
        finally:
            self._lock.release()

    def await_others(self) -> None:
        """Waits until all others have left."""
        while not all(beat is not None and beat.state == _LEFT for beat, _ in self._heard.values()):
            self.check()
            time.sleep(_LOOK_SECONDS / 4)

    def _look_at(self, index: int, now: float) -> None:
        process = self._worker.others.get(index)
        is_dead = process is not None and process.poll() is not None
        beat = self._read(index)
        before, since = self._heard[index]
        if beat is not None and beat.attempt == self._own.attempt:
            if before is None or beat.number != before.number:
                self._heard[index] = beat, now
            if beat.state == _FAILED:
                raise _from_json(beat.error or {}, index)
            if beat.state == _LEFT:
                self._heard[index] = beat, now
                return
        if is_dead and process is not None:
            raise TemporaryFailure(
                f"process {index} of {self._worker.count} has ended ({_how_it_ended(process.returncode)}) before its "
                "tasks were done; begin the same command again: what is done is kept."
            )
        if now - since > PATIENCE_SECONDS and self._heard[index][1] == since:
            raise TemporaryFailure(
                f"nothing has been heard of process {index} of {self._worker.count} for {PATIENCE_SECONDS:.0f} s; see "
                "whether it runs and has the same inputs, options and output folder, and begin the same command "
                "again: what is done is kept."
            )
        if not self._folder.is_dir():
            raise TemporaryFailure(f"the preparation was ended by process 0 of {self._worker.count}, which says why.")

    def _await_first(self) -> str:
        """Returns the token of the attempt that process 0 has begun, once that is seen to be alive."""
        first, since = self._read(0), time.monotonic()
        while True:
            beat = self._read(0)
            if beat is not None and beat != first:
                if first is not None and beat.attempt == first.attempt:
                    return beat.attempt
                first = beat
            if time.monotonic() - since > PATIENCE_SECONDS:
                raise TemporaryFailure(
                    f"process 0 of {self._worker.count} has not begun within {PATIENCE_SECONDS:.0f} s: start the same "
                    f"command for it, with the same inputs, options and output, on a file system that has "
                    f"{self._folder} here too."
                )
            time.sleep(_LOOK_SECONDS / 4)

    def _beat_on(self) -> None:
        while not self._ended.wait(_BEAT_SECONDS):
            with suppress(RunError):
                self._write()

    def _write(self) -> None:
        """Renews this process's file."""
        self._own.number += 1
        write_text(self._file(self._worker.index), json.dumps(asdict(self._own)), flush=False)

    def _read(self, index: int) -> _Beat | None:
        try:
            return _Beat(**json.loads(self._file(index).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None  # not there yet, or of another version

    def _file(self, index: int) -> Path:
        return self._folder / f"{index}.json"


def _as_json(error: BaseException) -> dict[str, Any]:
    kinds = {UserError: "user", TemporaryFailure: "temporary", RunError: "run"}
    kind = next((name for known, name in kinds.items() if isinstance(error, known)), None)
    if kind is None and isinstance(error, OSError) and error.errno is not None:
        return {"kind": "system", "errno": error.errno, "text": error.strerror or ""}
    if kind is None and "No space left" in str(error):  # as PyArrow says it
        return {"kind": "system", "errno": errno.ENOSPC, "text": str(error)}
    return {"kind": kind or "other", "text": str(error) if kind else one_line(error)}


def _from_json(error: dict[str, Any], index: int) -> Exception:
    """Returns the error of another process, as if it were of this one."""
    text = str(error.get("text"))
    match error.get("kind"):
        case "user":
            return UserError(text)
        case "temporary":
            return TemporaryFailure(text)
        case "run":
            return RunError(text)
        case "system":
            return OSError(error["errno"], text)
    return RunError(f"process {index} has failed: {text}")


def _how_it_ended(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
