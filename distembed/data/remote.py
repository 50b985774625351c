"""Files at URLs: object stores and web servers, read and written with retries, by fsspec.

A failing call is retried after 0.5, 1, 2 and 4 seconds; a file that breaks while it is read is resumed where it
broke. A call that cannot succeed, as for a missing name, fails at once. Packages for protocols are fsspec's own:
``s3fs`` for ``s3://``, ``gcsfs`` for ``gs://``, ``aiohttp`` for ``https://``.

Every function that asks a server raises a :class:`UserError` where the file is not there or may not be read or written,
and a :class:`TemporaryFailure` where five tries failed.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path, PurePosixPath
from typing import Any, Concatenate, ParamSpec, TypeVar

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from distembed.base.errors import RunError, TemporaryFailure, UserError, one_line
from distembed.base.files import whole_file

P = ParamSpec("P")
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
    """The size and version of a file, as its server gives them."""

    url: str
    num_bytes: int | None  # None where the server does not say
    version: str  # a text that changes with the file, as an ETag does; empty where the server sends none


def is_url(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a URL, and none of a local file; a ``Path`` is never one, since it has lost a slash."""
    return isinstance(path, str) and "://" in path


def file_system(
    url: str, refusal: str = "can be neither read nor written; give a URL that fsspec knows"
) -> tuple[Any, str]:
    """Returns fsspec's file system for a URL or a local path, and the path within it, without a trailing slash.

    Raises a UserError, with the text ``refusal``, for an unknown protocol or one whose package is not installed.
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
    """Returns the URL of a name, which may have slashes, within the folder of a URL."""
    return f"{url.rstrip('/')}/{name}"


def _retried(action: str) -> Callable[[Callable[Concatenate[str, P], T]], Callable[Concatenate[str, P], T]]:
    """Decorates a function of a URL: calls it up to five times, with growing pauses, while it fails temporarily.

    A permanent failure becomes a UserError at once, and the fifth temporary failure a TemporaryFailure; their texts say
    that the URL "cannot {action}". UserErrors of the function itself pass unchanged.
    """

    def decorate(do: Callable[Concatenate[str, P], T]) -> Callable[Concatenate[str, P], T]:
        @wraps(do)
        def retried(url: str, /, *args: P.args, **options: P.kwargs) -> T:
            retrying = Retrying(
                stop=stop_after_attempt(TRIES),
                wait=wait_exponential(FIRST_WAIT_SECONDS),
                retry=retry_if_exception(lambda raised: not _is_permanent(_cause(url, raised))),
                reraise=True,
            )
            try:
                return retrying(do, url, *args, **options)
            except UserError:
                raise
            except Exception as raised:
                error = _cause(url, raised)
                if _is_permanent(error):
                    is_missing = isinstance(error, FileNotFoundError) or getattr(error, "status", None) == _NOT_FOUND
                    reason = "it does not exist" if is_missing else one_line(error)
                    raise UserError(f"{url} cannot {action}: {reason}.") from error
                raise TemporaryFailure(
                    f"{url} cannot {action}: {TRIES} tries failed, the last with {one_line(error)}; see whether the "
                    "server can be reached, and begin the same command again."
                ) from error

        return retried

    return decorate


@_retried("be found")
def find_remote(url: str) -> RemoteFile:
    """Returns the size and version of one file."""
    files, path = _fresh_file_system(url)
    return _remote_file(url, files.info(path))


@_retried("be listed")
def list_remote(url: str, may_be_empty: bool = False) -> list[RemoteFile]:
    """Returns the files at a URL in the order of their URLs: one file, the matches of a pattern, or a folder's files.

    In a folder, leaves out subfolders and names with a leading . or _. Raises a UserError if no file is found, unless
    the place ``may_be_empty``, or missing.
    """
    files, path = _fresh_file_system(url)
    if may_be_empty and _is_missing(url, files, path):
        return []
    if "*" in path or "[" in path:
        entries, nothing = files.glob(path, detail=True).values(), "matches no file"
    elif (info := files.info(path)).get("type") != "directory":
        return [_remote_file(url, info)]
    else:
        entries, nothing = files.ls(path, detail=True), "is a folder without files"
        entries = [entry for entry in entries if not PurePosixPath(entry["name"]).name.startswith((".", "_"))]
    remote_files = _described(files, [entry for entry in entries if entry["type"] == "file"])
    if not remote_files and not may_be_empty:
        raise UserError(f"{url} {nothing}; name what is there.")
    return remote_files


def _is_missing(url: str, files: Any, path: str) -> bool:
    try:
        files.info(path)
    except FileNotFoundError as error:  # ``exists`` is false after any error
        if isinstance(_cause(url, error), FileNotFoundError):
            return True
        raise
    return False


@_retried("be listed")
def walk_remote(url: str) -> list[RemoteFile]:
    """Returns all files in a folder and in its folders, by name; none where the folder is missing."""
    files, path = _fresh_file_system(url)
    return _described(files, files.find(path, detail=True).values())


def open_remote(url: str) -> io.BufferedReader:
    """Opens a file for reading from anywhere; a broken read is resumed at the byte where it broke."""
    return io.BufferedReader(_ResumingReader(url), _COPY_BYTES)


def read_remote(url: str) -> bytes:
    """Returns the bytes of a small file."""
    with open_remote(url) as file:
        return file.read()


@_retried("be read")
def read_range(url: str, start: int, stop: int) -> bytes:
    """Returns the bytes ``[start, stop)`` of a file, in one request."""
    files, path = file_system(url)
    data = bytes(files.cat_file(path, start=start, end=stop))
    if len(data) != stop - start:
        raise OSError(f"{len(data):,} bytes came where {stop - start:,} were asked for")
    return data


def fetch(url: str, path: Path) -> None:
    """Copies a remote file to a local one, which appears whole or not at all."""
    with open_remote(url) as source, whole_file(path) as temporary, open(temporary, "wb") as target:
        shutil.copyfileobj(source, target, _COPY_BYTES)


def upload(path: Path, url: str) -> None:
    """Copies a local file to a URL; repeats the copy while the size at the URL differs, and then raises a RunError."""
    # The size may differ if another process, believed dead, still writes the same file on a file system that does not
    # replace files at once.
    for _ in range(TRIES):
        _put_file(url, path)
        arrived, sent = find_remote(url).num_bytes, path.stat().st_size
        if arrived == sent:
            return
    raise RunError(f"{url} has {arrived} bytes where {sent} were sent; begin the same command again.")


@_retried("be written")
def _put_file(url: str, path: Path) -> None:
    files, target = file_system(url)
    files.makedirs(target.rpartition("/")[0], exist_ok=True)
    files.put_file(str(path), target)


@_retried("be removed")
def remove_remote(url: str) -> None:
    """Removes a file, if it is there."""
    files, path = file_system(url)
    with suppress(FileNotFoundError):  # perhaps a try before this one has removed it
        files.rm_file(path)


class _ResumingReader(io.RawIOBase):
    """Reads a remote file without a buffer, and opens it again where it broke, if its version is unchanged."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._remote, self._position = find_remote(url), 0
        self._opened: Any = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._remote.num_bytes is not None

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if self._remote.num_bytes is None:
            raise io.UnsupportedOperation(f"{self._remote.url} has no known size")
        position = offset + (0, self._position, self._remote.num_bytes)[whence]
        if position != self._position and self._opened is not None and not self._opened.seekable():
            self._opened = None
        self._position = position
        return position

    def readinto(self, buffer: Any) -> int:
        total = self._remote.num_bytes
        if total is not None and self._position >= total:
            return 0
        data = _retried("be read")(self._read)(self._remote.url, len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _read(self, url: str, size: int) -> bytes:
        """Reads at most ``size`` bytes at the position; after a failure the next call opens the file again."""
        try:
            self._opened = self._opened or self._open(url)
            if self._opened.seekable():
                self._opened.seek(self._position)
            data = bytes(self._opened.read(size))
            if not data and self._remote.num_bytes is not None:
                raise OSError(f"it ended after {self._position:,} bytes of {self._remote.num_bytes:,}")
        except Exception:
            self._opened = None
            raise
        return data

    def _open(self, url: str) -> Any:
        """Opens the file, if it is unchanged; one that cannot seek is read, and dropped, up to the position."""
        files, path = _fresh_file_system(url)
        if _remote_file(url, files.info(path)) != self._remote:
            raise UserError(f"{url} was changed while it was read; begin the same command again.")
        opened = files.open(path, "rb", block_size=_BLOCK_BYTES)
        left = 0 if opened.seekable() else self._position
        while left and (skipped := opened.read(min(left, _COPY_BYTES))):
            left -= len(skipped)
        return opened


def _fresh_file_system(url: str) -> tuple[Any, str]:
    """Returns :func:`file_system` of a URL after dropping cached listings, which may lack recent changes."""
    files, path = file_system(url)
    files.invalidate_cache()
    return files, path


def _remote_file(url: str, info: dict[str, Any]) -> RemoteFile:
    if info.get("type") == "directory":
        raise UserError(f"{url} is a folder; name the files in it.")
    version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
    return RemoteFile(url, info.get("size"), version)


def _described(files: Any, entries: Iterable[dict[str, Any]]) -> list[RemoteFile]:
    remote_files = (_remote_file(str(files.unstrip_protocol(entry["name"])), entry) for entry in entries)
    return sorted(remote_files, key=lambda file: file.url)


def _is_permanent(error: BaseException) -> bool:
    """Returns whether a retry would fail again: a missing file, no permission or credentials, most HTTP 4xx answers."""
    status = getattr(error, "status", None)
    if isinstance(status, int) and 400 <= status < 500:
        return status not in _TRANSIENT_STATUS
    return isinstance(error, _PERMANENT) or not isinstance(error, Exception) or "Credential" in type(error).__name__


def _cause(url: str, error: BaseException) -> BaseException:
    """Returns the true cause of an error: for HTTP, fsspec reports any failure as FileNotFoundError with a cause."""
    is_any_failure = isinstance(error, FileNotFoundError) and url.startswith(("http://", "https://"))
    return error.__cause__ if is_any_failure and isinstance(error.__cause__, Exception) else error
