"""Pieces of remote files on a local disk: of bounded size, least recently used first to go, shared by processes.

::

    FOLDER/size            bytes of all pieces, in decimal digits; locked while pieces are changed
    FOLDER/3f/a1...        a piece, by its checksum, whole: it was written as FOLDER/new
    FOLDER/fetch-3f        empty; locked by the process that fetches a piece of that folder

A piece counts before it is written, so that the limit holds at every moment; a process that is killed meanwhile leaves
a count that is too large, until room is made.

Trade-off: one process at a time writes, at the speed of memory, and room is made by a look at all pieces, for a tenth
of the limit at a time; there is no list of them, which a kill might leave wrong.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from distembed.base.checksums import checksum_of

_SPARE_BYTES = 1 << 30
"""Room on the disk that is left to others."""


@dataclass(frozen=True)
class PieceCache:
    """Keeps bytes by their checksums; several processes of a machine may use one folder."""

    folder: Path
    most_bytes: int  # of all pieces; 0 keeps none

    def get(self, checksum: str, fetch: Callable[[], bytes | None]) -> bytes | None:
        """Returns the bytes with a checksum, from the cache or fetched; fetched bytes are kept if there is room.

        Args:
            checksum: The checksum.
            fetch: Returns the bytes, or None; one process or thread at a time calls it for a piece.
        """
        path = self.folder / checksum[:2] / checksum[2:]
        data = _read(path, checksum)
        if data is None:
            with locked(self.folder / f"fetch-{path.parent.name}"):
                data = _read(path, checksum)  # another process may have fetched it meanwhile
                if data is None and (data := fetch()) is not None:
                    with suppress(OSError):  # a full disk, or one without locks: the next reader fetches it again
                        self._write(path, data)
        return data

    def _write(self, path: Path, data: bytes) -> None:
        """Keeps a piece, if the limit and the disk have room for it once others made way."""
        path.parent.mkdir(parents=True, exist_ok=True)  # the folder too, which may have been removed meanwhile
        with open(os.open(self.folder / "size", os.O_RDWR | os.O_CREAT, 0o666), "r+") as size:
            fcntl.flock(size, fcntl.LOCK_EX)
            text = size.read()
            if path.exists():  # damaged
                path.unlink()
                text = ""
            num_bytes = int(text) if text.isdecimal() else self._make_room(0)
            if num_bytes + len(data) > self.most_bytes:
                num_bytes = self._make_room(len(data))
            free = shutil.disk_usage(self.folder).free
            is_kept = num_bytes + len(data) <= self.most_bytes and free >= len(data) + _SPARE_BYTES
            size.seek(0)
            size.truncate()
            size.write(str(num_bytes + is_kept * len(data)))
            size.flush()
            if is_kept:
                (self.folder / "new").write_bytes(data)
                os.replace(self.folder / "new", path)

    def _make_room(self, num_bytes: int) -> int:
        """Removes the pieces used longest ago, if there is not room for this much, and returns the bytes left."""
        found = [(path.stat(), path) for path in self.folder.glob("??/*")]
        total = sum(status.st_size for status, _ in found)
        wanted = self.most_bytes - max(num_bytes, self.most_bytes // 10)
        if total + num_bytes > self.most_bytes:
            for status, path in sorted(found, key=lambda each: each[0].st_mtime_ns):
                if total <= wanted:
                    break
                path.unlink()
                total -= status.st_size
        return total


def _read(path: Path, checksum: str) -> bytes | None:
    """Returns a piece, which then counts as used last; None for one that is missing or damaged."""
    try:
        with path.open("rb") as file:
            os.utime(file.fileno())
            data = file.read()
    except OSError:  # even if the disk is broken, the piece can be fetched
        return None
    return data if checksum_of(data) == checksum else None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps other processes and threads out of the block of the same file, where the disk has room and locks."""
    with ExitStack() as opened:
        with suppress(OSError):
            fcntl.flock(opened.enter_context(path.open("w")), fcntl.LOCK_EX)
        yield
