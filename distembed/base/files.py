"""Files that appear whole or not at all, JSON files, room on disks, and places of output.

A place of output is checked before the work. Only pages and charts that distembed has made itself, which say so at
their beginning, are replaced without being asked.
"""

import errno
import json
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from distembed.base.errors import RunError, UserError
from distembed.base.units import format_bytes
from distembed.base.version import __version__

CONFIGS = Path(__file__).parents[1] / "configs"
"""Configs of the installed package; in a checkout a link to the folder at its top."""
_MOST_JSON_BYTES = 1 << 28
"""Size of the largest JSON file that is read."""
MADE_BY = f"distembed {__version__}"
"""Name of the maker in pages and charts."""
_MARKS = (b'<meta name="generator" content="distembed ', b"<dc:title>distembed ", b"Software\0distembed ")
"""How a page of HTML, a chart of SVG and one of PNG say that distembed made them."""
_HEAD_BYTES = 4096


@contextmanager
def whole_file(path: Path, make_folder: bool = True, flush: bool = True) -> Iterator[str]:
    """Yields the name of a temporary file, which replaces ``path`` at the end of the block, or is removed on an error.

    A file that is not flushed to disk may be lost when the machine crashes.

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
    """Yields the path of a hidden file in the same folder, which replaces ``path`` at the end of the block.

    Its name is random, so that several processes may write ``path`` at once; the last one wins. The file is not flushed
    to disk, and remains if the block fails.
    """
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
    yield temporary
    temporary.replace(path)


def write_text(path: Path, text: str, make_folder: bool = False, flush: bool = True) -> None:
    """Writes a text file in UTF-8, whole or not at all.

    A missing folder is made only with ``make_folder``: the folder of a run that was deleted while the run was at work
    must not come back with this file alone.
    """
    with whole_file(path, make_folder, flush) as temporary:
        Path(temporary).write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Writes indented JSON as :func:`write_text` does text; floats that JSON cannot hold become null."""
    write_text(path, json.dumps(finite(value), indent=2) + "\n")


def read_regular_file(path: Path, most_bytes: int) -> bytes:
    """Returns the bytes of a regular file; a pipe, which would block, and an endless device are errors.

    Raises:
        OSError: The file cannot be read, is no regular one, or is larger than ``most_bytes``.
        ValueError: No file can have the path.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is no regular file")
        if status.st_size > most_bytes:
            raise OSError(f"it has {status.st_size:,} bytes, which is more than {most_bytes:,}")
        return file.read()


def read_json(path: Path, remedy: str) -> Any:
    """Returns the value of a JSON file; ``remedy`` ends the UserError where it cannot be read or is not JSON."""
    try:
        return json.loads(read_regular_file(path, _MOST_JSON_BYTES))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}; {remedy}.") from error
    except (ValueError, RecursionError) as error:  # ValueErrors are damaged text, RecursionErrors endless nesting
        raise UserError(f"{path} cannot be read: it is not valid JSON ({error}); {remedy}.") from error


def read_folder_json(path: Path, kind: str, remedy: str) -> Any:
    """Returns the value of the JSON file that describes its folder, which is a ``kind``; see :func:`read_json`."""
    if not path.parent.is_dir():
        raise UserError(f"the {kind} folder {path.parent} does not exist; {remedy}.")
    if not path.exists():
        raise UserError(f"{path.parent} is no {kind}: it has no {path.name}; {remedy}.")
    return read_json(path, remedy)


def require_inside(path: Any, field: str, file: Path) -> str:
    """Returns ``path``, the value of ``field`` in a JSON file; a UserError unless it stays in the file's folder.

    Its text alone is checked. Links in the folder may lead out of it: the folder's owner made them.
    """
    inside = isinstance(path, str) and path not in ("", ".") and "\0" not in path
    if not inside or PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or not _encodable(path):
        raise UserError(
            f"{file}: {field} is {path!r}; it must be a path inside {file.parent}, relative to it and without '..': "
            "the file was changed, or comes from someone who should not be trusted."
        )
    return str(path)


def _encodable(path: str) -> bool:
    """Returns whether the system can be asked for a path; a path with half of a character cannot."""
    try:
        os.fsencode(path)
    except UnicodeError:
        return False
    return True


def finite(value: Any) -> Any:
    """Returns a nested value with every float that JSON cannot hold replaced by None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not (value - value == 0):
        return None
    return value


def free_space(folder: Path) -> str:
    """Returns the free space on the disk of a folder as text, ``1,234 MiB``; raises OSError for a missing folder."""
    return f"{shutil.disk_usage(folder).free >> 20:,} MiB"


def require_free_space(path: Path, needed_bytes: int, remedy: str) -> None:
    """Refuses output of at least ``needed_bytes`` for which the disk of ``path``, which need not exist, lacks room."""
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
    """Returns the deepest folder on the way to a path that exists."""
    absolute = Path(os.path.realpath(path))
    return next((folder for folder in (absolute, *absolute.parents) if os.path.isdir(folder)), Path("/"))


@contextmanager
def full_disk_explained(
    explain: Callable[[Exception], str], kinds: tuple[type[Exception], ...] = (OSError,), max_file_size: bool = False
) -> Iterator[None]:
    """Turns the system's error of a full disk or an exhausted quota, in the block, into a RunError.

    Args:
        explain: Returns the text of the error, given the system's error.
        kinds: Exception classes that may carry the system's error; all other errors are raised as they are.
        max_file_size: Whether exceeding the limit on a file's size (EFBIG) counts as a full disk.
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
    """Returns the end of an error message: the room on a folder's disk, where it is known, and a remedy."""
    try:
        return f"; {free_space(folder)} are left. Free space, or choose another folder."
    except OSError:
        return "; choose another folder."


def require_file(option: str, file: Path, overwrite: bool, may_replace_own: bool = False) -> None:
    """Makes sure, before the work, that a file can be written; ``option`` names it in the error.

    An existing file needs ``overwrite``, unless it is a page or a chart of distembed and ``may_replace_own`` is set.
    """
    file_type = _kind(option, file)
    if file_type == stat.S_IFDIR:
        raise UserError(f"{option} {file} is a folder; name a file.")
    if file_type not in (None, stat.S_IFREG):
        raise UserError(f"{option} {file} is no regular file, which would be lost; name another one.")
    if file_type is not None and not overwrite and not (may_replace_own and _is_own(file)):
        raise UserError(f"{option} {file} exists already; name a new file, or add --overwrite to replace it.")
    _require_files_in(option, file, file.absolute().parents)


def require_folder(option: str, folder: Path) -> None:
    """Makes sure, before the work, that files can be written to a folder, which need not exist yet."""
    file_type = _kind(option, folder)
    if file_type not in (None, stat.S_IFDIR):
        raise UserError(f"{option} {folder} is a file; give a folder.")
    _require_files_in(option, folder, [folder.absolute(), *folder.absolute().parents])


def _kind(option: str, path: Path) -> int | None:
    """Returns the type of the file that a path names, links followed; None where there is none."""
    if any("\ud800" <= character <= "\udfff" for character in str(path)):  # bytes that are not UTF-8
        raise UserError(f"{option} {ascii(str(path))} is not written in UTF-8; name another place.")
    try:
        return stat.S_IFMT(os.stat(path).st_mode)
    except FileNotFoundError:
        if os.path.islink(path):
            raise UserError(f"{option} {path} is a link to a missing file or folder; name another place.") from None
        return None
    except NotADirectoryError:
        return None  # a file stands in the place of a folder: _require_files_in names it in its error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{option} {path} cannot be written: {reason}; name another place.") from error


def _require_files_in(option: str, path: Path, folders: Sequence[Path]) -> None:
    """Makes sure that files can be made in the first folder that is there."""
    existing = next(folder for folder in folders if os.path.lexists(folder))
    if not existing.is_dir():
        raise UserError(f"{option} {path} cannot be written: {existing} is a file and no folder; name another one.")
    try:
        # permissions alone are not enough: a file system may be read-only, or none for files
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise RunError(
            f"{option} {path} cannot be written: no file can be made in {existing} ({error}); choose another folder."
        ) from error


def _is_own(file: Path) -> bool:
    """Returns whether distembed made a page or a chart."""
    with file.open("rb") as opened:
        head = opened.read(_HEAD_BYTES)
    return any(mark in head for mark in _MARKS)
