"""Datasets at URLs: a local folder with the manifest, and with other files as they are needed.

::

    CACHE/criteo-0123456789abcdef/manifest.json        fetched when a process first asks for the dataset
    CACHE/criteo-0123456789abcdef/vocabulary/...       fetched whole when they are first read, and kept
    CACHE/criteo-0123456789abcdef/mirror.json          where the dataset is
    CACHE/pieces/                                      row groups and footers, of bounded size (piece_cache.py)

The folder's name has the checksum of the manifest, so that a dataset that was prepared anew gets another one. Row
groups, which are what a shuffled epoch reads in random order, are fetched one by one and not by files: whatever the
size of the files, each byte is fetched once an epoch, or once in all where the cache has room for the dataset.

Everything is held against the checksums of the manifest, whether it comes from the URL or from the cache.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from distembed.base.checksums import checksum_of
from distembed.base.errors import RunError, UserError
from distembed.base.files import read_json, whole_file, write_text
from distembed.data.dataset.piece_cache import PieceCache, locked
from distembed.data.remote import fetch, find_remote, is_url, join_url, read_range, read_remote

MIRROR_FILE = "mirror.json"
DEFAULT_CACHE_BYTES = 100 << 30
_MANIFEST, _LOCK = "manifest.json", ".lock"


@dataclass(frozen=True)
class Mirror:
    """The local folder of a remote dataset.

    Methods raise a :class:`UserError` where the dataset lacks a file, and a :class:`RunError` where the server does not
    answer or the folder cannot be written.
    """

    folder: Path
    url: str  # of the dataset
    cache: PieceCache  # of the splits' files, which are not in the folder

    def file_url(self, file: str) -> str:
        """Returns the URL of a file, given its path relative to the dataset."""
        return join_url(self.url, file)

    def read(self, file: str, start: int, stop: int, checksum: str) -> bytes | None:
        """Returns the bytes ``[start, stop)`` of a file, from the cache if it has them; None for another checksum."""
        return self.cache.get(checksum, partial(self.read_uncached, file, start, stop, checksum))

    def read_uncached(self, file: str, start: int, stop: int, checksum: str) -> bytes | None:
        """Returns the bytes that are at the URL now, as :meth:`read` does."""
        for _ in range(2):  # bytes that were damaged on their way are whole the second time
            data = read_range(self.file_url(file), start, stop)
            if checksum_of(data) == checksum:
                return data
        return None

    def fetch(self, file: str, again: bool = False) -> None:
        """Copies a file into the folder, unless it is there already and is not to be fetched again."""
        with locked(self.folder / _LOCK):
            if again or not (self.folder / file).exists():
                fetch(self.file_url(file), self.folder / file)


def dataset_folder(
    dataset: str | os.PathLike[str], cache_dir: str | None = None, cache_bytes: int = DEFAULT_CACHE_BYTES
) -> Path:
    """Returns the local folder of a dataset: the path itself, or where a URL's files are fetched to.

    Args:
        dataset: Path or URL of the dataset.
        cache_dir: Folder for fetched files; None for ``distembed`` in the user's folder of caches.
        cache_bytes: Most bytes of the row groups that are kept, of all datasets together.

    Raises:
        UserError: There is no dataset at the URL.
        RunError: The server does not answer, or the folder cannot be written.
    """
    return _mirror_folder(str(dataset), cache_dir, cache_bytes) if is_url(dataset) else Path(dataset)


@lru_cache(maxsize=16)
def _mirror_folder(url: str, cache_dir: str | None, cache_bytes: int) -> Path:
    # once a process, so that all of it sees one version
    try:
        manifest = read_remote(join_url(url, _MANIFEST))
    except UserError as error:
        raise UserError(f"{url} is no dataset: {error} Upload a folder that `distembed prepare` made.") from error
    cache = Path(cache_dir or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "distembed"))
    cache = cache.expanduser().absolute()
    folder, pieces = (
        cache / f"{url.rstrip('/').rpartition('/')[2]}-{checksum_of(url.encode() + manifest)[:16]}",
        cache / "pieces",
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pieces.mkdir(exist_ok=True)
    except OSError as error:
        raise RunError(f"data.cache_dir: {folder} cannot be made ({error}); give another folder.") from error
    with locked(folder / _LOCK):
        with whole_file(folder / _MANIFEST) as temporary:
            Path(temporary).write_bytes(manifest)
        where = {"url": url, "cache": str(pieces), "cache_bytes": cache_bytes}
        write_text(folder / MIRROR_FILE, json.dumps(where, indent=1) + "\n")
    return folder


def mirror_of(folder: Path) -> Mirror | None:
    """Returns the mirror that a folder is; None for a dataset that is all there."""
    path = folder / MIRROR_FILE
    if not path.is_file():
        return None
    where = read_json(path, "remove its folder, which is fetched again")
    return Mirror(folder, where["url"], PieceCache(Path(where["cache"]), where["cache_bytes"]))


def is_remote_dataset(url: str) -> bool:
    """Returns whether there is a dataset at a URL.

    Raises:
        RunError: The server does not answer.
    """
    try:
        find_remote(join_url(url, _MANIFEST))
    except UserError:
        return False
    return True
