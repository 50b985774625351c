"""Pieces of remote files on a local disk: of bounded size, least recently used first to go, shared by processes.

::

    FOLDER/size            what the pieces take, in decimal digits; locked while it is changed
    FOLDER/3f/a1...        a piece, whole: it was written under another name
    FOLDER/fetch-3f        empty; locked by whoever fetches a piece of that folder
    FOLDER/new-...         a piece that is being written, of its final size, locked by its writer

A piece counts from before it is written, so that the limit holds at every moment. Whoever reads a piece that is removed
meanwhile reads on, as files on POSIX systems do. What a killed process has left is removed when room is made.

Trade-off: room is made by a look at all pieces, for a tenth of the limit at a time; there is no list of them, which a
kill might leave wrong.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from distembed.errors import RunError

_SPARE_BYTES = 1 << 30
"""Room on the disk that is left to others."""
_NEW = "new-"


class PieceCache:
    """Keeps bytes by their keys; several processes of a machine may use one folder.

    Args:
        folder: Where the pieces are; made where it is missing.
        most_bytes: Most bytes of all pieces; 0 keeps none.

    Raises:
        RunError: The folder cannot be made.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder, self._most_bytes = folder, most_bytes
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"data.cache_dir: {folder} cannot be made ({error}); give another folder.") from error

    def read(self, key: str) -> bytes | None:
        """Returns a piece that is there, which then counts as used last; None for one that is not."""
        path = self._path(key)
        try:
            with path.open("rb") as file:
                os.utime(file.fileno())
                return file.read()
        except OSError:  # whatever is wrong with the disk, the piece can be had from where it comes from
            return None

    def write(self, key: str, data: bytes) -> None:
        """Keeps a piece, if the limit and the disk have room for it once others made way."""
        try:
            temporary = self._reserve(len(data))
            if temporary is None:
                return
            descriptor, name = temporary
            path = self._path(key)
            with open(descriptor, "wb") as file:  # which keeps the file's lock until it is closed
                file.write(data)
                file.flush()
                path.parent.mkdir(exist_ok=True)
                with self._locked_size() as size:
                    size.num_bytes -= path.stat().st_size if path.exists() else 0
                    os.replace(name, path)
        except OSError:  # a full disk, or one that has no locks: the piece is read from where it comes from again
            return

    @contextmanager
    def fetching(self, key: str) -> Iterator[None]:
        """Lets one process or thread at a time fetch a piece, so that others find it in the cache afterwards."""
        path = self._path(key)
        try:
            file = (self._folder / f"fetch-{path.parent.name}").open("w")
        except OSError:  # a disk that is full or read-only: each fetches for itself
            yield
            return
        with file:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def remove(self, key: str) -> None:
        """Removes a piece, which is damaged."""
        path = self._path(key)
        with suppress(OSError), self._locked_size() as size:
            num_bytes = path.stat().st_size
            path.unlink()
            size.num_bytes -= num_bytes

    def _path(self, key: str) -> Path:
        name = hashlib.sha256(key.encode()).hexdigest()[:40]
        return self._folder / name[:2] / name[2:]

    def _reserve(self, num_bytes: int) -> tuple[int, str] | None:
        """Returns a locked file of this size and its name; None where there is no room."""
        with self._locked_size() as size:
            if size.num_bytes + num_bytes > self._most_bytes:
                size.num_bytes = self._make_room(num_bytes)
            free = shutil.disk_usage(self._folder).free
            if size.num_bytes + num_bytes > self._most_bytes or free < num_bytes + _SPARE_BYTES:
                return None
            descriptor, name = tempfile.mkstemp(prefix=_NEW, dir=self._folder)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.truncate(descriptor, num_bytes)
            size.num_bytes += num_bytes
            return descriptor, name

    @contextmanager
    def _locked_size(self) -> Iterator[_Size]:
        """Yields what the pieces take, to be changed within the block, in which no other process changes it."""
        descriptor = os.open(self._folder / "size", os.O_RDWR | os.O_CREAT, 0o666)
        with open(descriptor, "r+") as file:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            text = file.read()
            size = _Size(int(text) if text.isdecimal() else self._make_room(0))
            yield size
            file.seek(0)
            file.write(str(size.num_bytes))
            file.truncate()

    def _make_room(self, num_bytes: int) -> int:
        """Removes what was used longest ago, if there is not room for this much, and returns what is left."""
        pieces, total = [], 0
        for entry in _files(self._folder):
            with suppress(FileNotFoundError):
                found = entry.stat()
                if not (entry.name.startswith(_NEW) and _is_abandoned(Path(entry.path))):
                    total += found.st_size
                    if not entry.name.startswith(_NEW):
                        pieces.append((found.st_mtime_ns, found.st_size, entry.path))
        if total + num_bytes <= self._most_bytes:
            return total
        wanted = self._most_bytes - max(num_bytes, self._most_bytes // 10)
        for _, size, path in sorted(pieces):
            if total <= wanted:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
            total -= size
        return total


class _Size:
    """The bytes of all pieces."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


def _files(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yields the pieces, and those that are being written."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                with os.scandir(entry.path) as pieces:
                    yield from pieces
            elif entry.name.startswith(_NEW):
                yield entry


def _is_abandoned(path: Path) -> bool:
    """Removes a file that a killed process was writing, and returns whether it was one."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    path.unlink(missing_ok=True)
    return True
