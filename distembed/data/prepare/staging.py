"""Outputs that appear whole or not at all: a local folder, or a dataset at a URL.

The files of a folder are written in a hidden folder next to it, flushed to disk, and renamed::

    .criteo.preparing/
        lock          held by the working process; a second command on this output is refused at once
        purpose       a checksum of the inputs and options, the machine, and its boot
        1f0c22ae/     the beginning of that checksum
            staged/   becomes criteo/
            work/     results of finished tasks (work.py), and temporary files
    .criteo.replaced/ the dataset that --overwrite replaces, between two renames

A process that is killed leaves the hidden folder. The next command with an equal purpose resumes it, any other removes
it. At a URL, each file is uploaded once it is written. The manifest is uploaded last, and removed first where a dataset
is replaced, so that a folder without one is no dataset.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from distembed.base.checksums import checksum_of
from distembed.base.errors import TemporaryFailure, UserError
from distembed.base.files import free_space, full_disk_explained, replaced_file
from distembed.data.dataset.manifest import MANIFEST_NAME, REJECTED_NAME
from distembed.data.prepare.options import SPLIT_NAMES
from distembed.data.remote import file_system, is_url, join_url, remove_remote, upload, walk_remote

STAGED = "staged"  # name of the folder, in a kept one, that becomes the output


@dataclass(frozen=True)
class KeptFolder:
    """A folder that outlives the process which works in it."""

    path: Path  # its folder ``staged`` becomes the output
    is_resumed: bool  # a command with an equal purpose was interrupted, and its files are reused
    is_anew: bool  # the files of an interrupted command were removed


@contextmanager
def staged_folder(
    output: Path, *, overwrite: bool, kind: str = "dataset", marker: str = MANIFEST_NAME
) -> Iterator[Path]:
    """Yields a folder to write in, which is renamed to ``output`` when the block ends, and removed if it fails.

    Args:
        output: Folder to make; its parents are made as needed.
        overwrite: Whether a folder of the same kind is replaced, once the new one is complete.
        kind: The kind of folder, in words.
        marker: Name of the file that every folder of this kind has.
    """
    with kept_folder(output, None, overwrite=overwrite, kind=kind, marker=marker) as work:
        yield work.path / STAGED


@contextmanager
def kept_folder(
    output: Path,
    purpose: str | None,
    *,
    overwrite: bool,
    is_moved: bool = False,
    kind: str = "dataset",
    marker: str = MANIFEST_NAME,
) -> Iterator[KeptFolder]:
    """Yields a work folder; after an interruption, a call with an equal ``purpose`` yields it with its files.

    Its folder ``staged`` becomes ``output`` when the block ends, unless the block moves the files (``is_moved``). The
    work folder is removed when the block ends or fails, but kept after a kill, Ctrl-C or a temporary failure. A purpose
    of None is never resumed. Raises a UserError if another process prepares ``output``, or ``output`` exists and is not
    to be overwritten or has no ``marker``.
    """
    output = _real_path(output)
    require_text_name(output)
    folder, replaced = (output.with_name(f".{output.name}.{end}") for end in ("preparing", "replaced"))
    with _locked(folder, output, kind):
        if replaced.is_dir() and not os.path.lexists(output):
            replaced.rename(output)  # the last process was killed between the two renames
        shutil.rmtree(replaced, ignore_errors=True)
        own_folder = folder / str(purpose)[:8]  # a lost worker of another command writes elsewhere
        was_begun = (folder / "purpose").is_file()
        if os.path.lexists(output) and not (overwrite and (output / marker).is_file()):
            if not was_begun:
                _remove(folder)
            if overwrite:
                raise UserError(f"{output} is no {kind} (no {marker}), so it is not overwritten: name another")
            raise UserError(f"{output} exists already: name another output, remove it, or replace it with --overwrite")
        is_resumed = False
        with suppress(OSError, ValueError):  # no file, or half of one
            last_purpose, host, boot = (folder / "purpose").read_text().split()
            # After a restart of this machine, files that were not flushed may be lost, so nothing is resumed.
            is_fresh = host != socket.gethostname() or boot == _boot()
            is_resumed = last_purpose == purpose and is_fresh and (own_folder / STAGED).is_dir()
        try:
            writing = (OSError, pa.ArrowException)
            with full_disk_explained(lambda error: _disk_is_full(error, output, folder), writing, max_file_size=True):
                if not is_resumed:
                    _empty(folder)
                    (own_folder / STAGED).mkdir(parents=True)
                    (folder / "purpose").write_text(f"{purpose} {socket.gethostname()} {_boot()}")
                yield KeptFolder(own_folder, is_resumed, was_begun and not is_resumed)
                if not is_moved:
                    _put_in_place(own_folder / STAGED, output, replaced, overwrite)
        except BaseException as error:
            if purpose is None or not isinstance(error, KeyboardInterrupt | TemporaryFailure):
                _remove(folder)
            raise
        _remove(folder)


@contextmanager
def _locked(folder: Path, output: Path, kind: str) -> Iterator[None]:
    """Makes the hidden folder and locks it; a UserError if another process holds the lock."""
    busy = UserError(f"another process is preparing {output}: wait for it, or name another output")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "lock", "w")
    except OSError as error:
        raise UserError(f"the {kind} {output} cannot be made: {error}; name another output") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise busy from None
        except OSError:
            pass  # a file system without locks
        if not os.fstat(lock.fileno()).st_nlink:  # the process before has just removed the folder
            raise busy
        yield


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def _empty(folder: Path) -> None:
    """Removes all files but the lock; the purpose first, so that a kill meanwhile leaves nothing to resume."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name != "purpose"):
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()


def _remove(folder: Path) -> None:
    with suppress(OSError):
        _empty(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _put_in_place(folder: Path, output: Path, replaced: Path, overwrite: bool) -> None:
    """Flushes the complete folder and renames it to ``output``; a replaced folder is moved aside, then removed."""
    for path in filter(Path.is_file, folder.rglob(".*")):  # files that a killed process was writing
        path.unlink()
    _flush(folder)
    if overwrite and os.path.lexists(output):
        output.rename(replaced)
    try:
        folder.rename(output)
    except OSError as error:
        raise UserError(f"{output} cannot be put in place, another process may have made it: {error}") from error
    shutil.rmtree(replaced, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Puts every file and folder on disk, so that a power cut after the rename loses nothing."""
    for path in [*folder.rglob("*"), folder, folder.parent]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _disk_is_full(error: Exception, output: Path, folder: Path) -> str:
    """Returns the text of an error that says how much was written in a folder that is not removed yet."""
    if getattr(error, "errno", None) == errno.EFBIG:
        return f"{output} could not be written: this process may not write files so large (see `ulimit -f`)"
    num_bytes = 0
    with suppress(FileNotFoundError):  # a task of a cluster may still rename its files
        for path in folder.rglob("*"):
            num_bytes += path.stat().st_size if path.is_file() else 0
    return (
        f"{output} could not be written ({getattr(error, 'strerror', None) or error}): {free_space(folder)} were free "
        f"after {num_bytes >> 20:,} MiB. Nothing was left behind; free more space, or name an output elsewhere"
    )


def require_outside(inputs: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str]) -> None:
    """Raises a UserError if an input is the output or lies inside it, and would be overwritten."""
    target = _real_path(Path(output))
    for file in [_real_path(Path(raw_input)) for raw_input in inputs if not is_url(raw_input)]:
        if file == target:
            raise UserError(f"the output {output} is an input too, which would be lost: name another output")
        if file.is_relative_to(target):
            raise UserError(f"the input {file} lies inside the output {output}: name another output")


def _real_path(path: Path) -> Path:
    """Returns the absolute path without links, of a circle of links as far as it can be followed."""
    try:
        return Path(os.path.realpath(path))
    except ValueError as error:
        raise UserError(f"{str(path)!r} can be no file or folder ({error}): name another") from error


def require_text_name(path: Path) -> None:
    """Raises a UserError unless a path is valid UTF-8, as Arrow's readers and writers need."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError(f"{str(path)!r} has bytes that are no characters in UTF-8: give it another name") from None


_DATASET_FILE = re.compile(
    rf"({'|'.join(SPLIT_NAMES)})/part-[0-9]+\.parquet|vocabulary/[^/]+\.parquet|[^/]+\.bin|"
    rf"{re.escape(MANIFEST_NAME)}|{re.escape(REJECTED_NAME)}"
)
"""Names of a dataset's files."""


@dataclass(frozen=True)
class Destination:
    """Where a dataset goes."""

    path: Path  # the folder; of a URL, a local path that stays empty, next to which the work is done
    url: str | None  # the URL; None for a local folder
    overwrite: bool  # whether a dataset that is there is replaced

    @classmethod
    def of(cls, output: str | os.PathLike[str], work: Path | None, overwrite: bool) -> Destination:
        """Builds the destination of a folder, or of a URL with a local ``work`` folder; refuses other combinations."""
        if not is_url(output):
            if work is not None:
                raise UserError(
                    f"work (--work) is {work}, and the output {os.fspath(output)} is no URL: the work is done beside a "
                    "local output; leave the option out"
                )
            return cls(Path(output), None, overwrite)
        url = os.fspath(output).rstrip("/")
        if work is None:
            raise UserError(
                f"the output {url} is a URL: name a local folder for the work (--work DIR), with room for about 0.4 of "
                "the inputs' text"
            )
        name = url.rpartition("/")[2]
        return cls(work / f"{name}-{checksum_of(url.encode())[:8]}", url, overwrite)

    def __str__(self) -> str:
        return self.url or str(self.path)

    def begin(self, is_resumed: bool) -> None:
        """Raises a UserError if the URL has foreign files, or a dataset that is neither resumed nor overwritten."""
        if self.url is None:
            return
        files = self._files_there()
        if foreign := sorted(name for name in files if not _DATASET_FILE.fullmatch(name)):
            raise UserError(
                f"{self.url} has files that are of no dataset, such as {foreign[0]}, which stay as they are: name "
                "another output"
            )
        if not files or is_resumed or self.overwrite:
            return
        if MANIFEST_NAME in files:
            raise UserError(f"{self.url} exists already: name another output, or replace it with --overwrite")
        raise UserError(
            f"{self.url} has files and is no dataset (no {MANIFEST_NAME}), perhaps since it was not finished: name "
            "another output, or replace it with --overwrite"
        )

    def remove_manifest(self) -> None:
        """Removes the manifest at the URL, if there is one: a folder without it is no dataset."""
        if self.url is not None and (url := self._files_there().get(MANIFEST_NAME)):
            remove_remote(url)

    @contextmanager
    def file(self, folder: Path, file: str) -> Iterator[Path]:
        """Yields a hidden path to write, then renames it to ``file``, or uploads it and removes the local file.

        Each attempt has a hidden path of its own, so two attempts on a cluster do not mix.
        """
        with replaced_file(folder / file) as hidden:
            yield hidden
            if self.url is not None:
                upload(hidden, join_url(self.url, file))
        if self.url is not None:
            (folder / file).unlink(missing_ok=True)

    def finish(self, folder: Path, moved: Sequence[str]) -> None:
        """Uploads the files in ``folder``, the manifest last; before it, removes files of an older dataset at the URL.

        ``moved`` are files that :meth:`file` has uploaded already. Does nothing for a local destination.
        """
        if self.url is None:
            return
        paths = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
        files = {path.relative_to(folder).as_posix() for path in paths} - {MANIFEST_NAME}
        for file in sorted(files):
            upload(folder / file, join_url(self.url, file))
        for name, url in self._files_there().items():
            if name not in (*files, *moved) and _DATASET_FILE.fullmatch(name):
                remove_remote(url)
        upload(folder / MANIFEST_NAME, join_url(self.url, MANIFEST_NAME))

    def _files_there(self) -> dict[str, str]:
        """Returns the URL of each file at the URL, by its name there; one file may have several URLs."""
        assert self.url is not None
        _, path = file_system(self.url)
        url_by_name = {file_system(file.url)[1].removeprefix(f"{path}/"): file.url for file in walk_remote(self.url)}
        return {name: url for name, url in url_by_name.items() if name != path}  # some stores have a file for a folder
