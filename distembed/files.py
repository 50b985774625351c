"""Files that appear whole or not at all."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distembed.errors import RunError


@contextmanager
def whole_file(path: Path, make_folder: bool = True) -> Iterator[str]:
    """Yields the name of a temporary file, which replaces ``path`` at the end of the block, or is removed on an error.

    The file is flushed to disk before it replaces another.

    Args:
        path: The file to write.
        make_folder: Whether its folder is made where it is missing.

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
            os.fsync(descriptor)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise RunError(f"{path} could not be written ({error}){_room_left(path.parent)}") from error
    finally:
        if temporary is not None:
            os.unlink(temporary)


def write_text(path: Path, text: str, make_folder: bool = False) -> None:
    """Writes a text file in UTF-8, whole or not at all.

    A folder that is missing is not made unless asked for: one that was deleted while a run was at work in it must not
    come back with this file alone.

    Args:
        path: The file to write.
        text: Its content.
        make_folder: Whether its folder is made where it is missing.

    Raises:
        RunError: The file cannot be written.
    """
    with whole_file(path, make_folder) as temporary:
        Path(temporary).write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Writes indented JSON as :func:`write_text` does text; floats that JSON cannot hold become null.

    Raises:
        RunError: The file cannot be written.
    """
    write_text(path, json.dumps(finite(value), indent=2) + "\n")


def finite(value: Any) -> Any:
    """Returns the same nested value with every float that JSON cannot hold replaced by None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not (value - value == 0):
        return None
    return value


def _room_left(folder: Path) -> str:
    """Returns the end of an error message: the room on a folder's disk, where it is known, and what to do."""
    try:
        return f"; {shutil.disk_usage(folder).free >> 20:,} MiB are left. Free space, or choose another folder."
    except OSError:
        return "; choose another folder."
