"""The kernel's lock on a file, and whether a file system's locks hold between machines."""

import errno
import fcntl
import os
import re
from pathlib import Path

_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL}
_LOCAL_OPTIONS = {
    "localflock",  # Lustre
    "localflocks",  # GFS2, OCFS2
    "local_lock=flock",  # NFS
    "local_lock=all",
    "nolock",
}
_LOCAL_TYPES = {"beegfs"}  # unless tuneUseGlobalFileLocks is set in its own configuration, which a mount does not show


def take_flock(path: Path) -> int | None:
    """Locks a file, which is made where it is missing.

    Returns:
        The descriptor of the locked file; None where the file system has no locks.

    Raises:
        BlockingIOError: Another process has locked it.
        OSError: The file cannot be opened.
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
        os.close(descriptor)  # the path was replaced or removed since it was opened


def locks_are_local(folder: str, mounts: str) -> bool:
    """Returns whether locks in a folder are known to hold on this machine only.

    Args:
        folder: Absolute path without symbolic links.
        mounts: The mounted file systems, as :func:`mounted_file_systems` returns them.
    """
    nearest, is_local = "", False
    for line in mounts.splitlines():
        _, escaped, kind, options = line.split(" ")[:4]
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), escaped)
        # of two at the same point the later one hides the other
        if os.path.commonpath([point, folder]) == point and len(point) >= len(nearest):
            nearest, is_local = point, kind in _LOCAL_TYPES or not _LOCAL_OPTIONS.isdisjoint(options.split(","))
    return is_local


def mounted_file_systems() -> str:
    """Returns the text of ``/proc/mounts``; an empty one where there is no such file."""
    try:
        return Path("/proc/mounts").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
