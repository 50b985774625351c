"""A folder that appears whole or not at all.

Everything is written in a hidden folder beside the target, flushed to disk, and renamed. A process that is killed
leaves the hidden folder behind: the next run on the same target removes it, since the lock that the process held is
free, or goes on with it where it is a :func:`kept_folder` of the same command. A run that finds the lock taken fails at
once and changes nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from distembed.data.dataset.manifest import MANIFEST_NAME
from distembed.data.prepare.inputs import real_path, require_text_name
from distembed.errors import TemporaryFailure, UserError
from distembed.files import free_space

_LOCK_NAME = ".lock"
_BOOT_NAME = "boot"
_REMOVED = "-removed"


class OutputExists(UserError):
    """There is an output already, which is not to be replaced."""


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
    output = _checked_target(output, overwrite, kind, marker)
    folder = output.with_name(f"{_prefix(output)}{os.getpid()}")
    with _alone(folder, output, overwrite, kind, marker):
        try:
            yield folder
            _flush(folder)
            with _alone_in(output.parent):
                (folder / _LOCK_NAME).unlink()
                _swap(folder, output, overwrite)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class KeptFolder:
    """A folder that outlives the process which works in it.

    Attributes:
        path: The folder; what is in its folder ``dataset`` becomes the output.
        is_resumed: Whether a command with the same purpose was interrupted, and this one goes on with what it did.
        is_anew: Whether what a command with another purpose had done was removed.
    """

    path: Path
    is_resumed: bool
    is_anew: bool


@contextmanager
def kept_folder(output: Path, purpose: str | None, *, overwrite: bool, is_moved: bool = False) -> Iterator[KeptFolder]:
    """Gives a folder to work in, which is there again for the same purpose after a process was killed.

    Its folder ``dataset`` becomes ``output`` when the block ends. The folder is removed when the block ends or fails,
    but not when it is interrupted, or fails by what may pass. What was written before the machine itself was restarted
    may never have come to its disk, and is not gone on with.

    Args:
        output: Dataset folder to make; its parents are made as needed.
        purpose: A short text that differs for commands which may not go on with each other's work; None where none may.
        overwrite: Whether a dataset is replaced, which stays until the new one is complete.
        is_moved: Whether the block moves the dataset elsewhere, so that nothing becomes ``output``.

    Raises:
        UserError: As :func:`staged_folder`.
    """
    _finish_removing(real_path(output))
    output = _checked_target(output, overwrite, "dataset", MANIFEST_NAME)
    folder = kept_path(output, purpose or str(os.getpid()))
    with _alone(folder, output, overwrite, "dataset", MANIFEST_NAME, keep=purpose is not None) as removed:
        try:
            # without it there is nothing yet, or the dataset was put in place before a kill
            is_resumed = (folder / DATASET).is_dir() and _is_of_this_boot(folder)
            if is_resumed:
                _remove_temporary_files(folder / DATASET)
            else:
                _begin(folder)
            yield KeptFolder(folder, is_resumed, bool(removed))
            if not is_moved:
                _flush(folder / DATASET)
                with _alone_in(output.parent):
                    _swap(folder / DATASET, output, overwrite)
        except (KeyboardInterrupt, TemporaryFailure):
            if purpose is None:
                _remove(folder)
            raise
        except BaseException:
            _remove(folder)
            raise
        _remove(folder)


DATASET = "dataset"
"""Name of the folder, in a kept one, that becomes the output."""


def kept_path(output: Path, purpose: str) -> Path:
    """Returns where the folder of :func:`kept_folder` is."""
    output = real_path(output)
    return output.with_name(f"{_prefix(output)}{purpose}")


def _checked_target(output: Path, overwrite: bool, kind: str, marker: str) -> Path:
    """Returns the absolute path of a folder that is to be made, without links, so that a link to a dataset stays one.

    Raises:
        UserError: Something is there that may not be replaced, or the name is none of a folder.
    """
    output = real_path(output)
    require_text_name(output)
    _check_target(output, overwrite, kind, marker)
    return output


@contextmanager
def _alone(
    folder: Path, output: Path, overwrite: bool, kind: str, marker: str, keep: bool = False
) -> Iterator[list[Path]]:
    """Makes a hidden folder beside the output, and keeps other runs away from the output meanwhile.

    Args:
        folder: The hidden folder.
        output: Folder to make in the end.
        overwrite: Whether a folder of the same kind is replaced.
        kind: What the folder is, in words.
        marker: Name of the file that every folder of this kind has.
        keep: Whether the hidden folder, where it is there, stays as it is.

    Yields:
        Other hidden folders, which were removed.

    Raises:
        UserError: ``output`` exists and may not be replaced, cannot be made, or another process is writing it.
    """
    with ExitStack() as held:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            with _alone_in(output.parent):
                removed = _clear_remains(output, folder if keep else None)
                # once more: a run that was killed may have left it aside
                _check_target(output, overwrite, kind, marker)
                folder.mkdir(exist_ok=keep)
                _lock(held.enter_context(open(folder / _LOCK_NAME, "w")), output)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
            raise UserError(f"the {kind} {output} cannot be made: {error}; name another output") from error
        yield removed


def _begin(folder: Path) -> None:
    """Makes what a kept folder begins with, and nothing else."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != _LOCK_NAME:
            path.unlink()
    (folder / _BOOT_NAME).write_text(_boot())
    (folder / DATASET).mkdir()


def _remove_temporary_files(folder: Path) -> None:
    """Removes the files that were being written, to replace others once they are whole, when their process died."""
    for path in list(folder.rglob(".*")):
        path.unlink()


def _is_of_this_boot(folder: Path) -> bool:
    """Returns whether a kept folder was begun by another machine, or by this one since it was started."""
    try:
        host, boot = (folder / _BOOT_NAME).read_text().split()
    except (OSError, ValueError):
        return False
    return host != socket.gethostname() or f"{host} {boot}" == _boot()


def _boot() -> str:
    """Returns the name of this machine, and an identity that it has until it is started anew."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = "unknown"
    return f"{socket.gethostname()} {boot}"


def _remove(folder: Path) -> None:
    """Removes a kept folder, which no command goes on with from the first moment on."""
    removed = folder.with_name(f"{folder.name}{_REMOVED}")
    with suppress(OSError):
        folder.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def _finish_removing(output: Path) -> None:
    """Removes what a process was removing when it was killed, perhaps after it had put the output in place."""
    for removed in output.parent.glob(f"{_prefix(Path(_escaped(output.name)))}*{_REMOVED}"):
        shutil.rmtree(removed, ignore_errors=True)


def _prefix(output: Path) -> str:
    return f".{output.name}.preparing-"


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
        raise OutputExists(f"{output} exists already: name another output, remove it, or replace it with --overwrite")
    if not (output / marker).is_file():
        raise UserError(f"{output} is no {kind} (no {marker}), so it is not overwritten: name another")


def _clear_remains(output: Path, kept: Path | None) -> list[Path]:
    """Removes what processes that have ended left behind, but for a folder to go on with, and returns what it was.

    Raises:
        UserError: A process is still writing the same output.
    """
    removed = []
    for remains in output.parent.glob(f".{_escaped(output.name)}.preparing-*"):
        try:
            with open(remains / _LOCK_NAME, "r+") as lock:
                _lock(lock, output)
        except FileNotFoundError:
            pass
        if remains != kept:
            removed.append(remains)
            shutil.rmtree(remains, ignore_errors=True)
    for replaced in output.parent.glob(f".{_escaped(output.name)}.replaced-*"):
        if os.path.lexists(output):
            shutil.rmtree(replaced, ignore_errors=True)
        else:  # killed between the two renames: the old dataset is the one that is whole
            replaced.rename(output)
    return removed


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
