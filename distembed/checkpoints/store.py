"""Where checkpoints lie, in a local folder or at any URL that fsspec knows, and which is the newest or the best.

Object stores cannot rename a folder atomically, so the same rule holds for local folders and URLs: ``progress.json`` is
written last and removed first, and a checkpoint is whole exactly while this file exists. A checkpoint folder without
the file was being written, or removed, when its process died. Readers ignore the folder, and the next save removes it.
Nothing here needs torch.
"""

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from distembed.base.checksums import KEY, checksum_differs, checksum_of, with_checksum
from distembed.base.errors import RunError, UserError
from distembed.base.files import finite, free_space, nearest_folder, read_regular_file
from distembed.base.units import format_bytes
from distembed.data.remote import file_system

LAST_FILE = "progress.json"
"""The file that is written last: a checkpoint with it is whole."""
INDEX_FILE = "index.json"
METADATA_FILE = ".metadata"
"""The index of a checkpoint in torch's own format, which earlier versions of distembed wrote."""
_FIELDS = {"world_size", "tables", "optimizers", "progress", KEY}
"""Fields of ``progress.json``, besides the checksum of the index."""
_MOST_BYTES = 8 << 30
"""Largest size of ``progress.json`` or an index that is read from a local folder."""
_PASSING = {errno.EIO, errno.EBUSY, errno.ESTALE, errno.ETIMEDOUT, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EMFILE}
_PASSING |= {errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT}
INTERRUPTED = "-interrupted"
"""End of the name of a checkpoint that only an interruption of the run has caused."""
BEST = "best"
"""Key of a run's progress: the best evaluation until then, whose ``step`` names the checkpoint to keep."""
_OWNER_FILE = ".run"
_S3_ATTEMPTS = "12"
"""Attempts of a failing request to S3, with doubling waits, unless AWS_MAX_ATTEMPTS is set; botocore alone makes 5."""


class CheckpointStore:
    """Named checkpoints below a local path, or a URL, for example ``s3://bucket/folder``."""

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
        """Makes an empty folder, in place of a checkpoint of this name; a folder of other files is a UserError."""
        if self._files.exists(f"{self._root}/{name}") and not self._is_checkpoint(name):
            raise UserError(
                f"{self.checkpoint_path(name)} is there and holds files that are no checkpoint's; give another name, "
                "or move them."
            )
        self._remove(name)
        self._files.makedirs(f"{self._root}/{name}", exist_ok=True)

    def finish(self, name: str, contents: Mapping[str, Any], index: bytes = b"{}") -> None:
        """Writes the index of a checkpoint, then ``progress.json``, whose existence declares the checkpoint whole.

        ``contents`` are the values of ``progress.json``, without checksums; NaN and infinite floats become null.
        """
        folder = f"{self._root}/{name}"
        self._files.pipe_file(f"{folder}/{INDEX_FILE}", index)
        last_file = with_checksum(finite({**contents, "index_checksum": checksum_of(index)}))
        with self._files.open(f"{folder}/{LAST_FILE}.partial", "wb") as file:
            file.write(json.dumps(last_file, indent=2).encode())
        self._files.mv(f"{folder}/{LAST_FILE}.partial", f"{folder}/{LAST_FILE}")

    def set_aside(self, name: str) -> str:
        """Moves a damaged checkpoint out of the way and returns its new path; no later save removes it."""
        self._files.invalidate_cache()
        aside = f"damaged-{name}"
        while self._files.exists(f"{self._root}/{aside}"):
            aside += "-again"
        self._files.mv(f"{self._root}/{name}", f"{self._root}/{aside}", recursive=True)
        return self.checkpoint_path(aside)

    def discard(self, name: str) -> None:
        """Removes the folder of a checkpoint whose writing failed; does nothing if the checkpoint is whole."""
        if not self.is_whole(name):
            self._remove(name)

    def best(self, name: str) -> str | None:
        """Returns the best checkpoint that ``name`` recorded, which may be gone; None without one, or if damaged."""
        try:
            progress = read_last_file(self.checkpoint_path(name))["progress"]
        except ValueError:
            return None
        step = (progress.get(BEST) or {}).get("step")
        return None if step is None else checkpoint_name(step)

    def keep_newest(self, count: int, and_best: bool = False) -> None:
        """Removes all checkpoints, incomplete ones too, except the newest ``count`` whole ones.

        With ``and_best``, the best checkpoint that each of the kept ones records (:meth:`best`) stays too. A checkpoint
        that only an interruption caused stays while it is the newest, so that an interrupted run ends up with the
        checkpoints of an uninterrupted run.
        """
        complete = self.names()
        newest = [name for name in complete if not name.endswith(INTERRUPTED) or name == complete[-1]][-count:]
        best = {self.best(name) for name in newest} if and_best else set()
        for name in self._names():
            if name not in newest and name not in best and self._is_checkpoint(name):
                self._remove(name)

    def write_probe(self, rank: int) -> None:
        """Writes a small file named by the rank; a file system error shows that this rank cannot write here."""
        self._files.makedirs(self._root, exist_ok=True)
        with self._files.open(self._probe(rank), "wb") as file:
            file.write(b"written to see whether checkpoints can be")

    def sees_probe(self, rank: int) -> bool:
        """Returns whether the small file of ``rank`` is there."""
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

    def not_written(self, name: str, error: BaseException, num_bytes: int | None = None) -> RunError:
        """Returns, without raising it, the error for a checkpoint that this rank, with ``num_bytes``, cannot write."""
        needed = "" if num_bytes is None else f"; this rank has {format_bytes(num_bytes)} to write"
        left = ""
        if isinstance(self._files, LocalFileSystem):
            left = f"; {free_space(nearest_folder(Path(self._root)))} were left"
        return RunError(
            f"The checkpoint {self.checkpoint_path(name)} could not be written ({type(error).__name__}: {error})"
            f"{needed}{left}. Older checkpoints are kept; free space or mend the permissions, then go on with --resume."
        )

    def _probe(self, rank: int) -> str:
        return f"{self._root}/.probe-of-rank-{rank}"

    def _names(self) -> list[str]:
        self._files.invalidate_cache()
        if not self._files.exists(self._root):
            if isinstance(self._files, LocalFileSystem) and os.path.islink(self._root):
                raise FileExistsError(f"{self._root} is a link that leads nowhere")
            return []
        return sorted((name for name in self._list(self._root) if name.startswith("step-")), key=_order)

    def _list(self, folder: str) -> list[str]:
        return [path.rstrip("/").rsplit("/", 1)[-1] for path in self._files.ls(folder, detail=False)]

    def _is_checkpoint(self, name: str) -> bool:
        """Returns whether all files in a folder have names of a checkpoint's files, so that it may be removed."""
        folder = f"{self._root}/{name}"
        prefixes, suffixes = (INDEX_FILE, METADATA_FILE, LAST_FILE), (".blocks", ".distcp", ".tmp")
        return bool(self._files.isdir(folder)) and all(
            file.startswith(prefixes) or file.endswith(suffixes) for file in self._list(folder)
        )

    def _is_whole(self, name: str) -> bool:
        return bool(self._files.exists(f"{self._root}/{name}/{LAST_FILE}"))

    def _remove(self, name: str) -> None:
        folder = f"{self._root}/{name}"
        if self._is_whole(name):
            self._files.rm(f"{folder}/{LAST_FILE}")
        if self._files.exists(folder):
            self._files.rm(folder, recursive=True)


def checkpoint_name(step: int, interrupted: bool = False) -> str:
    """Returns the name of a run's checkpoint; ``interrupted`` where only an interruption caused it."""
    return f"step-{step:08d}{INTERRUPTED if interrupted else ''}"


def _order(name: str) -> tuple[str, bool]:
    """Returns the key that sorts names from oldest to newest; at equal steps the interruption's checkpoint is older."""
    return name.removesuffix(INTERRUPTED), not name.endswith(INTERRUPTED)


def place_and_name(checkpoint: str) -> tuple[str, str]:
    """Splits a checkpoint's path or URL into parent and name; refuses paths that lack one: ``.``, ``s3://bucket``."""
    protocol, separator, path = checkpoint.rstrip("/").rpartition("://")
    name = path.rpartition("/")[2]
    parent = (path if separator else str(Path(path).absolute())).rpartition("/")[0]
    if name in ("", ".", "..") or (separator and not parent):
        raise UserError(
            f"{checkpoint!r} names no checkpoint; give a folder within another, such as checkpoints/step-00001000 or "
            "s3://bucket/step-00001000."
        )
    return f"{protocol}{separator}{parent or '/'}", name


def checkpoint_place(run_dir: Path, checkpoint_dir: str | None) -> str:
    """Returns the place of a run's checkpoints: ``train.checkpoint_dir``, within the run's folder if it is relative."""
    if checkpoint_dir is not None and "://" in checkpoint_dir:
        return checkpoint_dir
    return str(run_dir.absolute() / Path(checkpoint_dir or "checkpoints").expanduser())


def checkpoint_names(place: str) -> list[str]:
    """Returns the names of the whole checkpoints in a place, oldest first."""
    store = CheckpointStore(place)
    with storage_errors(place):
        return store.names()


def newest_checkpoint(run_dir: Path, checkpoint_dir: str | None = None) -> str:
    """Returns the path or URL of the newest whole checkpoint of a run, by its folder and ``train.checkpoint_dir``."""
    place = checkpoint_place(run_dir, checkpoint_dir)
    names = checkpoint_names(place)
    if not names:
        raise UserError(
            f"{run_dir} has no checkpoint in {place}; give the folder of a run that `distembed train` made."
        )
    return CheckpointStore(place).checkpoint_path(names[-1])


def chosen_checkpoint(run_dir: Path, checkpoint_dir: str | None, choice: str | None, keeps_best: bool) -> str:
    """Returns the path or URL of one of a run's whole checkpoints, or raises a :class:`UserError`.

    Args:
        run_dir: The run's folder.
        checkpoint_dir: The run's ``train.checkpoint_dir``.
        choice: ``newest``, ``best``, or the number of steps after which the checkpoint was written; None for the best
            if ``keeps_best`` is set and the best checkpoint exists, else the newest.
        keeps_best: The run's ``train.keep_best``.
    """
    newest = newest_checkpoint(run_dir, checkpoint_dir)
    if choice == "newest" or (choice is None and not keeps_best):
        return newest
    place, name = place_and_name(newest)
    store, names = CheckpointStore(place), checkpoint_names(place)
    if choice is not None and choice.isdecimal():
        wanted_name = checkpoint_name(int(choice))
        matching = [candidate for candidate in names if candidate.removesuffix(INTERRUPTED) == wanted_name]
        if not matching:
            raise UserError(
                f"checkpoint (--checkpoint) is {choice}, and {place} has {', '.join(names)}; give one of their numbers."
            )
        return store.checkpoint_path(matching[-1])
    if choice not in ("best", None):
        raise UserError(
            f"checkpoint (--checkpoint) is {choice!r}; give newest, best, or the number of steps of a checkpoint."
        )
    with storage_errors(place):
        best = store.best(name)
    if best in names:
        return store.checkpoint_path(best)
    if choice is None:
        return newest
    raise UserError(
        f"checkpoint (--checkpoint) is best, and {run_dir} keeps none; the best is kept where "
        "train.keep_best is true, once there was an evaluation. Use newest."
    )


def open_file_system(url: str) -> tuple[Any, str]:
    """Returns fsspec's file system for a URL or local path, and the path within it; S3 sets ``AWS_MAX_ATTEMPTS``."""
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
    """Returns the values of ``progress.json``; a ValueError for a broken file, other fields or a wrong checksum."""
    data = read_file(checkpoint, LAST_FILE)
    try:
        contents = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{LAST_FILE} is no JSON: {error}") from error
    field_sets = (_FIELDS | {"index_checksum"}, _FIELDS | {"metadata_checksum"})  # the latter in torch's own format
    if not isinstance(contents, dict) or contents.keys() not in field_sets:
        raise ValueError(f"{LAST_FILE} has not the fields that this version reads; an early version may have made it")
    if checksum_differs(contents):
        raise ValueError(f"{LAST_FILE} does not have the checksum that it was written with")
    return contents


@contextmanager
def storage_errors(place: str) -> Iterator[None]:
    """Turns a transient error of the block into ``RunError``, others into ``UserError``; these two pass unchanged."""
    try:
        yield
    except (UserError, RunError):
        raise
    except Exception as error:  # file systems raise errors of their own kinds
        kind = RunError if _is_transient(error) else UserError
        raise kind(
            f"checkpoints cannot be kept in {place} ({type(error).__name__}: {error}). Check that it exists and can be "
            "written to, or give another place as train.checkpoint_dir."
        ) from error


def _is_transient(error: BaseException) -> bool:
    """Returns whether a file system's error may be gone at the next attempt."""
    by_name = any(word in type(error).__name__ for word in ("Connect", "Timeout"))  # botocore's and others' own kinds
    return by_name or isinstance(error, ConnectionError) or getattr(error, "errno", None) in _PASSING
