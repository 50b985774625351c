"""The row groups of a split's files, held against the manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from distembed.data.dataset.columns import check_columns
from distembed.data.dataset.manifest import DataFile, Manifest
from distembed.data.dataset.mirror import mirror_of
from distembed.data.dataset.pieces import CHECKSUMS_NAME, PIECE, REMEDY, Pieces, PiecewiseFile
from distembed.data.dataset.schema import Schema
from distembed.errors import UserError

_FETCHES_AT_ONCE = 16


@dataclass(frozen=True)
class RowGroup:
    """One row group of a file.

    Attributes:
        file: The file.
        index: Number of the row group in the file.
        num_rows: Number of rows.
    """

    file: PiecewiseFile
    index: int
    num_rows: int

    def __str__(self) -> str:
        """Returns the place for an error."""
        return f"{self.file}, row group {self.index}"

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Reads columns of its rows.

        Raises:
            UserError: The row group is damaged, or the file cannot be read.
        """
        return self.file.row_group(self.index, columns)


def list_row_groups(dataset_dir: Path, manifest: Manifest, split_name: str) -> tuple[RowGroup, ...]:
    """Returns the row groups of a split's files, in order, after a look at the end of each file.

    Raises:
        UserError: A file is missing, lacks a column, or has another size, footer or number of rows than the manifest
            says.
    """
    split = manifest.split(split_name)
    if manifest.is_without_rows:
        raise UserError(
            f"{dataset_dir} is what a run keeps of its dataset: it says what ids mean and has no rows; name the "
            "dataset itself"
        )
    if sum(file.num_rows for file in split.files) != split.num_rows:
        raise UserError(
            f"the manifest of {dataset_dir} is damaged: split {split_name!r} has {split.num_rows} rows, its files have "
            f"{sum(file.num_rows for file in split.files)}; {REMEDY}"
        )
    pieces = read_pieces(dataset_dir, manifest)
    files = piecewise_files(dataset_dir, split.files, pieces)
    with ThreadPoolExecutor(_FETCHES_AT_ONCE) as threads:
        each_metadata = (threads.map if any(file.remote for file in files) else map)(
            checked_metadata, files, split.files, repeat(manifest.schema)
        )
        return tuple(
            RowGroup(file, index, num_rows)
            for file, metadata in zip(files, each_metadata, strict=True)
            for index in range(metadata.num_row_groups)
            if (num_rows := metadata.row_group(index).num_rows)
        )


def piecewise_files(dataset_dir: Path, files: Sequence[DataFile], pieces: Mapping[str, Pieces]) -> list[PiecewiseFile]:
    """Returns files of a dataset, which are read where they are: in the folder, or at the URL that it mirrors.

    Raises:
        UserError: A remote file has no checksums.
    """
    mirror = mirror_of(dataset_dir)
    if mirror is None:
        return [PiecewiseFile(dataset_dir / file.path, pieces.get(file.path)) for file in files]
    lacking = [file.path for file in files if file.path not in pieces]
    if lacking:
        raise UserError(
            f"{mirror.url} has no checksums of {lacking[0]}: a dataset at a URL needs them; prepare it again"
        )
    return [PiecewiseFile(dataset_dir / file.path, pieces[file.path], mirror.pieces(file.path)) for file in files]


def checked_metadata(piecewise: PiecewiseFile, file: DataFile, schema: Schema) -> pq.FileMetaData:
    """Returns what a file's footer says, held against the manifest.

    Raises:
        UserError: The file is missing, lacks a column, or has another size, footer or number of rows.
        RunError: The server of a remote file does not answer.
    """
    path = piecewise.path
    if piecewise.remote is None and not path.is_file():
        raise UserError(f"{path} is missing: the manifest lists it; {REMEDY}")
    if piecewise.remote is None and path.stat().st_size != file.bytes:
        raise UserError(
            f"{path} has {path.stat().st_size} bytes, the manifest says {file.bytes}: "
            f"it was cut short or changed; {REMEDY}"
        )
    metadata = piecewise.metadata()
    try:
        columns = metadata.schema.to_arrow_schema()
    except pa.ArrowException as error:
        raise UserError(f"{piecewise} has columns that cannot be read: {error}; {REMEDY}") from error
    check_columns(str(piecewise), columns, schema)
    if metadata.num_rows != file.num_rows:
        raise UserError(f"{piecewise} has {metadata.num_rows} rows, the manifest says {file.num_rows}; {REMEDY}")
    return metadata


def read_pieces(folder: Path, manifest: Manifest) -> Mapping[str, Pieces]:
    """Returns the pieces of each file of the splits, by its path; nothing for a dataset without checksums.

    Raises:
        UserError: ``checksums.bin`` is missing, damaged or does not fit the manifest.
    """
    files = [file for split in manifest.splits.values() for file in split.files]
    if not manifest.has_checksums or not files:
        return {}
    manifest.require_unchanged(folder, CHECKSUMS_NAME)
    pieces: Pieces = np.fromfile(folder / CHECKSUMS_NAME, PIECE)
    ends = np.cumsum(pieces["bytes"])
    stops = np.searchsorted(ends, np.cumsum([file.bytes for file in files])) + 1
    starts = [0, *stops[:-1]]
    found = {file.path: pieces[start:stop] for file, start, stop in zip(files, starts, stops, strict=True)}
    if stops[-1] != len(pieces) or any(found[file.path]["bytes"].sum() != file.bytes for file in files):
        raise UserError(f"{folder / CHECKSUMS_NAME} does not fit the manifest: {REMEDY}")
    return found
