"""One process at a time owns a folder, whichever machine it runs on.

``FOLDER/.lock`` says in JSON who owns it, and a thread of the owner renews that text. There are two ways to own:

- *flock*, where the file system has locks that hold between machines. The kernel, or the file server, frees the lock
  once the process is gone. An NFS server frees those of a machine that died only after a while, see
  :data:`DEAD_MACHINE_SECONDS`.
- *lease*, where it has none, or where its mount says that they hold on one machine only. An owner that another machine
  does not see renew its lease for :data:`LEASE_SECONDS` is taken for dead. On its own machine it is asked for by its
  process id, and the lease of a process that is gone is taken at once.

The trade-off of a lease: it is given back by its owner's death only after a minute, and an owner that was suspended for
longer (the machine, or every thread of the process) may work on for as long as its thread takes to look, before it
finds that another has taken over and ends itself. A lock has neither fault, so it is the first choice.

Machines need not mount the folder alike: those with locks heed leases, and those without heed the text of a lock's
owner. Only where one of each kind finds the folder free at the same moment may both begin; then the one whose text was
replaced ends at its next renewal.
"""

import errno
import fcntl
import json
import os
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from enum import Enum, auto
from pathlib import Path

from distembed.errors import RunError, UserError

LOCK_NAME = ".lock"
"""Of the file in an owned folder; while it is replaced, files beside it begin with the same."""

DEAD_MACHINE_SECONDS = 120.0
"""How long a job that a scheduler started again waits for the folder that its dead node owned.

A Linux NFS server keeps the locks of a machine that it lost for a lease of 90 s; a lease of this module takes
``LEASE_SECONDS`` and the time to settle, which is less.
"""

RENEW_SECONDS = 10.0
"""Between two renewals of an owner's text."""

LEASE_SECONDS = 60.0
"""For which a text stays the same before its owner, on another machine, is taken for dead: six renewals missed."""

SETTLE_SECONDS = 2.0
"""Between writing a lease and looking whether it is still there: longer than two processes take to overtake each other
between their last look at the file and replacing it, which are two calls that follow each other.
"""

POLL_SECONDS = 1.0
"""Between two looks at a folder that is not free."""

IN_USE = "{folder} is in use by {owner}; wait for it to end, or give another --run-dir."

_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL}
_LOCAL_OPTIONS = {
    "localflock",  # Lustre
    "localflocks",  # GFS2, OCFS2
    "local_lock=flock",  # NFS
    "local_lock=all",
    "nolock",
}
_LOCAL_TYPES = {"beegfs"}  # unless tuneUseGlobalFileLocks is set in its own configuration, which a mount does not show
_JOB_VARIABLES = ("SLURM_JOB_ID", "AWS_BATCH_JOB_ID", "TORCHELASTIC_RUN_ID")


def _say_on_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def owned(
    folder: Path,
    wait_seconds: float = 0.0,
    say: Callable[[str], None] = _say_on_stderr,
    refusal: str = IN_USE,
) -> Iterator[None]:
    """Owns a folder within the block; no other process does meanwhile.

    A lease that another machine left without a sign of life is watched for :data:`LEASE_SECONDS` before it is taken,
    also where ``wait_seconds`` is 0. A process that finds within the block that another has taken over ends at once,
    with exit code 1 and without any clean-up.

    Args:
        folder: which is there.
        wait_seconds: for which an owner is waited for; 0 refuses at once.
        say: is told, once, whom is waited for, and that a lease is watched.
        refusal: what the error says, with ``{folder}`` and ``{owner}`` in it.

    Raises:
        UserError: Another process owns it.
        RunError: Its file cannot be written.
    """
    try:
        ownership = _Newcomer(folder, wait_seconds, say, refusal).take()
    except OSError as error:
        raise RunError(f"{folder / LOCK_NAME} cannot be locked: {error}") from error
    try:
        yield
    finally:
        ownership.end()


def locks_are_local(folder: str, mounts: str) -> bool:
    """Whether locks in a folder are known to hold on this machine only.

    Args:
        folder: absolute, without links.
        mounts: text of ``/proc/mounts``.
    """
    nearest, is_local = "", False
    for line in mounts.splitlines():
        _, escaped, kind, options = line.split(" ")[:4]
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), escaped)
        # of two at the same point the later one hides the other
        if os.path.commonpath([point, folder]) == point and len(point) >= len(nearest):
            nearest, is_local = point, kind in _LOCAL_TYPES or not _LOCAL_OPTIONS.isdisjoint(options.split(","))
    return is_local


@dataclass(frozen=True)
class _Owner:
    """The text of an owner.

    Attributes:
        job: the scheduler's id, where there is one.
        since: when it took the folder, in UTC.
        way: "flock" or "lease".
        token: drawn by chance: which ownership this is.
        renewals: of the text, so that each is another text.
        machine: within which process ids mean the same.
        start_ticks: when the process began, since its machine was booted: process ids come again.
    """

    host: str
    pid: int
    job: str | None
    since: str
    way: str
    token: str
    renewals: int
    machine: str
    start_ticks: int | None

    @classmethod
    def this_process(cls, way: str) -> "_Owner":
        jobs = (os.environ.get(name) for name in _JOB_VARIABLES)
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            job=next((job for job in jobs if job and job != "none"), None),  # torch's launcher says none for none
            since=datetime.now(UTC).isoformat(timespec="seconds"),
            way=way,
            token=uuid.uuid4().hex,
            renewals=0,
            machine=_machine(),
            start_ticks=_start_ticks(os.getpid()),
        )

    @classmethod
    def parse(cls, text: str) -> "_Owner | None":
        """None where the text names no owner: half written, or of another version."""
        try:
            owner = cls(**json.loads(text))
        except (ValueError, TypeError):
            return None
        return owner if isinstance(owner.pid, int) and owner.pid > 0 else None

    def as_text(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    def __str__(self) -> str:
        job = "" if self.job is None else f", job {self.job}"
        return f"process {self.pid} on {self.host}{job}, since {self.since}"

    def is_on_this_machine(self) -> bool:
        return bool(self.machine) and self.machine == _machine()

    def runs(self) -> bool:
        """Whether the process is there; only its own machine can tell."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # another user's
        start_ticks = _start_ticks(self.pid)
        return None in (start_ticks, self.start_ticks) or start_ticks == self.start_ticks


def _describe(text: str) -> str:
    owner = _Owner.parse(text)
    return "another process" if owner is None else f"another process ({owner})"


def _machine() -> str:
    """This boot and this space of process ids: containers of one machine do not see each other's processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_ticks(pid: int) -> int | None:
    """When a process began; -1 for one that has ended and was not waited for, None where that cannot be read."""
    try:
        # the second field is the program's name in parentheses, which may hold anything
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return -1 if fields[0] in "ZX" else int(fields[19])


class _Sign(Enum):
    """What a look at the folder found."""

    FREE = auto()
    """Nobody's, or of a process that is known to be gone."""
    SILENT = auto()
    """Its owner was not heard of for as long as a lease lasts."""
    UNKNOWN = auto()
    """Its owner may be dead; it takes longer to tell."""
    OWNED = auto()


class _Newcomer:
    """Looks again and again whether a folder is free, and takes it once it is."""

    def __init__(self, folder: Path, wait_seconds: float, say: Callable[[str], None], refusal: str) -> None:
        self._folder = folder
        self._path = folder / LOCK_NAME
        self._wait_seconds = wait_seconds
        self._deadline = _clock() + wait_seconds
        self._say = say
        self._refusal = refusal
        self._said: set[_Sign] = set()
        self._seen: str | None = None
        self._unchanged_since = 0.0

    def take(self) -> "_Ownership":
        """Returns once this process owns the folder."""
        has_locks = not locks_are_local(os.path.realpath(self._folder), _mounts())
        while True:
            try:
                descriptor = _flock(self._path) if has_locks else None
            except BlockingIOError:
                self._wait(_Sign.OWNED, _read(self._path))
                continue
            ownership = _Ownership(self._path, descriptor)
            try:
                looked = _clock()  # before reading: a process that is suspended in between has not watched
                text = _read(self._path)
                sign = self._judge(text, looked, has_lock=descriptor is not None)
                if sign in (_Sign.FREE, _Sign.SILENT) and ownership.begin(text, settled=sign is _Sign.FREE):
                    return ownership
            except BaseException:
                ownership.end()
                raise
            ownership.end()
            self._wait(sign, text)

    def _judge(self, text: str, looked: float, has_lock: bool) -> _Sign:
        owner = _Owner.parse(text)
        # with the lock in hand, only a lease may still be somebody's
        if not text.strip() or (has_lock and (owner is None or owner.way == "flock")):
            return _Sign.FREE
        if owner is not None and owner.is_on_this_machine():
            return _Sign.OWNED if owner.runs() else _Sign.FREE
        if text != self._seen:
            is_first_look = self._seen is None
            self._seen, self._unchanged_since = text, looked
            return _Sign.UNKNOWN if is_first_look else _Sign.OWNED
        return _Sign.SILENT if looked - self._unchanged_since >= LEASE_SECONDS else _Sign.UNKNOWN

    def _wait(self, sign: _Sign, text: str) -> None:
        """Sleeps until the next look; a living owner is refused once time is up."""
        owner = _describe(text)
        if sign is _Sign.OWNED and _clock() >= self._deadline:
            raise UserError(self._refusal.format(folder=self._folder, owner=owner))
        if sign not in self._said:
            self._said.add(sign)
            if sign is _Sign.OWNED:
                self._say(f"{self._folder} is in use by {owner}: waiting up to {self._wait_seconds:g} s for it to end")
            if sign is _Sign.UNKNOWN:
                self._say(
                    f"{self._folder} was left by {owner}, or is in use by it: it is taken over unless it gives a sign "
                    f"of life within {LEASE_SECONDS:g} s"
                )
        time.sleep(POLL_SECONDS)


class _Ownership:
    """A folder that this process takes, keeps and gives back.

    Args:
        path: of the file that says so.
        descriptor: of that file, locked; None where it is kept by a lease.
    """

    def __init__(self, path: Path, descriptor: int | None) -> None:
        self._path = path
        self._descriptor = descriptor
        self._owner = _Owner.this_process("lease" if descriptor is None else "flock")
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, found: str, settled: bool) -> bool:
        """Takes the folder; returns whether that went well, or another was faster.

        Args:
            found: the text that is there.
            settled: whether nobody can come back to it. Else its owner is given the time to find that it was taken.
        """
        if not self._write(only_over=found):
            return False
        if self._descriptor is None or not settled:
            time.sleep(SETTLE_SECONDS if settled else RENEW_SECONDS + SETTLE_SECONDS)
            if not self._is_there():
                return False
        self._thread = threading.Thread(target=self._keep, name="ownership", daemon=True)
        self._thread.start()
        return True

    def end(self) -> None:
        """Gives the folder back, as far as it was taken."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        with suppress(OSError):  # it then lapses by itself
            if self._is_there():
                if self._descriptor is None:
                    self._path.unlink()
                else:
                    os.ftruncate(self._descriptor, 0)
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _is_there(self) -> bool:
        return self._owner.token in _read(self._path)

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
        temporary = self._path.with_name(f"{LOCK_NAME}-{self._owner.token}")
        try:
            temporary.write_text(text)
            if only_over is not None and _read(self._path) != only_over:
                return False
            os.replace(temporary, self._path)
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def _keep(self) -> None:
        """Renews the text until the end of the block."""
        renewed = _clock()
        while not self._ended.wait(RENEW_SECONDS):
            began = _clock()
            try:
                self._renew(is_late=began - renewed >= LEASE_SECONDS)
                failure = "it took too long"
                is_lost = _clock() - began >= LEASE_SECONDS
            except OSError as error:
                failure = str(error)
                is_lost = _clock() - renewed >= LEASE_SECONDS
            else:
                renewed = began
            if is_lost and self._descriptor is None:
                self._lose(f"could not be renewed for {LEASE_SECONDS:g} s ({failure})")

    def _renew(self, is_late: bool) -> None:
        text = _read(self._path)
        if text.strip() and self._owner.token not in text:
            self._lose(f"was taken over by {_describe(text)}")
        if not text.strip() and is_late and self._descriptor is None:
            self._lose("is gone: another process may have had it meanwhile")
        self._owner = replace(self._owner, renewals=self._owner.renewals + 1)
        self._write()

    def _lose(self, why: str) -> None:
        """Ends this process, which must not write beside the folder's next owner."""
        try:
            _say_on_stderr(f"error: {self._path} {why}; process {os.getpid()} no longer owns the folder and ends.")
        finally:
            os._exit(1)


def _flock(path: Path) -> int | None:
    """A descriptor of the locked file; None where the file system has no locks.

    Raises:
        BlockingIOError: Another process has locked it.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_current = path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())
        except OSError as error:
            os.close(descriptor)
            if error.errno in _NO_LOCKS:
                return None
            raise
        if is_current:
            return descriptor
        os.close(descriptor)  # it was replaced or removed since it was opened


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def _mounts() -> str:
    try:
        return Path("/proc/mounts").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


def _clock() -> float:
    """Seconds that pass while the machine sleeps, too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
