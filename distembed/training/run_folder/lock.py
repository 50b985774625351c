"""One process at a time owns a folder, by the kernel's lock (``flock``) on ``FOLDER/.lock``.

The kernel, or the file server, frees the lock once the process is gone. The text of the file names the owner, for the
error that other processes raise. Trade-off: the file system needs locks. Where it has none, the folder is refused;
where its mount says that they hold on one machine only, other machines are not kept out, and the owner is told so.
"""

import errno
import fcntl
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from distembed.base.errors import FolderInUse, RunError, UserError

LOCK_NAME = ".lock"
DEAD_MACHINE_SECONDS = 120.0
"""How long a job that a scheduler restarted waits for the folder that its dead node owned.

A Linux NFS server keeps the locks of a machine that it lost for 90 s.
"""
IN_USE = "{folder} is in use by {owner}; wait for it to end, or give another --run-dir."
_POLL_SECONDS = 1.0
_JOB_VARIABLES = ("SLURM_JOB_ID", "AWS_BATCH_JOB_ID", "TORCHELASTIC_RUN_ID")
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL}
_LOCAL_OPTIONS = {
    "localflock",  # Lustre
    "localflocks",  # GFS2, OCFS2
    "local_lock=flock",  # NFS
    "local_lock=all",
    "nolock",
}
_LOCAL_TYPES = {"beegfs"}  # unless tuneUseGlobalFileLocks is set in its own configuration, which a mount does not show


def _say_on_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def owned(
    folder: Path, wait_seconds: float = 0.0, say: Callable[[str], None] = _say_on_stderr, refusal: str = IN_USE
) -> Iterator[None]:
    """Owns a folder within the block, in which no other process owns it.

    Args:
        folder: An existing folder.
        wait_seconds: How long to wait for another owner to end; 0 refuses at once.
        say: Prints a line.
        refusal: The error's text, in which ``{folder}`` and ``{owner}`` are filled in.

    Raises:
        FolderInUse: Another process owns the folder.
        UserError: The file system has no locks.
        RunError: The lock file cannot be written.
    """
    path, deadline = folder / LOCK_NAME, time.monotonic() + wait_seconds
    has_said = False
    try:
        while (descriptor := _take(path)) is None:
            owner = _describe_owner(path)
            if time.monotonic() >= deadline:
                raise FolderInUse(refusal.format(folder=folder, owner=owner))
            if not has_said:
                say(f"{folder} is in use by {owner}: waiting up to {wait_seconds:g} s for it to end")
                has_said = True
            time.sleep(_POLL_SECONDS)
        os.ftruncate(descriptor, os.pwrite(descriptor, _this_process().encode(), 0))
        os.fsync(descriptor)  # on NFS, other machines see the text only now
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise UserError(
                f"{folder} lies on a file system without locks ({error}), so that two processes could train into it at "
                "once. Give a folder on a local disk as --run-dir, or mount the file system with locks."
            ) from error
        raise RunError(f"{path} cannot be locked: {error}") from error
    try:
        if locks_are_local(os.path.realpath(folder), _mounted_file_systems()):
            say(f"note: locks in {folder} hold on this machine only; see that no other machine trains into it")
        yield
    finally:
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
        os.close(descriptor)


def _take(path: Path) -> int | None:
    """Returns the descriptor of the locked file, which is made where it is missing; None if another process has it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
            os.close(descriptor)  # the path was replaced or removed since it was opened
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            os.close(descriptor)
            raise


def _this_process() -> str:
    """Returns the text of the lock file: this process, its machine, its scheduler's job, and the time in UTC."""
    text = f"process {os.getpid()} on {socket.gethostname()}"
    for name in _JOB_VARIABLES:
        job = os.environ.get(name, "none")
        if job and job != "none":  # torch's launcher writes "none" where it has no job
            text += f", job {job}"
            break
    return f"{text}, since {datetime.now(UTC).isoformat(timespec='seconds')}"


def _describe_owner(path: Path) -> str:
    """Describes the owner of a folder for a message."""
    with suppress(OSError):
        text = " ".join(path.read_text(encoding="utf-8", errors="replace").split())[:200]
        if text.startswith("process "):
            return f"another process ({text})"
    return "another process"


def locks_are_local(folder: str, mounts: str) -> bool:
    """Returns whether locks in an absolute folder hold on this machine only, by the text of ``/proc/mounts``."""
    nearest, is_local = "", False
    for line in mounts.splitlines():
        _, escaped, kind, options = line.split(" ")[:4]
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), escaped)
        # of two mounts at the same point the later one hides the earlier one
        if os.path.commonpath([point, folder]) == point and len(point) >= len(nearest):
            nearest, is_local = point, kind in _LOCAL_TYPES or not _LOCAL_OPTIONS.isdisjoint(options.split(","))
    return is_local


def _mounted_file_systems() -> str:
    """Returns the text of ``/proc/mounts``, or an empty text."""
    try:
        return Path("/proc/mounts").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
