"""Versions of an exported model in one folder: whole exports, and deltas that have changed rows alone.

::

    versions/
      0001/  manifest.json network.pt2 ...   a whole export                              sequence 1
      0002/  delta.json rows.npz             the rows that changed since 0001            sequence 2, base 0001
      0003/  delta.json rows.npz             the rows that changed since 0002            sequence 3, base 0002

The identity of a version is the SHA-256 of its JSON file. That file has the checksums of all other files and, in a
delta, the identity of the version before it, so that an identity stands for every number of a version. The names of the
folders do not matter. A folder of several versions has a hidden file of the highest sequence, so that the sequence of
a version that was removed or damaged is not given again.

Trade-off: a delta is small and depends on every earlier delta since the last whole export.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from distembed.base.errors import UserError
from distembed.base.files import write_text
from distembed.serving.model_folder.deltas import DELTA_NAME, read_delta_manifest
from distembed.serving.model_folder.manifest import MANIFEST_NAME
from distembed.serving.model_folder.reading import read_manifest

_HIGHEST_NAME = ".highest-version"


@dataclass(frozen=True)
class Version:
    """A version of an exported model, as its folder describes it.

    Attributes:
        folder: Its folder.
        sequence: Its number.
        identity: SHA-256 of its JSON file.
        step: Number of training steps of its checkpoint.
        base: Identity of the version that it changes; None for a whole export.
    """

    folder: Path
    sequence: int
    identity: str
    step: int
    base: str | None = None

    def __str__(self) -> str:
        return f"{self.sequence}-{self.identity[:12]}"


def read_version(folder: Path) -> Version:
    """Returns the version in a folder; a :class:`UserError` where it holds none, or a damaged one."""
    if os.path.exists(folder / DELTA_NAME):
        delta = read_delta_manifest(folder)
        return Version(folder, delta.sequence, _identity(folder / DELTA_NAME), delta.step, delta.base)
    manifest = read_manifest(folder)
    return Version(folder, manifest.sequence, _identity(folder / MANIFEST_NAME), manifest.step)


def find_version(folder: Path) -> Path:
    """Returns the folder of a version: the given one, or that of the newest version in a folder of versions."""
    is_parent = folder.is_dir() and not _is_version(folder)
    newest = newest_version(folder) if is_parent else None
    return folder if newest is None else newest.folder


def _is_version(folder: Path) -> bool:
    for name in (DELTA_NAME, MANIFEST_NAME):
        try:
            if stat.S_ISREG(os.stat(folder / name).st_mode):
                return True
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:  # a version may be there, and reading it says why it cannot be read
            return True
    return False


def _identity(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def version_folders(parent: Path) -> list[Path]:
    """Returns the folders in ``parent`` that may hold versions, by name; folders being written have hidden names."""
    try:
        return sorted(each for each in parent.iterdir() if not each.name.startswith(".") and _is_version(each))
    except OSError as error:
        raise UserError(f"the folder of versions {parent} cannot be read: {error}; name another.") from error


def readable_versions(parent: Path) -> Iterator[Version]:
    """Yields the versions in ``parent``, without folders that hold anything else or are damaged."""
    for folder in version_folders(parent):
        try:
            yield read_version(folder)
        except (UserError, OSError):
            continue


def version_chain(folder: Path) -> list[Version]:
    """Returns the whole export that a version goes back to, and the deltas up to the version, in order.

    The versions in between are found beside ``folder``. A :class:`UserError` names one that is not there.
    """
    chain = [read_version(folder)]
    if chain[0].base is None:
        return chain
    beside = {version.identity: version for version in readable_versions(folder.resolve().parent)}
    while (base := chain[0].base) is not None:
        if base not in beside:
            raise UserError(
                f"{chain[0].folder} changes the version {chain[0].sequence - 1}-{base[:12]}, which is not in "
                f"{folder.resolve().parent}: copy it there, or export the run whole, without --delta-since."
            )
        chain.insert(0, beside[base])
    return chain


@contextmanager
def numbering_versions(parent: Path) -> Iterator[int]:
    """Lets one process at a time number a version in ``parent`` and put it there; other processes wait.

    Yields the highest sequence that a version there has or had; 0 without one. The lock is on the folder itself. File
    systems without locks leave it to the user. A :class:`UserError` names a folder that cannot be made or read.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(parent, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"--output: the folder {parent} cannot be used: {error}; name another.") from error
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield _highest_sequence(parent)
        with suppress(OSError):  # the version is in its place
            if (parent / _HIGHEST_NAME).exists() or len(version_folders(parent)) > 1:
                write_text(parent / _HIGHEST_NAME, f"{_highest_sequence(parent)}\n")
    finally:
        os.close(descriptor)


def _highest_sequence(parent: Path) -> int:
    newest, kept = newest_version(parent), 0
    try:
        kept = int((parent / _HIGHEST_NAME).read_text())
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise UserError(
            f"{parent / _HIGHEST_NAME}, which has the highest number of a version, cannot be read: {error}; write the "
            "number into it."
        ) from error
    return max(kept, 0 if newest is None else newest.sequence)


def newest_version(parent: Path) -> Version | None:
    """Returns the version of the highest number in ``parent``; None where there is none."""
    return max(readable_versions(parent), key=lambda version: version.sequence, default=None)
