"""Files that appear whole or not at all, JSON files, and errors that say how much room a disk has."""

import errno
import json
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from distembed.base.errors import RunError, UserError
from distembed.base.units import format_bytes

_MOST_JSON_BYTES = 1 << 28
"""Size of the largest JSON file that is read."""


@contextmanager
def whole_file(path: Path, make_folder: bool = True, flush: bool = True) -> Iterator[str]:
    """Yields the name of a temporary file, which replaces ``path`` at the end of the block, or is removed on an error.

    Args:
        path: The file to write.
        make_folder: Whether its folder is made where it is missing.
        flush: Whether the file is flushed to disk before it replaces another; else it is whole for other processes, and
            may be lost when the machine crashes.

    Raises:
        RunError: The file cannot be written; the error says how much room is left on its disk.
    """
    temporary = None
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        with os.fdopen(descriptor):
            yield temporary
            if flush:
                os.fsync(descriptor)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        num_bytes = os.path.getsize(temporary) if temporary and os.path.exists(temporary) else 0
        after = f" after {format_bytes(num_bytes)}" if num_bytes else ""
        raise RunError(f"{path} could not be written ({error}){after}{_room_left(path.parent)}") from error
    finally:
        if temporary is not None:
            with suppress(FileNotFoundError):  # the folder was deleted meanwhile
                os.unlink(temporary)


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Yields the path of a hidden file, which replaces ``path`` at the end of the block, for several writers at once.

    It is not flushed to disk, and stays where the block fails.
    """
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
    yield temporary
    temporary.replace(path)


def write_text(path: Path, text: str, make_folder: bool = False, flush: bool = True) -> None:
    """Writes a text file in UTF-8, whole or not at all.

    A folder that is missing is not made unless asked for: one that was deleted while a run was at work in it must not
    come back with this file alone.

    Args:
        path: The file to write.
        text: Its content.
        make_folder: Whether its folder is made where it is missing.
        flush: Whether it is flushed to disk.

    Raises:
        RunError: The file cannot be written.
    """
    with whole_file(path, make_folder, flush) as temporary:
        Path(temporary).write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Writes indented JSON as :func:`write_text` does text; floats that JSON cannot hold become null.

    Raises:
        RunError: The file cannot be written.
    """
    write_text(path, json.dumps(finite(value), indent=2) + "\n")


def read_regular_file(path: Path, most_bytes: int) -> bytes:
    """Returns the bytes of a file, but neither waits for a pipe nor reads from a device without end.

    Args:
        path: The file to read.
        most_bytes: Size from which on it is not read.

    Raises:
        OSError: The file cannot be read, is no regular one, or is larger.
        ValueError: No file can have such a path.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError("it is no regular file")
        if found.st_size > most_bytes:
            raise OSError(f"it has {found.st_size:,} bytes, which is more than {most_bytes:,}")
        return file.read()


def read_json(path: Path, remedy: str) -> Any:
    """Returns the value of a JSON file.

    Args:
        path: The file to read.
        remedy: What to do where it cannot be read, for the error.

    Raises:
        UserError: The file cannot be read, or is not JSON.
    """
    try:
        return json.loads(read_regular_file(path, _MOST_JSON_BYTES))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}; {remedy}.") from error
    except (ValueError, RecursionError) as error:  # ValueErrors are damaged text, RecursionErrors endless nesting
        raise UserError(f"{path} cannot be read: it is not valid JSON ({error}); {remedy}.") from error


def read_folder_json(path: Path, kind: str, remedy: str) -> Any:
    """Returns the value of the JSON file that describes its folder.

    Args:
        path: The file to read.
        kind: What a folder with such a file is, for the error.
        remedy: What to do where it cannot be read, for the error.

    Raises:
        UserError: The folder or the file is missing, or the file cannot be read or is not JSON.
    """
    if not path.parent.is_dir():
        raise UserError(f"the {kind} folder {path.parent} does not exist; {remedy}.")
    if not path.exists():
        raise UserError(f"{path.parent} is no {kind}: it has no {path.name}; {remedy}.")
    return read_json(path, remedy)


def require_inside(path: Any, field: str, file: Path) -> str:
    """Returns a path that a JSON file gives relative to its folder, if the path stays inside of that by its text.

    Links in the folder are followed wherever they lead: they were made by whoever the folder belongs to.

    Args:
        path: What the file gives.
        field: Where in the file it is given, for the error.
        file: The file.

    Raises:
        UserError: The path is absolute, has a part ``..`` or can be none of a file.
    """
    inside = isinstance(path, str) and path not in ("", ".") and "\0" not in path
    if not inside or PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or not _encodable(path):
        raise UserError(
            f"{file}: {field} is {path!r}; it must be a path inside {file.parent}, relative to it and without '..': "
            "the file was changed, or comes from someone who should not be trusted."
        )
    return str(path)


def _encodable(path: str) -> bool:
    """Returns whether the system can be asked for a path; not, where it has half of a character."""
    try:
        os.fsencode(path)
    except UnicodeError:
        return False
    return True


def finite(value: Any) -> Any:
    """Returns the same nested value with every float that JSON cannot hold replaced by None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not (value - value == 0):
        return None
    return value


def free_space(folder: Path) -> str:
    """Returns the free space on the disk of a folder as text, such as ``1,234 MiB``.

    Raises:
        OSError: The folder is missing.
    """
    return f"{shutil.disk_usage(folder).free >> 20:,} MiB"


def require_free_space(path: Path, needed_bytes: int, remedy: str) -> None:
    """Makes sure that the disk has room for what is about to be written, before any of it is.

    Args:
        path: The file or folder to be written; neither it nor its folder need exist yet.
        needed_bytes: The least that will be written: what would fit must not be refused.
        remedy: What to do, and how the need is known, for the error.

    Raises:
        RunError: The disk has less room.
    """
    free = free_bytes(path)
    if free < needed_bytes:
        raise RunError(
            f"{path} would not fit on its disk: at least {format_bytes(needed_bytes)} are needed, and "
            f"{format_bytes(free)} are free; {remedy}."
        )


def free_bytes(path: Path) -> int:
    """Returns the free bytes of the disk that a file or folder is on, or would be; it need not exist yet."""
    return shutil.disk_usage(nearest_folder(path)).free


def nearest_folder(path: Path) -> Path:
    """Returns the folder that exists, on the way from the root to a path, and lies nearest to the path."""
    absolute = Path(os.path.realpath(path))
    return next((folder for folder in (absolute, *absolute.parents) if os.path.isdir(folder)), Path("/"))


@contextmanager
def full_disk_explained(
    explain: Callable[[Exception], str], kinds: tuple[type[Exception], ...] = (OSError,), max_file_size: bool = False
) -> Iterator[None]:
    """Turns the system's refusal to write more, in the block, into an error of the caller's words.

    Args:
        explain: Returns the text of the error, given the system's.
        kinds: Exceptions that may carry the system's refusal.
        max_file_size: Whether the limit on the size of a file is explained too.

    Raises:
        RunError: The disk or a quota is exhausted.
    """
    explained = (errno.ENOSPC, errno.EDQUOT, *([errno.EFBIG] if max_file_size else []))
    try:
        yield
    except kinds as error:
        # PyArrow's own errors carry the system's text and no number
        if getattr(error, "errno", None) not in explained and "No space left" not in str(error):
            raise
        raise RunError(explain(error)) from error


def _room_left(folder: Path) -> str:
    """Returns the end of an error message: the room on a folder's disk, where it is known, and what to do."""
    try:
        return f"; {free_space(folder)} are left. Free space, or choose another folder."
    except OSError:
        return "; choose another folder."
