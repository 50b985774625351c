"""The text by which a process owns a folder: written, renewed by a thread, and removed at the end.

An owner that holds the kernel's lock renews its text as well, so that a machine on which the file system has no locks
sees that it is alive.
"""

import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from distembed.training.run_folder.owner import FolderOwner, describe_owner


@dataclass(frozen=True)
class LeaseTimes:
    """How long the steps of owning a folder take, in seconds; processes that share a folder share these.

    Attributes:
        renew_seconds: Time between two renewals of an owner's text.
        lease_seconds: Time for which a text stays the same before its owner on another machine is taken for dead.
        settle_seconds: Time between writing a text and looking whether it is still there. It has to be longer than
            two processes take to overtake each other between their last look at the file and replacing it, which
            are two calls that follow each other.
        poll_seconds: Time between two looks at a folder that is not free.
    """

    renew_seconds: float = 10.0
    lease_seconds: float = 60.0
    settle_seconds: float = 2.0
    poll_seconds: float = 1.0


USUAL_TIMES = LeaseTimes()
"""Six renewals fit into a lease."""


class Lease:
    """This process's ownership of a folder, by a text in its lock file.

    Args:
        path: The lock file.
        descriptor: The lock file, open and locked; None where the file system has no locks that hold.
        times: How often the text is renewed, and when it lapses.
    """

    def __init__(self, path: Path, descriptor: int | None, times: LeaseTimes) -> None:
        self._path = path
        self._descriptor = descriptor
        self._times = times
        self._owner = FolderOwner.this_process("lease" if descriptor is None else "flock")
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, found: str, previous_owner_is_gone: bool) -> bool:
        """Writes this process's text and starts to renew it.

        Args:
            found: The text that is in the lock file now, which is replaced.
            previous_owner_is_gone: Whether nobody can come back to that text. Otherwise its owner is given the time
                to find that the folder is no longer its own.

        Returns:
            Whether this process owns the folder now; another one may have been faster.
        """
        if not self._write(only_over=found):
            return False
        if self._descriptor is None or not previous_owner_is_gone:
            settle_seconds = self._times.settle_seconds
            time.sleep(settle_seconds if previous_owner_is_gone else self._times.renew_seconds + settle_seconds)
            if not self._is_there():
                return False
        self._thread = threading.Thread(target=self._renew_until_end, name="ownership", daemon=True)
        self._thread.start()
        return True

    def end(self) -> None:
        """Removes the text where it is this process's, and unlocks the file."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        with suppress(OSError):  # the text then lapses by itself
            if self._is_there():
                if self._descriptor is None:
                    self._path.unlink()
                else:
                    os.ftruncate(self._descriptor, 0)
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _is_there(self) -> bool:
        """Returns whether the lock file holds a text of this ownership."""
        return self._owner.token in read_lock_file(self._path)

    def _write(self, only_over: str | None = None) -> bool:
        """Writes the text, where ``only_over`` is given only in place of that one; returns whether it did."""
        text = self._owner.as_text()
        if self._descriptor is not None:
            # cut last: an empty file would be a free one
            os.ftruncate(self._descriptor, os.pwrite(self._descriptor, text.encode(), 0))
            os.fsync(self._descriptor)  # NFS shows other machines nothing before
            return True
        # Not whole_file: that makes a folder that was deleted again, and waits for the disk between the last look and
        # the replacement.
        temporary = self._path.with_name(f"{self._path.name}-{self._owner.token}")
        try:
            temporary.write_text(text)
            if only_over is not None and read_lock_file(self._path) != only_over:
                return False
            os.replace(temporary, self._path)
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def _renew_until_end(self) -> None:
        """Renews the text until :meth:`end`; ends the process where it cannot, or finds another owner's text."""
        lease_seconds = self._times.lease_seconds
        renewed = seconds_since_boot()
        while not self._ended.wait(self._times.renew_seconds):
            began = seconds_since_boot()
            try:
                self._renew(is_late=began - renewed >= lease_seconds)
                failure = "it took too long"
                is_lost = seconds_since_boot() - began >= lease_seconds
            except OSError as error:
                failure = str(error)
                is_lost = seconds_since_boot() - renewed >= lease_seconds
            else:
                renewed = began
            if is_lost and self._descriptor is None:
                self._end_process(f"could not be renewed for {lease_seconds:g} s ({failure})")

    def _renew(self, is_late: bool) -> None:
        """Writes the next text; ends the process where the folder may have had another owner since the last one.

        Args:
            is_late: Whether the last text was written so long ago that others may have taken this process for dead.
        """
        text = read_lock_file(self._path)
        if text.strip() and self._owner.token not in text:
            self._end_process(f"was taken over by {describe_owner(text)}")
        if not text.strip() and is_late and self._descriptor is None:
            self._end_process("is gone: another process may have had it meanwhile")
        self._owner = replace(self._owner, renewals=self._owner.renewals + 1)
        self._write()

    def _end_process(self, why: str) -> None:
        """Ends this process at once, which must not write beside the folder's next owner."""
        try:
            text = f"error: {self._path} {why}; process {os.getpid()} no longer owns the folder and ends."
            print(text, file=sys.stderr, flush=True)
        finally:
            os._exit(1)


def read_lock_file(path: Path) -> str:
    """Returns a lock file's text; an empty one where there is no such file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def seconds_since_boot() -> float:
    """Returns a clock that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
