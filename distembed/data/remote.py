"""Files at URLs: object stores and web servers, read and written with retries, by fsspec.

What fails for a while is tried again after 0.5, 1, 2 and 4 seconds; what was read of a file is not read again, but for
servers that cannot begin in the middle of one. What cannot succeed, such as a name that is not there, fails at once.
Packages for protocols are fsspec's own: ``s3fs`` for ``s3://``, ``gcsfs`` for ``gs://``, ``aiohttp`` for ``https://``.

Beneath, clients of object stores try again by themselves; this takes over where they give up, or know nothing of it,
as when a connection breaks within an answer.
"""

from __future__ import annotations

import io
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from distembed.errors import RunError, TemporaryFailure, UserError, one_line
from distembed.files import whole_file

T = TypeVar("T")

TRIES = 5
FIRST_WAIT_SECONDS = 0.5
_BLOCK_BYTES = 8 << 20
_COPY_BYTES = 1 << 20
_PERMANENT = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError, UserError)
_NOT_FOUND = 404
_TRANSIENT_STATUS = (408, 425, 429)
_VERSIONS = ("ETag", "etag", "md5Hash", "content_md5", "LastModified", "last_modified", "mtime", "created")
"""How file systems say, in their details of a file, that it is still the same."""


@dataclass(frozen=True)
class RemoteFile:
    """What is known of a file before it is read.

    Attributes:
        url: Its URL.
        num_bytes: Its size; None where the server does not say.
        version: A text that changes with the file, such as an ETag; empty where the server does not say.
    """

    url: str
    num_bytes: int | None
    version: str


def is_url(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a URL, and none of a local file; a ``Path`` is never one, since it has lost a slash."""
    return isinstance(path, str) and "://" in path


def file_system(
    url: str, refusal: str = "can be neither read nor written; give a URL that fsspec knows"
) -> tuple[Any, str]:
    """Returns fsspec's file system for a URL or a local path, and the path within it.

    Args:
        url: The URL.
        refusal: What is said of a URL that fsspec does not know, and what to do.

    Raises:
        UserError: Fsspec does not know the URL's protocol, or the package for it is not installed.
    """
    import fsspec

    try:
        files, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise UserError(f"{url} needs a package that is not installed: {error}") from error
    except (ValueError, OSError) as error:
        raise UserError(f"{url} {refusal} ({error}).") from error
    return files, str(path).rstrip("/")


def join_url(url: str, name: str) -> str:
    """Returns the URL of what has this name, which may have slashes, within the folder of a URL."""
    return f"{url.rstrip('/')}/{name}"


def find_remote(url: str) -> RemoteFile:
    """Returns what is known of one file.

    Raises:
        UserError: There is no such file.
        TemporaryFailure: The server does not answer.
    """
    files, path = file_system(url)
    return _remote_file(url, retried(url, "be found", lambda: _info(files, path)))


def list_remote(url: str) -> list[RemoteFile]:
    """Returns the files that a URL stands for, by name: those that a pattern matches, those in a folder, or one file.

    Files whose name begins with a point or an underscore are left out of folders, as other readers of datasets do.

    Args:
        url: URL of a file or folder, or with ``*`` and ``[...]`` in it.

    Raises:
        UserError: There is nothing there.
        TemporaryFailure: The server does not answer.
    """
    files, path = file_system(url)
    return retried(url, "be listed", lambda: _list(files, path, url))


def walk_remote(url: str) -> list[RemoteFile]:
    """Returns all files in a folder and in its folders, by name; none where there is no such folder.

    Raises:
        UserError: The folder may not be read.
        TemporaryFailure: The server does not answer.
    """
    files, path = file_system(url)

    def walk() -> list[dict[str, Any]]:
        files.invalidate_cache()
        return list(files.find(path, detail=True).values())

    found = retried(url, "be listed", walk)
    return sorted((_described(files, entry) for entry in found), key=lambda file: file.url)


def open_remote(url: str) -> io.BufferedReader:
    """Opens a file for reading from anywhere; what breaks while it is read is resumed at the byte where it broke.

    Raises:
        UserError: There is no such file.
        TemporaryFailure: The server does not answer.
    """
    return io.BufferedReader(_ResumingReader(url), _COPY_BYTES)


def read_remote(url: str) -> bytes:
    """Returns the bytes of a small file.

    Raises:
        UserError: There is no such file.
        TemporaryFailure: The server does not answer.
    """
    with open_remote(url) as file:
        return file.read()


def read_range(url: str, start: int, stop: int) -> bytes:
    """Returns the bytes ``[start, stop)`` of a file, in one request.

    Raises:
        UserError: There is no such file.
        RunError: The server does not answer, or the file ends before.
    """
    files, path = file_system(url)

    def read() -> bytes:
        data = bytes(files.cat_file(path, start=start, end=stop))
        if len(data) != stop - start:
            raise OSError(f"{len(data):,} bytes came where {stop - start:,} were asked for")
        return data

    return retried(url, "be read", read)


def fetch(url: str, path: Path) -> None:
    """Copies a remote file to a local one, which appears whole or not at all.

    Raises:
        UserError: There is no such file.
        TemporaryFailure: The server does not answer.
        RunError: The local file cannot be written.
    """
    with open_remote(url) as source, whole_file(path) as temporary, open(temporary, "wb") as target:
        shutil.copyfileobj(source, target, _COPY_BYTES)


def upload(path: Path, url: str) -> None:
    """Copies a local file to a URL, and makes sure that as many bytes have arrived.

    Raises:
        UserError: The URL may not be written.
        TemporaryFailure: The server does not answer.
    """
    files, target = file_system(url)

    def put() -> None:
        files.makedirs(target.rpartition("/")[0], exist_ok=True)
        files.put_file(str(path), target)

    retried(url, "be written", put)
    arrived, sent = find_remote(url).num_bytes, path.stat().st_size
    if arrived != sent:
        raise RunError(f"{url} has {arrived} bytes where {sent} were sent; begin the same command again.")


def remove_remote(url: str) -> None:
    """Removes a file, if it is there.

    Raises:
        UserError: It may not be removed.
        TemporaryFailure: The server does not answer.
    """
    files, path = file_system(url)

    def remove() -> None:
        with suppress(FileNotFoundError):  # perhaps a try before this one has removed it
            files.rm_file(path)

    retried(url, "be removed", remove)


def retried(url: str, action: str, do: Callable[[], T]) -> T:
    """Returns what a function returns, which is called up to five times, with growing pauses, while it fails.

    Args:
        url: What it reads or writes, for errors.
        action: What it does, in words that follow "cannot", for errors.
        do: The function, which may be called again after it failed.

    Raises:
        UserError: It failed in a way that no further call would mend.
        TemporaryFailure: It failed each time.
    """
    for attempt in range(1, TRIES + 1):
        try:
            return do()
        except UserError:
            raise
        except Exception as raised:
            error = _beneath(url, raised)
            if _is_permanent(error):
                raise UserError(f"{url} cannot {action}: {_reason(error)}.") from error
            if attempt == TRIES:
                raise TemporaryFailure(
                    f"{url} cannot {action}: {TRIES} tries failed, the last with {one_line(error)}; see whether the "
                    "server can be reached, and begin the same command again."
                ) from error
            time.sleep(FIRST_WAIT_SECONDS * 2 ** (attempt - 1))
    raise AssertionError("the last try returns or raises")


class _ResumingReader(io.RawIOBase):
    """Reads a remote file without a buffer, and opens it anew where it broke."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._files, self._path = file_system(url)
        self._position = 0
        self._opened: Any = None
        self._is_broken = False
        self._found = find_remote(url)

    def _open(self) -> Any:
        """Opens the file where reading stopped."""
        opened = self._files.open(self._path, "rb", block_size=_BLOCK_BYTES)
        left = self._position
        if left and opened.seekable():
            opened.seek(left)
            return opened
        while left and (skipped := opened.read(min(left, _COPY_BYTES))):
            left -= len(skipped)
        return opened

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._found.num_bytes is not None

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if not self.seekable():
            raise io.UnsupportedOperation(f"{self._url} has no known size")
        from_where = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._found.num_bytes or 0}[whence]
        if from_where + offset != self._position:
            self._position = from_where + offset
            if self._opened is not None and self._opened.seekable():
                self._opened.seek(self._position)
            else:
                self._close()
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        data = retried(self._url, "be read", lambda: self._read(len(view)))
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _read(self, size: int) -> bytes:
        """Reads on, from a file that is opened anew where the last try broke."""
        total = self._found.num_bytes
        if total is not None and self._position >= total:
            return b""
        try:
            if self._opened is None:
                if self._is_broken:
                    self._require_same()
                self._opened = self._open()
            data = bytes(self._opened.read(size))
            if not data and total is not None:
                raise OSError(f"it ended after {self._position:,} bytes of {total:,}")
        except Exception:
            self._is_broken = True
            self._close()
            raise
        return data

    def _require_same(self) -> None:
        """Makes sure that the file is still the one that was opened first.

        Raises:
            UserError: It was replaced meanwhile.
        """
        found = _remote_file(self._url, _info(self._files, self._path))
        if found != self._found:
            raise UserError(f"{self._url} was changed while it was read; begin the same command again.")

    def _close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            with suppress(Exception):  # of a broken connection
                opened.close()

    def close(self) -> None:
        self._close()
        super().close()


def _info(files: Any, path: str) -> dict[str, Any]:
    files.invalidate_cache()
    return dict(files.info(path))


def _remote_file(url: str, info: dict[str, Any]) -> RemoteFile:
    if info.get("type") == "directory":
        raise UserError(f"{url} is a folder; name the files in it.")
    version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
    return RemoteFile(url, info.get("size"), version)


def _described(files: Any, entry: dict[str, Any]) -> RemoteFile:
    """Returns what a listing says of a file."""
    return _remote_file(str(files.unstrip_protocol(entry["name"])), entry)


def _list(files: Any, path: str, url: str) -> list[RemoteFile]:
    files.invalidate_cache()
    if "*" in path or "[" in path:
        found = list(files.glob(path, detail=True).values())
        nothing = "matches no file"
    elif (info := _info(files, path)).get("type") != "directory":
        return [_remote_file(url, info)]
    else:
        found = [entry for entry in files.ls(path, detail=True) if not _name(entry).startswith((".", "_"))]
        nothing = "is a folder without files"
    remote = [_described(files, entry) for entry in found if entry["type"] == "file"]
    if not remote:
        raise UserError(f"{url} {nothing}; name what is there.")
    return sorted(remote, key=lambda file: file.url)


def _name(entry: dict[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rpartition("/")[2]


def _is_permanent(error: Exception) -> bool:
    """Returns whether the same call would fail again: a file that is not there, an answer that denies it."""
    status = getattr(error, "status", None)
    if isinstance(status, int) and 400 <= status < 500:
        return status not in _TRANSIENT_STATUS
    return isinstance(error, _PERMANENT) or "Credential" in type(error).__name__


def _beneath(url: str, error: Exception) -> Exception:
    """Returns why a server did not answer, where fsspec says of any failure that there is no such file."""
    is_any_failure = isinstance(error, FileNotFoundError) and url.startswith(("http://", "https://"))
    return error.__cause__ if is_any_failure and isinstance(error.__cause__, Exception) else error


def _reason(error: Exception) -> str:
    is_missing = isinstance(error, FileNotFoundError) or getattr(error, "status", None) == _NOT_FOUND
    return "it does not exist" if is_missing else one_line(error)
