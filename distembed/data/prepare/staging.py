"""A folder that appears whole or not at all.

Everything is written in a hidden folder beside the target, flushed to disk, and renamed. A process that is killed
leaves the hidden folder behind: the next run on the same target removes it, since the lock that the process held is
free. A run that finds the lock taken fails at once and changes nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from distembed.data.dataset.manifest import MANIFEST_NAME
from distembed.data.prepare.inputs import real_path, require_text_name
from distembed.errors import UserError
from distembed.files import free_space

_LOCK_NAME = ".lock"


@contextmanager
def staged_folder(
    output: Path, *, overwrite: bool, kind: str = "dataset", marker: str = MANIFEST_NAME
) -> Iterator[Path]:
    """Gives a folder to write in, which becomes ``output`` when the block ends, and is removed when the block fails.

    Args:
        output: Folder to make; its parents are made as needed.
        overwrite: Whether a folder of the same kind is replaced, which stays until the new one is complete.
        kind: What the folder is, in words.
        marker: Name of the file that every folder of this kind has.

    Raises:
        UserError: ``output`` exists and may not be replaced, cannot be made, or another process is writing it.
    """
    output = real_path(output)  # a link to a dataset stays a link
    require_text_name(output)
    _check_target(output, overwrite, kind, marker)
    with ExitStack() as held:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            with _alone_in(output.parent):
                _clear_remains(output)
                _check_target(
                    output, overwrite, kind, marker
                )  # once more: a run that was killed may have left it aside
                folder = output.with_name(f".{output.name}.preparing-{os.getpid()}")
                folder.mkdir()
                held.callback(shutil.rmtree, folder, ignore_errors=True)
                _lock(held.enter_context(open(folder / _LOCK_NAME, "w")), output)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
            raise UserError(f"the {kind} {output} cannot be made: {error}; name another output") from error
        yield folder
        _flush(folder)
        with _alone_in(output.parent):
            (folder / _LOCK_NAME).unlink()
            _swap(folder, output, overwrite)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Lets one process at a time begin or end what it makes in a folder, where the file system has locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _check_target(output: Path, overwrite: bool, kind: str, marker: str) -> None:
    """Makes sure that nothing is at ``output``, or what may be replaced.

    Raises:
        UserError: Something is there that may not be replaced.
    """
    if not os.path.lexists(output):
        return
    if not overwrite:
        raise UserError(f"{output} exists already: name another output, remove it, or replace it with --overwrite")
    if not (output / marker).is_file():
        raise UserError(f"{output} is no {kind} (no {marker}), so it is not overwritten: name another")


def _clear_remains(output: Path) -> None:
    """Removes what processes that have ended left behind.

    Raises:
        UserError: A process is still writing the same output.
    """
    for remains in output.parent.glob(f".{_escaped(output.name)}.preparing-*"):
        try:
            with open(remains / _LOCK_NAME, "r+") as lock:
                _lock(lock, output)
        except FileNotFoundError:
            pass
        shutil.rmtree(remains, ignore_errors=True)
    for replaced in output.parent.glob(f".{_escaped(output.name)}.replaced-*"):
        if os.path.lexists(output):
            shutil.rmtree(replaced, ignore_errors=True)
        else:  # killed between the two renames: the old dataset is the one that is whole
            replaced.rename(output)


def _escaped(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _lock(lock: IO[str], output: Path) -> None:
    """Takes the lock of a folder that is being prepared.

    Raises:
        UserError: Another process has it.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another process is preparing {output}: wait for it, or name another output") from None
    except OSError:
        pass  # a file system without locks: the rename still lets only one of two runs win


def _flush(folder: Path) -> None:
    """Makes the system put every file and folder on disk, so that a power cut after the rename loses nothing."""
    for path in [*folder.rglob("*"), folder, folder.parent]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _swap(folder: Path, output: Path, overwrite: bool) -> None:
    """Gives the complete folder its name, and removes the one that it replaces.

    Raises:
        UserError: Something has appeared under that name meanwhile.
    """
    replaced = output.with_name(f".{output.name}.replaced-{os.getpid()}")
    if overwrite and os.path.lexists(output):
        output.rename(replaced)
    try:
        folder.rename(output)
    except OSError as error:
        raise UserError(f"{output} cannot be put in place, another process may have made it: {error}") from error
    shutil.rmtree(replaced, ignore_errors=True)


def disk_is_full_text(error: Exception, output: Path, folder: Path) -> str:
    """Returns the text of an error that says how much of ``output`` was written in its staged folder."""
    written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return (
        f"{output} could not be written ({getattr(error, 'strerror', None) or error}): {free_space(folder)} were free "
        f"after the first {written >> 20:,} MiB of it. Nothing was left behind; free more space, or name an output "
        "elsewhere"
    )
