"""Where checkpoints lie: a local folder or any URL that fsspec knows, and how they come and go.

Object stores cannot rename a folder at once, so that the same rule holds for all places: a checkpoint is whole once its
last-written file, ``progress.json``, is there, and to remove a checkpoint is to remove that file first. What has no
such file was being written, or removed, when its process died; it is passed over, and cleared away at the next save.
"""

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from distembed.base import checksums
from distembed.base.checksums import checksum_differs, with_checksum
from distembed.base.errors import RunError, UserError
from distembed.base.files import finite, free_space, read_regular_file
from distembed.data.remote import file_system

LAST_FILE = "progress.json"
METADATA_FILE = ".metadata"
_FIELDS_WITHOUT_CHECKSUMS = {"world_size", "tables", "optimizers", "progress"}
_FIELDS = _FIELDS_WITHOUT_CHECKSUMS | {"metadata_checksum", checksums.KEY}
_MOST_BYTES = 8 << 30
"""Size from which on a file that is read as a whole is none of a checkpoint."""
_PASSING = {errno.EIO, errno.EBUSY, errno.ESTALE, errno.ETIMEDOUT, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EMFILE}
_PASSING |= {errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT}
INTERRUPTED = "-interrupted"
"""How the name of a checkpoint ends that was written because the run was interrupted, when none was due."""
BEST = "best"
"""Key of a run's progress: the best evaluation until then, whose ``step`` names the checkpoint to keep."""
_OWNER_FILE = ".run"
_S3_ATTEMPTS = "12"
"""How often a request is made to an S3 that fails, unless the user's AWS_MAX_ATTEMPTS says; by itself botocore makes 5.

The waits between them double: one checkpoint takes a few dozen requests, of which none may fail for good.
"""


class CheckpointStore:
    """Named checkpoints below one place.

    Args:
        url: A local path, or a URL such as ``s3://bucket/folder``.

    Raises:
        UserError: Fsspec does not know the URL's protocol, or the package for it is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._files, self._root = open_file_system(url)

    def checkpoint_path(self, name: str) -> str:
        """Returns the path or URL of a checkpoint, as :func:`distembed.checkpoints.load_checkpoint` takes it."""
        return f"{self.url}/{name}"

    def names(self) -> list[str]:
        """Returns the names of the whole checkpoints, oldest first."""
        return [name for name in self._names() if self._is_whole(name)]

    def is_whole(self, name: str) -> bool:
        """Returns whether a checkpoint is there and whole."""
        self._files.invalidate_cache()
        return self._is_whole(name)

    def start(self, name: str) -> None:
        """Makes room for a checkpoint that is about to be written.

        Raises:
            UserError: Other files are in its way.
        """
        if self._files.exists(f"{self._root}/{name}") and not self._is_checkpoint(name):
            raise UserError(
                f"{self.checkpoint_path(name)} is there and holds files that are no checkpoint's; give another name, "
                "or move them."
            )
        self._remove(name)
        self._files.makedirs(f"{self._root}/{name}", exist_ok=True)

    def finish(self, name: str, contents: Mapping[str, Any]) -> None:
        """Declares a checkpoint whole by writing its last file.

        Args:
            name: Name of the checkpoint.
            contents: What the file holds, without its checksum; floats that JSON cannot hold become null.
        """
        path = f"{self._root}/{name}/{LAST_FILE}"
        with self._files.open(f"{path}.partial", "wb") as file:
            file.write(json.dumps(with_checksum(finite(contents)), indent=2).encode())
        self._files.mv(f"{path}.partial", path)

    def set_aside(self, name: str) -> str:
        """Moves a damaged checkpoint out of the way and returns its new path; no later save removes it."""
        self._files.invalidate_cache()
        aside = f"damaged-{name}"
        while self._files.exists(f"{self._root}/{aside}"):
            aside += "-again"
        self._files.mv(f"{self._root}/{name}", f"{self._root}/{aside}", recursive=True)
        return self.checkpoint_path(aside)

    def discard(self, name: str) -> None:
        """Removes a checkpoint that could not be written to its end; a whole one stays."""
        if not self.is_whole(name):
            self._remove(name)

    def best(self, name: str) -> str | None:
        """Returns the name of the checkpoint that was the best when another was written.

        It is None where none was, and where the other is damaged, which a resumed run passes over.
        """
        try:
            progress = read_last_file(self.checkpoint_path(name))["progress"]
        except ValueError:
            return None
        step = (progress.get(BEST) or {}).get("step")
        return None if step is None else checkpoint_name(step)

    def keep_newest(self, count: int, and_best: bool = False) -> None:
        """Removes all checkpoints but the newest ``count`` whole ones and, where asked, the best by each of these.

        One that was written for an interruption makes room for the next, whatever their number, so that a run that was
        interrupted keeps what it would have kept without.
        """
        whole = self.names()
        kept = [name for name in whole if not name.endswith(INTERRUPTED) or name == whole[-1]][-count:]
        best = {self.best(name) for name in kept} if and_best else set()
        for name in self._names():
            if name not in kept and name not in best and self._is_checkpoint(name):
                self._remove(name)

    def write_probe(self, rank: int) -> None:
        """Writes a small file for this rank, to see whether that can be done."""
        self._files.makedirs(self._root, exist_ok=True)
        with self._files.open(self._probe(rank), "wb") as file:
            file.write(b"written to see whether checkpoints can be")

    def sees_probe(self, rank: int) -> bool:
        """Returns whether the small file that ``rank`` wrote is there."""
        self._files.invalidate_cache()
        return bool(self._files.exists(self._probe(rank)))

    def remove_probe(self, rank: int) -> None:
        """Removes the small file of this rank, where it is there."""
        if self._files.exists(self._probe(rank)):
            self._files.rm(self._probe(rank))

    def owner(self) -> str | None:
        """Returns the name of the run whose checkpoints lie here; None where no run has claimed the place."""
        self._files.invalidate_cache()
        path = f"{self._root}/{_OWNER_FILE}"
        return str(self._files.cat_file(path).decode()) if self._files.exists(path) else None

    def claim(self, owner: str) -> None:
        """Marks the place as that of a run's checkpoints, by the run's name."""
        self._files.pipe_file(f"{self._root}/{_OWNER_FILE}", owner.encode())

    def room_left(self) -> str:
        """Returns the free space in words for an error; empty where it is not known."""
        if not isinstance(self._files, LocalFileSystem):
            return ""
        existing = next(path for path in (Path(self._root), *Path(self._root).parents) if path.exists())
        return f"; {free_space(existing)} were left"

    def _probe(self, rank: int) -> str:
        return f"{self._root}/.probe-of-rank-{rank}"

    def _names(self) -> list[str]:
        self._files.invalidate_cache()
        if not self._files.exists(self._root):
            if isinstance(self._files, LocalFileSystem) and os.path.islink(self._root):
                raise FileExistsError(f"{self._root} is a link that leads nowhere")
            return []
        paths = self._files.ls(self._root, detail=False)
        names = [path.rstrip("/").rsplit("/", 1)[-1] for path in paths]
        return sorted((name for name in names if name.startswith("step-")), key=_order)

    def _is_checkpoint(self, name: str) -> bool:
        """Returns whether a folder holds nothing but the files of a checkpoint."""
        if not self._files.isdir(f"{self._root}/{name}"):
            return False
        files = [path.rstrip("/").rsplit("/", 1)[-1] for path in self._files.ls(f"{self._root}/{name}", detail=False)]
        return all(file.startswith((".metadata", LAST_FILE)) or file.endswith((".distcp", ".tmp")) for file in files)

    def _is_whole(self, name: str) -> bool:
        return bool(self._files.exists(f"{self._root}/{name}/{LAST_FILE}"))

    def _remove(self, name: str) -> None:
        folder = f"{self._root}/{name}"
        if self._is_whole(name):
            self._files.rm(f"{folder}/{LAST_FILE}")
        if self._files.exists(folder):
            self._files.rm(folder, recursive=True)


def checkpoint_name(step: int, interrupted: bool = False) -> str:
    """Returns the name of a run's checkpoint after so many steps.

    Args:
        step: Number of steps done.
        interrupted: Whether a run that is not interrupted would not write it.
    """
    return f"step-{step:08d}{INTERRUPTED if interrupted else ''}"


def _order(name: str) -> tuple[str, bool]:
    """Returns what checkpoints are sorted by; of one step, that which an interruption has left is the older one."""
    return name.removesuffix(INTERRUPTED), not name.endswith(INTERRUPTED)


def place_and_name(checkpoint: str) -> tuple[str, str]:
    """Returns the folder or URL in which a checkpoint lies, and its name there.

    Raises:
        UserError: The path is none of a folder that could be made.
    """
    protocol, separator, path = checkpoint.rstrip("/").rpartition("://")
    name = path.rpartition("/")[2]
    parent = (path if separator else str(Path(path).absolute())).rpartition("/")[0]
    if name in ("", ".", "..") or (separator and not parent):
        raise UserError(
            f"{checkpoint!r} names no checkpoint; give a folder within another, such as checkpoints/step-00001000 or "
            "s3://bucket/step-00001000."
        )
    return f"{protocol}{separator}{parent or '/'}", name


def missing_checksums_note(checkpoint: str) -> str | None:
    """Returns a sentence for the user where a checkpoint was made before there were checksums; None for others."""
    try:
        if checksums.KEY in read_last_file(checkpoint):
            return None
    except FileNotFoundError:
        return None  # its run has removed it meanwhile
    return f"the checkpoint {checkpoint} carries no checksums, since an older version made it: damage may pass unseen."


def open_file_system(url: str) -> tuple[Any, str]:
    """Returns fsspec's file system for a URL or a local path, and the path within it.

    Raises:
        UserError: Fsspec does not know the URL's protocol, or the package for it is not installed.
    """
    if url.startswith(("s3://", "s3a://")):
        os.environ.setdefault("AWS_MAX_ATTEMPTS", _S3_ATTEMPTS)
    return file_system(url, "is no place for checkpoints; give a folder or a URL that fsspec knows")


def read_file(checkpoint: str, name: str) -> bytes:
    """Returns the bytes of a file of a checkpoint."""
    files, path = open_file_system(checkpoint)
    if isinstance(files, LocalFileSystem):
        return read_regular_file(Path(path) / name, _MOST_BYTES)
    return bytes(files.cat_file(f"{path}/{name}"))


def file_sizes(checkpoint: str) -> dict[str, int]:
    """Returns the bytes of each file of a checkpoint, by name."""
    files, path = open_file_system(checkpoint)
    files.invalidate_cache()
    return {entry["name"].rpartition("/")[2]: entry["size"] for entry in files.ls(path, detail=True)}


def read_last_file(checkpoint: str) -> dict[str, Any]:
    """Returns what :meth:`CheckpointStore.finish` wrote.

    Raises:
        ValueError: The file is damaged.
    """
    data = read_file(checkpoint, LAST_FILE)
    try:
        contents = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{LAST_FILE} is no JSON: {error}") from error
    if not isinstance(contents, dict) or contents.keys() not in (_FIELDS, _FIELDS_WITHOUT_CHECKSUMS):
        raise ValueError(f"{LAST_FILE} has not the fields that it was written with")
    if checksum_differs(contents):
        raise ValueError(f"{LAST_FILE} does not have the checksum that it was written with")
    return contents


@contextmanager
def storage_errors(place: str) -> Iterator[None]:
    """Turns whatever a file system raises within the block into an error that names the place.

    Raises:
        UserError: A file system raised something; the error names the place and the remedy.
        RunError: The same of what may pass by itself, such as a lost connection or a full disk.
    """
    try:
        yield
    except (UserError, RunError):
        raise
    except Exception as error:  # file systems raise errors of their own kinds
        kind = RunError if may_pass(error) else UserError
        raise kind(
            f"checkpoints cannot be kept in {place} ({type(error).__name__}: {error}). Check that it exists and can be "
            "written to, or give another place as train.checkpoint_dir."
        ) from error


def may_pass(error: BaseException) -> bool:
    """Returns whether a file system's error is none of the user's mistakes, and may be gone at the next attempt."""
    by_name = any(word in type(error).__name__ for word in ("Connect", "Timeout"))  # botocore's and others' own kinds
    return by_name or isinstance(error, ConnectionError) or getattr(error, "errno", None) in _PASSING
