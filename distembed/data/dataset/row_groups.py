"""The row groups of a split's files, held against the manifest and, as they are read, against their checksums."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from distembed.base.checksums import checksum_of
from distembed.base.errors import UserError
from distembed.data.dataset.columns import check_columns
from distembed.data.dataset.manifest import DataFile, Manifest
from distembed.data.dataset.mirror import Mirror, mirror_of
from distembed.data.dataset.pieces import CHECKSUMS_NAME, PIECE, REMEDY, Pieces, read_checksums
from distembed.data.dataset.schema import Schema

_FETCHES_AT_ONCE = 16


@dataclass(frozen=True, eq=False)
class SplitFile:
    """A Parquet file of a split.

    Methods raise a :class:`UserError` where the file is not as it was written, and a :class:`RunError` where the server
    of a remote file does not answer.
    """

    path: Path  # where it is, or would be if it were not remote
    listed: DataFile  # its entry in the manifest
    pieces: Pieces | None = None  # None for a file without checksums
    mirror: Mirror | None = None  # where its bytes come from, if they are not at the path; such a file has checksums

    def __str__(self) -> str:
        """Returns the path or the URL."""
        return str(self.path) if self.mirror is None else self.mirror.file_url(self.listed.path)

    def checked_metadata(self, schema: Schema) -> pq.FileMetaData:
        """Returns the footer, after its columns, size and number of rows were compared with the manifest."""
        if self.mirror is None and not self.path.is_file():
            raise UserError(f"{self} is missing: the manifest lists it; {REMEDY}")
        if not self.has_listed_size:
            raise UserError(
                f"{self} has {self.path.stat().st_size} bytes, the manifest says {self.listed.bytes}: "
                f"it was cut short or changed; {REMEDY}"
            )
        metadata = _footer(self)
        try:
            columns = metadata.schema.to_arrow_schema()
        except pa.ArrowException as error:
            raise UserError(f"{self} has columns that cannot be read: {error}; {REMEDY}") from error
        check_columns(str(self), columns, schema)
        if metadata.num_rows != self.listed.num_rows:
            raise UserError(f"{self} has {metadata.num_rows} rows, the manifest says {self.listed.num_rows}; {REMEDY}")
        return metadata

    @property
    def has_listed_size(self) -> bool:
        """Whether the file has as many bytes as the manifest says, where this can be seen without its server."""
        return self.mirror is not None or (self.path.is_file() and self.path.stat().st_size == self.listed.bytes)

    def damaged_pieces(self) -> list[str]:
        """Returns the problem of each damaged piece of a file with checksums; a remote file is read past the cache."""
        assert self.pieces is not None
        if self.mirror is None:  # a few megabytes at a time
            damaged = np.flatnonzero(read_checksums(self.path, self.pieces["bytes"].tolist()) != self.pieces).tolist()
        else:
            read = self.mirror.read_uncached
            damaged = [each for each in range(len(self.pieces)) if read(self.listed.path, *self._bounds(each)) is None]
        return [self._damaged(index) for index in damaged]

    def piece(self, index: int) -> tuple[bytes, int]:
        """Returns the bytes of a piece, and where it begins."""
        start, stop, checksum = self._bounds(index)
        if self.mirror is not None:
            data = self.mirror.read(self.listed.path, start, stop, checksum)
        else:
            with self.path.open("rb") as file:
                file.seek(start)
                found = file.read(stop - start)
            data = found if checksum_of(found) == checksum else None
        if data is None:
            raise UserError(self._damaged(index))
        return data, start

    def _bounds(self, index: int) -> tuple[int, int, str]:
        """Returns where a piece begins and ends, and its checksum."""
        assert self.pieces is not None
        start, size = int(self.pieces["bytes"][:index].sum()), int(self.pieces["bytes"][index])
        return start, start + size, str(self.pieces["checksum"][index].tobytes().hex())

    def _damaged(self, index: int) -> str:
        """Returns the text of an error that says which piece of the file is damaged."""
        assert self.pieces is not None
        what = "footer" if index == len(self.pieces) - 1 else f"row group {index}"
        return f"{self}, {what} is damaged: its checksum differs from the recorded one; {REMEDY}"


@lru_cache(maxsize=32)
def _footer(file: SplitFile) -> pq.FileMetaData:
    """Returns the footer of a file; reading it takes long where there are many row groups."""
    try:
        if file.pieces is None:
            return pq.read_metadata(file.path)
        return pq.read_metadata(pa.BufferReader(file.piece(len(file.pieces) - 1)[0]))
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file} is not a readable Parquet file: {error}; {REMEDY}") from error


class _Part(io.BytesIO):
    """A part of a file as PyArrow reads it, by places in the whole file, where it begins at ``start``."""

    def __init__(self, data: bytes, start: int) -> None:
        super().__init__(data)
        self._start = start

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return super().seek(offset - self._start if whence == os.SEEK_SET else offset, whence) + self._start

    def tell(self) -> int:
        return super().tell() + self._start


@dataclass(frozen=True)
class RowGroup:
    """One row group of a file."""

    file: SplitFile
    index: int  # in the file
    num_rows: int

    def __str__(self) -> str:
        """Returns the place for an error."""
        return f"{self.file}, row group {self.index}"

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Reads columns of its rows; its bytes are read once, held against their checksum and then decoded.

        Raises:
            UserError: The row group is damaged, or the file cannot be read.
            RunError: The server of a remote file does not answer.
        """
        file = self.file
        try:
            if file.pieces is None:
                source, metadata = file.path, None
            else:
                source, metadata = pa.PythonFile(_Part(*file.piece(self.index)), "r"), _footer(file)
            with pq.ParquetFile(source, metadata=metadata) as parquet:
                return parquet.read_row_group(self.index, columns=list(columns), use_threads=False)
        except UserError:
            raise
        except (pa.ArrowException, OSError, ValueError) as error:  # ValueErrors are places before the piece
            raise UserError(f"{self} cannot be read: {error}; {REMEDY}") from error


def list_row_groups(dataset_dir: Path, manifest: Manifest, split_name: str) -> tuple[RowGroup, ...]:
    """Returns the row groups of a split's files, in order, after a look at the end of each file.

    Raises:
        UserError: A file is missing, lacks a column, or has another size, footer or number of rows than the manifest
            says.
    """
    manifest.split(split_name)
    if manifest.is_without_rows:
        raise UserError(
            f"{dataset_dir} is what a run keeps of its dataset: it says what ids mean and has no rows; name the "
            "dataset itself"
        )
    if problem := wrong_num_rows(dataset_dir, manifest, split_name):
        raise UserError(problem)
    files = split_files(dataset_dir, manifest, split_name, read_pieces(dataset_dir, manifest))
    with ThreadPoolExecutor(_FETCHES_AT_ONCE) as threads:
        found = list(threads.map(lambda file: file.checked_metadata(manifest.schema), files))
    return tuple(
        RowGroup(file, index, num_rows)
        for file, metadata in zip(files, found, strict=True)
        for index in range(metadata.num_row_groups)
        if (num_rows := metadata.row_group(index).num_rows)
    )


def wrong_num_rows(dataset_dir: Path, manifest: Manifest, split_name: str) -> str | None:
    """Returns the problem that a split has another number of rows than its files by the manifest; None without one."""
    split = manifest.splits[split_name]
    num_rows = sum(file.num_rows for file in split.files)
    if num_rows == split.num_rows or manifest.is_without_rows:
        return None
    said = f"split {split_name!r} has {split.num_rows} rows, its files have {num_rows}"
    return f"the manifest of {dataset_dir} is damaged: {said}; {REMEDY}"


def split_files(
    dataset_dir: Path, manifest: Manifest, split_name: str, pieces: Mapping[str, Pieces]
) -> list[SplitFile]:
    """Returns the files of a split, which are read where they are: in the folder, or at the URL that it mirrors."""
    mirror = mirror_of(dataset_dir)
    files = manifest.splits[split_name].files
    lacking = [file.path for file in files if file.path not in pieces]
    if mirror is not None and lacking:
        raise UserError(
            f"{mirror.url} has no checksums of {lacking[0]}: a dataset at a URL needs them; prepare it again"
        )
    return [SplitFile(dataset_dir / file.path, file, pieces.get(file.path), mirror) for file in files]


def read_pieces(folder: Path, manifest: Manifest) -> Mapping[str, Pieces]:
    """Returns the pieces of each file of the splits, by its path; nothing for a dataset without checksums.

    Raises:
        UserError: ``checksums.bin`` is missing, damaged or does not fit the manifest.
    """
    files = manifest.split_files
    if not manifest.has_checksums or not files:
        return {}
    manifest.require_unchanged(folder, CHECKSUMS_NAME)
    pieces: Pieces = np.fromfile(folder / CHECKSUMS_NAME, PIECE)
    ends = np.cumsum(pieces["bytes"])
    stops = np.searchsorted(ends, np.cumsum([file.bytes for file in files])) + 1
    found = {file.path: own for file, own in zip(files, np.split(pieces, stops[:-1]), strict=True)}
    if stops[-1] != len(pieces) or any(found[file.path]["bytes"].sum() != file.bytes for file in files):
        raise UserError(f"{folder / CHECKSUMS_NAME} does not fit the manifest: {REMEDY}")
    return found
