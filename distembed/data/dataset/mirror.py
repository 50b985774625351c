"""Datasets at URLs: a local folder with the manifest and the files that are read whole, and a cache of row groups.

::

    CACHE/criteo-0123456789abcdef/manifest.json        fetched when a process first opens the dataset
    CACHE/criteo-0123456789abcdef/vocabulary/...       fetched when first read, and kept
    CACHE/criteo-0123456789abcdef/mirror.json          the URL of the dataset
    CACHE/pieces/size                                  bytes of all pieces; locked while pieces are changed
    CACHE/pieces/3f/a1...                              a row group or a footer, by its checksum

The folder's name has a checksum of the manifest, so that a dataset that was prepared again gets another folder. Row
groups are fetched one by one, since a shuffled epoch reads them in random order. All bytes are compared with the
checksums of the manifest, whether they come from the URL or from the cache.

The cache has a bounded size, shared by all processes: the least recently used piece goes first. A piece is counted
before it is written, so that the limit holds at every moment. Trade-off: one process writes at a time, and room is made
by listing all pieces, for a tenth of the limit at once; no index could be left wrong by a kill.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from distembed.base.checksums import checksum_of
from distembed.base.errors import RunError, UserError
from distembed.base.files import read_json, whole_file, write_text
from distembed.data.remote import fetch, find_remote, is_url, join_url, read_range, read_remote

_SPARE_BYTES = 1 << 30  # room on the disk that is left to others


@dataclass(frozen=True)
class PieceCache:
    """A folder of pieces, named by their checksums, with a limit on their total size; processes may share it."""

    folder: Path
    most_bytes: int  # of all pieces; 0 keeps none

    def get(self, checksum: str, fetch: Callable[[], bytes | None]) -> bytes | None:
        """Returns the piece with a checksum from the cache, or calls ``fetch`` and keeps the result if there is room.

        Returns None where ``fetch`` does. Processes that want one piece wait for the first of them to fetch it.
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
        """Stores a piece, removing old pieces if the limit needs it; does nothing if there is still no room.

        The file ``size`` has the bytes of all pieces, and its lock excludes other writers. The piece is added to it
        before it is stored, so that a kill in between makes the count too large, never too small.
        """
        path.parent.mkdir(parents=True, exist_ok=True)  # the folder too, which may have been removed meanwhile
        with open(os.open(self.folder / "size", os.O_RDWR | os.O_CREAT, 0o666), "r+") as size:
            fcntl.flock(size, fcntl.LOCK_EX)
            text = size.read()
            if path.exists():  # a damaged piece, of unknown size: all pieces are counted again
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
        """Removes the least recently used pieces if ``num_bytes`` more exceed the limit; returns the bytes that remain.

        Removes pieces until at least a tenth of the limit is free, since each call has to list all pieces.
        """
        cached = [(path.stat(), path) for path in self.folder.glob("??/*")]
        total = sum(status.st_size for status, _ in cached)
        most_left = self.most_bytes - max(num_bytes, self.most_bytes // 10)
        if total + num_bytes > self.most_bytes:
            for status, path in sorted(cached, key=lambda entry: entry[0].st_mtime_ns):
                if total <= most_left:
                    break
                path.unlink()
                total -= status.st_size
        return total


def _read(path: Path, checksum: str) -> bytes | None:
    """Returns the bytes of a piece and sets its file's time of use; None if the piece is missing or damaged."""
    try:
        with path.open("rb") as file:
            os.utime(file.fileno())
            data = file.read()
    except OSError:  # even if the disk is broken, the piece can be fetched
        return None
    return data if checksum_of(data) == checksum else None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on a file, which is made; runs the block without a lock if the disk refuses."""
    with ExitStack() as opened:
        with suppress(OSError):
            fcntl.flock(opened.enter_context(path.open("w")), fcntl.LOCK_EX)
        yield


MIRROR_FILE = "mirror.json"
DEFAULT_CACHE_BYTES = 100 << 30
_MANIFEST, _LOCK = "manifest.json", ".lock"


@dataclass(frozen=True)
class Mirror:
    """The local folder of a remote dataset."""

    folder: Path
    url: str  # of the dataset
    cache: PieceCache  # of the splits' files, which are not in the folder

    def file_url(self, file: str) -> str:
        return join_url(self.url, file)

    def read(self, file: str, start: int, stop: int, checksum: str) -> bytes | None:
        """Returns bytes ``[start, stop)`` of a file from the cache or the URL; None if the checksum differs twice."""
        return self.cache.get(checksum, partial(self.read_uncached, file, start, stop, checksum))

    def read_uncached(self, file: str, start: int, stop: int, checksum: str) -> bytes | None:
        """Reads as :meth:`read` does, from the URL alone, and does not fill the cache."""
        for _ in range(2):  # bytes that were damaged on their way are whole the second time
            data = read_range(self.file_url(file), start, stop)
            if checksum_of(data) == checksum:
                return data
        return None

    def fetch(self, file: str, again: bool = False) -> None:
        """Downloads a file into the folder if it is missing there, or in any case with ``again``."""
        with locked(self.folder / _LOCK):
            if again or not (self.folder / file).exists():
                fetch(self.file_url(file), self.folder / file)


def dataset_folder(
    dataset: str | os.PathLike[str], cache_dir: str | None = None, cache_bytes: int = DEFAULT_CACHE_BYTES
) -> Path:
    """Returns the local folder of a dataset: a path itself, or for a URL its mirror folder.

    The first call for a URL fetches the manifest and makes the folder; later calls of the process return this folder,
    even if the dataset at the URL has changed.
    """
    return _mirror_folder(str(dataset), cache_dir, cache_bytes) if is_url(dataset) else Path(dataset)


@lru_cache(maxsize=16)
def _mirror_folder(url: str, cache_dir: str | None, cache_bytes: int) -> Path:
    # cached for the life of the process, so that all its parts read one version of the dataset
    try:
        manifest = read_remote(join_url(url, _MANIFEST))
    except UserError as error:
        raise UserError(f"{url} is no dataset: {error} Upload a folder that `distembed prepare` made.") from error
    cache = Path(cache_dir or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "distembed"))
    cache = cache.expanduser().absolute()
    folder, pieces = (
        cache / f"{url.rstrip('/').rpartition('/')[2]}-{checksum_of(url.encode() + manifest)[:16]}",
        cache / "pieces",
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pieces.mkdir(exist_ok=True)
    except OSError as error:
        raise RunError(f"data.cache_dir: {folder} cannot be made ({error}); give another folder.") from error
    with locked(folder / _LOCK):
        with whole_file(folder / _MANIFEST) as temporary:
            Path(temporary).write_bytes(manifest)
        where = {"url": url, "cache": str(pieces), "cache_bytes": cache_bytes}
        write_text(folder / MIRROR_FILE, json.dumps(where, indent=1) + "\n")
    return folder


def mirror_of(folder: Path) -> Mirror | None:
    """Returns the mirror whose local folder this is; None for the folder of a local dataset."""
    path = folder / MIRROR_FILE
    if not path.is_file():
        return None
    where = read_json(path, "remove its folder, which is fetched again")
    return Mirror(folder, where["url"], PieceCache(Path(where["cache"]), where["cache_bytes"]))


def is_remote_dataset(url: str) -> bool:
    """Returns whether there is a dataset at a URL."""
    try:
        find_remote(join_url(url, _MANIFEST))
    except UserError:
        return False
    return True
