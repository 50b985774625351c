"""Files that appear in a folder or at a URL: Parquet, CSV, TSV and JSON lines, as ``distembed prepare`` reads them.

Files found together are read in the natural order of their names (``part-2`` before ``part-10``). Writers give a file
its name once it is whole: names that begin with ``.`` or ``_`` are not read, and a rename within a folder is atomic. To
be lenient with other writers, a file is read once two looks in a row, a second apart or more, have found it with the
same size and time, and a Parquet file without its footer, which is written last, is left for a minute. An object store
shows objects whole.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from distembed.base.errors import TemporaryFailure, UserError
from distembed.data.prepare.ingest import InputPart
from distembed.data.prepare.table.inputs import find_inputs, is_table, natural_order
from distembed.data.prepare.table.source import TableSource
from distembed.data.remote import find_remote, is_url, list_remote
from distembed.data.stream.source import Patience, Piece
from distembed.data.table.blocks import ParsedBlock
from distembed.data.table.schema import TableSchema

_SETTLED_SECONDS = 1.0
_FOOTER_SECONDS = 60.0
_FOOTER = b"PAR1"
_PART_BYTES = 32 << 20
_BLOCK_BYTES = 4 << 20


class FolderSource:
    """The files of a folder, subfolders left out; a file that is found after one of a later name is marked as late."""

    def __init__(self, folder: str, schema: TableSchema) -> None:
        self._folder, self._schema = folder.rstrip("/") or "/", schema
        self.is_pending, self.notes = False, list[str]()
        self._found = set[str]()
        self._last: str | None = None  # the greatest name found
        self._seen: dict[str, tuple[tuple[int, Any], float]] = {}  # of files that are not complete: version, since when
        self._patience = Patience(self._folder, self.notes)
        if folder.startswith(("http://", "https://")):
            raise UserError(
                f"data.stream.source (--follow) is {folder!r}, and web servers list no files; give a folder, or a URL "
                "such as s3://bucket/folder."
            )
        if not is_url(folder) and not os.path.isdir(folder):
            raise UserError(
                f"data.stream.source (--follow) is {folder!r}, which is no folder; make it first, or give a URL such "
                "as s3://bucket/folder, or kafka://host:port/topic."
            )
        self._list()

    def restore(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if "file" not in piece:
                raise UserError(
                    f"--resume: the run has read {dict(piece)}, which is no file, and data.stream.source is now "
                    f"{self._folder!r}; give the source that the run was started with."
                )
            self._found.add(piece["file"])
            self._last = max(filter(None, (self._last, piece["file"])), key=natural_order)

    def new_pieces(self) -> list[Piece]:
        try:
            found = self._list()
        except TemporaryFailure as error:
            if not is_url(self._folder):
                raise
            self.is_pending = True
            self._patience.failed(str(error.__cause__))
            return []
        self._patience.answered()
        complete = [name for name, version in found.items() if self._is_complete(name, version)]
        self._seen = {name: seen for name, seen in self._seen.items() if name in found and name not in complete}
        self.is_pending = bool(self._seen)
        pieces: list[Piece] = []
        for name in sorted(complete, key=natural_order):
            is_late = self._last is not None and natural_order(name) < natural_order(self._last)
            num_bytes, version = found[name]
            extra = ({"version": version} if is_url(self._folder) else {}) | ({"late": True} if is_late else {})
            pieces.append({"file": name, "bytes": num_bytes, **extra})
            self._found.add(name)
            self._last = self._last if is_late else name
        return pieces

    def summary(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        return pieces  # the name alone says whether a file has been read

    def blocks(self, piece: Piece, part: int = 0) -> Iterator[tuple[int, ParsedBlock] | None]:
        num_given = 0  # blocks of the part
        while True:
            try:
                for start, block in islice(self._read(piece, part), num_given, None):
                    self._patience.answered()
                    part, num_given = start, num_given + 1 if start == part else 1
                    yield start, block
                return
            except TemporaryFailure as error:  # of an object store
                self._patience.failed(str(error.__cause__))
                yield None

    def _read(self, piece: Piece, part: int) -> Iterator[tuple[int, ParsedBlock]]:
        """Yields the blocks of a piece from a part on; a TemporaryFailure after some tries."""
        place = self.describe(piece)
        remote = find_remote(place) if is_url(place) else None
        num_bytes = remote.num_bytes if remote is not None else _num_bytes(place)
        if num_bytes not in (piece["bytes"], None):
            raise UserError(f"{place} has changed since it was found: {piece['bytes']} bytes then, {num_bytes} now.")
        if remote is not None and remote.version != (then := piece.get("version", remote.version)):
            raise UserError(f"{place} has changed since it was found: version {then} then, {remote.version} now.")
        source = TableSource(find_inputs([place]), self._schema)
        # a part is named by its first byte, or row group: equal places whatever the size of parts is
        starts = [part, *(later.start for later in source.parts(_PART_BYTES) if later.start > part)]
        for start, stop in zip(starts, [*starts[1:], None], strict=True):
            for raw in source.open(InputPart(0, start, stop), _BLOCK_BYTES).raw_blocks():
                yield start, source.parse(raw)

    def describe(self, piece: Piece) -> str:
        return f"{self._folder}/{piece['file']}"

    def close(self) -> None:
        pass

    def _list(self) -> dict[str, tuple[int, Any]]:
        """Returns the size and version of each file of rows that is not found yet, by its name."""
        if is_url(self._folder):
            files = list_remote(self._folder, may_be_empty=True)
            versions = {PurePosixPath(file.url).name: (file.num_bytes or 0, file.version) for file in files}
            return {name: versions[name] for name in versions if self._is_wanted(name)}
        try:
            with os.scandir(self._folder) as entries:
                wanted = [entry for entry in entries if self._is_wanted(entry.name)]
                found = [(entry.name, entry.stat()) for entry in wanted if entry.is_file()]
        except FileNotFoundError as error:
            if os.path.isdir(self._folder):  # a file was renamed between the two looks
                return {}
            raise TemporaryFailure(
                f"the folder {self._folder} (--follow) is gone; put it back, and --resume."
            ) from error
        except OSError as error:
            raise TemporaryFailure(
                f"the folder {self._folder} (--follow) cannot be read: {error.strerror}; see to it, and --resume."
            ) from error
        return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in found}

    def _is_wanted(self, name: str) -> bool:
        return name not in self._found and not name.startswith((".", "_")) and is_table(Path(name))

    def _is_complete(self, name: str, version: tuple[int, Any]) -> bool:
        if is_url(self._folder):
            return True
        seen, since = self._seen.get(name, (None, 0.0))
        if seen != version:
            self._seen[name] = (version, time.monotonic())
            return False
        unchanged = time.monotonic() - since
        lacks_footer = name.lower().endswith((".parquet", ".pq")) and not _has_footer(Path(self._folder) / name)
        return unchanged >= (_FOOTER_SECONDS if lacks_footer else _SETTLED_SECONDS)


def _num_bytes(place: str) -> int:
    try:
        return os.stat(place).st_size
    except OSError as error:
        raise UserError(f"{place} cannot be read: {error.strerror}.") from error


def _has_footer(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            file.seek(-len(_FOOTER), os.SEEK_END)
            return file.read() == _FOOTER
    except OSError:
        return False
