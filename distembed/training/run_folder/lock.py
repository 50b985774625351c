"""One process at a time owns a folder, whichever machine it runs on.

``FOLDER/.lock`` says in JSON who owns it, and a thread of the owner renews that text. There are two ways to own:

- *flock*, where the file system has locks that hold between machines. The kernel, or the file server, frees the lock
  once the process is gone. An NFS server frees the locks of a machine that died only after a while, see
  :data:`DEAD_MACHINE_SECONDS`.
- *lease*, where the file system has no locks, or where its mount says that they hold on one machine only. An owner on
  another machine whose text stays the same for :attr:`LeaseTimes.lease_seconds` is taken for dead. An owner on the same
  machine is looked up by its process id, and the lease of a process that is gone is taken at once.

The trade-off of a lease: it is free only a minute after its owner's machine has died, and an owner that was suspended
for longer (the machine, or every thread of the process) may write to the folder until its thread runs again, finds
another owner's text and ends the process. A lock has neither fault, so it is the first choice.

Machines need not mount the folder alike: those with locks respect leases, and those without locks respect the text of
a lock's owner. Only where one of each kind finds the folder free at the same moment may both begin; then the one whose
text was replaced ends at its next renewal.

``filelock`` 4.2.11 was tried in place of this module, a ``FileLock`` beside a ``SoftFileLease``. Its lease takes the
folder from a process of the same machine that is merely suspended, at once from a living owner on another machine that
has the same host name, and leaves it to an owner whose folder was renamed; its two kinds of lock do not see each other,
and its error names neither the owner's job nor since when it owns the folder.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from pathlib import Path

from distembed.base.errors import FolderInUse, RunError
from distembed.training.run_folder.flock import locks_are_local, mounted_file_systems, take_flock
from distembed.training.run_folder.lease import USUAL_TIMES, Lease, LeaseTimes, read_lock_file, seconds_since_boot
from distembed.training.run_folder.owner import FolderOwner, describe_owner

LOCK_NAME = ".lock"
"""Name of the lock file; the files beside it that replace it begin with the same."""

DEAD_MACHINE_SECONDS = 120.0
"""How long a job that a scheduler started again waits for the folder that its dead node owned.

A Linux NFS server keeps the locks of a machine that it lost for 90 s; a lease of this module takes
:attr:`LeaseTimes.lease_seconds` and the time to settle, which is less.
"""

IN_USE = "{folder} is in use by {owner}; wait for it to end, or give another --run-dir."


def _say_on_stderr(text: str) -> None:
    """Prints a line for the user."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def owned(
    folder: Path,
    wait_seconds: float = 0.0,
    say: Callable[[str], None] = _say_on_stderr,
    refusal: str = IN_USE,
    times: LeaseTimes = USUAL_TIMES,
) -> Iterator[None]:
    """Owns a folder within the block, in which no other process owns it.

    A lease of another machine that shows no sign of life is watched for :attr:`LeaseTimes.lease_seconds` before it is
    taken, also where ``wait_seconds`` is 0. A process that finds within the block that another one has taken the
    folder ends at once, with exit code 1 and without any clean-up.

    Args:
        folder: An existing folder.
        wait_seconds: How long to wait for another owner to end; 0 refuses at once.
        say: Prints a line, which is called once for the owner that is waited for, and once for a lease that is watched.
        refusal: The error's text, in which ``{folder}`` and ``{owner}`` are filled in.
        times: How often the ownership is renewed and looked at.

    Raises:
        FolderInUse: Another process owns the folder.
        RunError: The lock file cannot be written.
    """
    try:
        lease = _Contender(folder, wait_seconds, say, refusal, times).take()
    except OSError as error:
        raise RunError(f"{folder / LOCK_NAME} cannot be locked: {error}") from error
    try:
        yield
    finally:
        lease.end()


class _OwnerState(Enum):
    """What a look at the lock file says of the folder's owner."""

    GONE = auto()
    """There is none, or its process is known to have ended."""
    SILENT = auto()
    """It gave no sign of life for as long as a lease lasts."""
    UNCERTAIN = auto()
    """It may be dead; more looks are needed to find out."""
    ALIVE = auto()


class _Contender:
    """Looks again and again whether a folder is free, and takes it once it is.

    Args:
        folder: The folder to own.
        wait_seconds: How long to wait for a living owner to end.
        say: Prints a line.
        refusal: The text of the error once that time is up.
        times: How often to look, and for how long to watch a lease.
    """

    def __init__(
        self, folder: Path, wait_seconds: float, say: Callable[[str], None], refusal: str, times: LeaseTimes
    ) -> None:
        self._folder = folder
        self._path = folder / LOCK_NAME
        self._wait_seconds = wait_seconds
        self._deadline = seconds_since_boot() + wait_seconds
        self._say = say
        self._refusal = refusal
        self._times = times
        self._said: set[_OwnerState] = set()
        self._seen: str | None = None
        self._unchanged_since = 0.0

    def take(self) -> Lease:
        """Returns this process's ownership once it has it.

        Raises:
            FolderInUse: A living owner has not ended in time.
            OSError: The lock file cannot be written.
        """
        has_locks = not locks_are_local(os.path.realpath(self._folder), mounted_file_systems())
        while True:
            try:
                descriptor = take_flock(self._path) if has_locks else None
            except BlockingIOError:
                self._wait(_OwnerState.ALIVE, read_lock_file(self._path))
                continue
            lease = Lease(self._path, descriptor, self._times)
            try:
                looked = seconds_since_boot()  # before reading: a process that is suspended in between has not watched
                text = read_lock_file(self._path)
                state = self._judge(text, looked, has_lock=descriptor is not None)
                is_free = state in (_OwnerState.GONE, _OwnerState.SILENT)
                if is_free and lease.begin(text, previous_owner_is_gone=state is _OwnerState.GONE):
                    return lease
            except BaseException:
                lease.end()
                raise
            lease.end()
            self._wait(state, text)

    def _judge(self, text: str, looked: float, has_lock: bool) -> _OwnerState:
        """Returns what a lock file's text says of its owner.

        Args:
            text: The lock file's text, empty where there is none.
            looked: When it was read.
            has_lock: Whether this process holds the kernel's lock on the file.
        """
        owner = FolderOwner.parse(text)
        # with the lock in hand, only a lease may still be somebody's
        if not text.strip() or (has_lock and (owner is None or owner.way == "flock")):
            return _OwnerState.GONE
        if owner is not None and owner.is_on_this_machine():
            return _OwnerState.ALIVE if owner.is_running() else _OwnerState.GONE
        if text != self._seen:
            is_first_look = self._seen is None
            self._seen, self._unchanged_since = text, looked
            return _OwnerState.UNCERTAIN if is_first_look else _OwnerState.ALIVE
        is_over = looked - self._unchanged_since >= self._times.lease_seconds
        return _OwnerState.SILENT if is_over else _OwnerState.UNCERTAIN

    def _wait(self, state: _OwnerState, text: str) -> None:
        """Sleeps until the next look, and says for whom where it has not yet.

        Raises:
            UserError: The owner is alive and the time to wait is over.
        """
        owner = describe_owner(text)
        if state is _OwnerState.ALIVE and seconds_since_boot() >= self._deadline:
            raise FolderInUse(self._refusal.format(folder=self._folder, owner=owner))
        if state not in self._said:
            self._said.add(state)
            if state is _OwnerState.ALIVE:
                self._say(f"{self._folder} is in use by {owner}: waiting up to {self._wait_seconds:g} s for it to end")
            if state is _OwnerState.UNCERTAIN:
                self._say(
                    f"{self._folder} was left by {owner}, or is in use by it: it is taken over unless it gives a sign "
                    f"of life within {self._times.lease_seconds:g} s"
                )
        time.sleep(self._times.poll_seconds)
