"""The row groups of a split's files: each is compared with its checksum when it is read; and the check of a dataset."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from distembed.base.checksums import Verification, checksum_of
from distembed.base.errors import RunError, UserError
from distembed.data.dataset.manifest import (
    CHECKSUMS_NAME,
    MANIFEST_NAME,
    PIECE,
    REMEDY,
    DataFile,
    Manifest,
    Pieces,
    check_columns,
    read_checksums,
)
from distembed.data.dataset.mirror import Mirror, dataset_folder, mirror_of
from distembed.data.dataset.schema import Schema

_FETCHES_AT_ONCE = 16


@dataclass(frozen=True, eq=False)
class SplitFile:
    """A Parquet file of a split."""

    path: Path  # of a local file
    listed: DataFile  # its entry in the manifest
    pieces: Pieces  # its row groups and footer, with their checksums
    mirror: Mirror | None = None  # of a remote file

    def __str__(self) -> str:
        return str(self.path) if self.mirror is None else self.mirror.file_url(self.listed.path)

    def checked_metadata(self, schema: Schema) -> pq.FileMetaData:
        """Returns the Parquet footer; raises a UserError if the file's size, columns or rows are not the manifest's."""
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
        """Whether a local file exists with the manifest's size; True for a remote file, which is not asked."""
        return self.mirror is not None or (self.path.is_file() and self.path.stat().st_size == self.listed.bytes)

    def problems(self, schema: Schema) -> Iterator[str]:
        """Compares every piece with its checksum, and yields a text for each damaged one.

        If none is damaged, checks the footer, which may raise a UserError. Remote files are read from their URL, not
        from the cache.
        """
        damaged: list[int] = []
        if self.mirror is not None:
            read = self.mirror.read_uncached
            indices = range(len(self.pieces))
            damaged = [index for index in indices if read(self.listed.path, *self._bounds(index)) is None]
        elif self.has_listed_size:  # a few megabytes at a time
            damaged = np.flatnonzero(read_checksums(self.path, self.pieces["bytes"].tolist()) != self.pieces).tolist()
        yield from map(self._damaged, damaged)
        if not damaged:
            self.checked_metadata(schema)

    def piece(self, index: int) -> tuple[bytes, int]:
        """Reads a piece, and returns its bytes and first position in the file; a UserError if its checksum differs."""
        start, stop, checksum = self._bounds(index)
        if self.mirror is not None:
            data = self.mirror.read(self.listed.path, start, stop, checksum)
        else:
            with self.path.open("rb") as file:
                file.seek(start)
                read = file.read(stop - start)
            data = read if checksum_of(read) == checksum else None
        if data is None:
            raise UserError(self._damaged(index))
        return data, start

    def _bounds(self, index: int) -> tuple[int, int, str]:
        start, size = int(self.pieces["bytes"][:index].sum()), int(self.pieces["bytes"][index])
        return start, start + size, str(self.pieces["checksum"][index].tobytes().hex())

    def _damaged(self, index: int) -> str:
        named_piece = "footer" if index == len(self.pieces) - 1 else f"row group {index}"
        return f"{self}, {named_piece} is damaged: its checksum differs from the recorded one; {REMEDY}"


@lru_cache(maxsize=32)
def _footer(file: SplitFile) -> pq.FileMetaData:
    """Parses the footer of a file; cached by the SplitFile object, since parsing many row groups takes long."""
    try:
        return pq.read_metadata(pa.BufferReader(file.piece(len(file.pieces) - 1)[0]))
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file} is not a readable Parquet file: {error}; {REMEDY}") from error


class _Part(io.BytesIO):
    """One piece of a file, which PyArrow reads by positions in the whole file; the piece begins at ``start``."""

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
        return f"{self.file}, row group {self.index}"

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Reads some columns; the bytes are read once, compared with their checksum and then decoded."""
        try:
            source = pa.PythonFile(_Part(*self.file.piece(self.index)), "r")
            with pq.ParquetFile(source, metadata=_footer(self.file)) as parquet:
                return parquet.read_row_group(self.index, columns=list(columns), use_threads=False)
        except UserError:
            raise
        except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: a seek to before the piece
            raise UserError(f"{self} cannot be read: {error}; {REMEDY}") from error

    def times(self, rows: pa.Table, name: str, start: int = 0) -> NDArray[np.int64]:
        """Returns the column of times of this row group's rows from row ``start`` on; a UserError names a null."""
        column = rows.column(name)
        if column.null_count:
            row = start + pc.index(pc.is_null(column), True).as_py()
            raise UserError(f"{self}, column {name!r}: row {row} has no time; give it one, or leave such rows out")
        times: NDArray[np.int64] = column.to_numpy()
        return times


def list_row_groups(dataset_dir: Path, manifest: Manifest, split_name: str) -> tuple[RowGroup, ...]:
    """Returns the row groups of a split that have rows, in file order, after checking the footer of each file.

    Raises a UserError for an unknown split, a run's copy of a manifest (which has no rows), and files that do not agree
    with the manifest. The row groups themselves are not read.
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
        footers = list(threads.map(lambda file: file.checked_metadata(manifest.schema), files))
    return tuple(
        RowGroup(file, index, num_rows)
        for file, metadata in zip(files, footers, strict=True)
        for index in range(metadata.num_row_groups)
        if (num_rows := metadata.row_group(index).num_rows)
    )


def read_times(dataset_dir: str | os.PathLike[str], split_name: str) -> NDArray[np.int64]:
    """Returns the time of each row of a split [rows], in seconds since 1970; the schema has a time.

    Raises a UserError for a row without a time.
    """
    folder = dataset_folder(dataset_dir)
    manifest = Manifest.load(folder)
    name = str(manifest.schema.time)
    groups = list_row_groups(folder, manifest, split_name)
    return np.concatenate([np.empty(0, np.int64), *(group.times(group.read([name]), name) for group in groups)])


def too_many_unreadable(problems: dict[str, str], most: int) -> UserError:
    """Returns the error that more row groups cannot be read than are allowed, given their problems by their names."""
    *_, latest = problems.values()
    return UserError(
        f"{len(problems)} row groups cannot be read, and data.skip_unreadable allows {most}; the last: {latest}"
    )


def wrong_num_rows(dataset_dir: Path, manifest: Manifest, split_name: str) -> str | None:
    """Returns a problem if the manifest's row count of a split is not the sum over its files; None if it is."""
    split = manifest.splits[split_name]
    num_rows = sum(file.num_rows for file in split.files)
    if num_rows == split.num_rows or manifest.is_without_rows:
        return None
    difference = f"split {split_name!r} has {split.num_rows} rows, its files have {num_rows}"
    return f"the manifest of {dataset_dir} is damaged: {difference}; {REMEDY}"


def split_files(
    dataset_dir: Path, manifest: Manifest, split_name: str, pieces: Mapping[str, Pieces]
) -> list[SplitFile]:
    """Returns the files of a split, in the dataset's folder or at the URL that the folder mirrors."""
    mirror, files = mirror_of(dataset_dir), manifest.splits[split_name].files
    return [SplitFile(dataset_dir / file.path, file, pieces[file.path], mirror) for file in files]


def read_pieces(folder: Path, manifest: Manifest) -> Mapping[str, Pieces]:
    """Divides the pieces of ``checksums.bin`` among the splits' files, by path; refuses sizes that do not add up."""
    files = manifest.split_files
    if not files:
        return {}
    manifest.require_unchanged(folder, CHECKSUMS_NAME)
    pieces: Pieces = np.fromfile(folder / CHECKSUMS_NAME, PIECE)
    # The files are thought of end to end: a file's last piece ends at the byte where the file ends.
    ends = np.cumsum(pieces["bytes"])
    stops = np.searchsorted(ends, np.cumsum([file.bytes for file in files])) + 1
    pieces_by_file = dict(zip([file.path for file in files], np.split(pieces, stops[:-1]), strict=True))
    if stops[-1] != len(pieces) or any(pieces_by_file[file.path]["bytes"].sum() != file.bytes for file in files):
        raise UserError(f"{folder / CHECKSUMS_NAME} does not fit the manifest: {REMEDY}")
    return pieces_by_file


def require_whole_splits(dataset_dir: str | os.PathLike[str], split_names: Iterable[str]) -> None:
    """Raises a UserError unless the files of some splits have the manifest's sizes, columns and row counts."""
    folder = dataset_folder(dataset_dir)
    manifest = Manifest.load(folder)
    for name in split_names:
        list_row_groups(folder, manifest, name)


def verify_dataset(dataset_dir: str | os.PathLike[str], progress: Callable[[int], None] | None = None) -> Verification:
    """Compares every byte of a dataset with its checksums, and returns all problems; memory does not grow with it.

    Args:
        dataset_dir: Folder with ``manifest.json``, or its URL.
        progress: Function that is called now and then with the number of bytes read so far.
    """
    folder = dataset_folder(dataset_dir)
    manifest = Manifest.load(folder)
    verification = Verification()
    report = progress or (lambda num_bytes: None)
    verification.add((), folder / MANIFEST_NAME)
    for file_name in manifest.other_files:
        path = folder / file_name
        verification.add(_until_error(_other_file_problems(folder, manifest, file_name), path), path)
        report(verification.num_bytes)
    verification.problems += [text for name in manifest.splits if (text := wrong_num_rows(folder, manifest, name))]
    try:
        pieces = read_pieces(folder, manifest)
    except UserError as error:
        if not any(CHECKSUMS_NAME in problem for problem in verification.problems):
            verification.problems.append(str(error))
        return verification
    for name in manifest.splits:
        for file in split_files(folder, manifest, name, pieces):
            verification.add(_until_error(file.problems(manifest.schema), file), file.path)
            verification.num_bytes += 0 if file.mirror is None else file.listed.bytes
            report(verification.num_bytes)
    return verification


def _until_error(problems: Iterable[str], file: object) -> list[str]:
    """Collects the problems of a file; an exception while they are collected becomes the last problem."""
    texts: list[str] = []
    try:
        texts.extend(problems)
    except (UserError, RunError) as error:
        texts.append(str(error))
    except (pa.ArrowException, OSError) as error:
        texts.append(f"{file} cannot be read ({error}); {REMEDY}.")
    return texts


def _other_file_problems(folder: Path, manifest: Manifest, file: str) -> Iterator[str]:
    """Yields problems of a file outside the splits; a wrong checksum raises a UserError."""
    path = manifest.require_unchanged(folder, file)
    if not path.is_file():
        yield f"{path} is missing: the manifest lists it; {REMEDY}."
        return
    for name, vocabulary in manifest.vocabularies.items():
        num_ids = vocabulary.num_ids
        if vocabulary.file == file and (num_rows := pq.read_metadata(path).num_rows) != num_ids:
            yield f"{path} has {num_rows:,} ids of feature {name!r}, the manifest says {num_ids:,}; {REMEDY}."
