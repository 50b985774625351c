"""Parquet files in pieces that have a checksum each: a row group is verified when it is read, in the same pass.

::

    | PAR1 row group 0 | row group 1 | ... | last row group | footer PAR1 |
      piece 0            piece 1             piece n - 1      piece n

Every byte of a file is in one of its pieces. ``checksums.bin`` has 24 bytes a piece: its size (int64, little-endian)
and its XXH3; all files of all splits are end to end there, in the manifest's order. A terabyte in row groups of 7 MB
has 4 MB of them. The manifest has the checksum of ``checksums.bin``. Datasets of older versions have none: their pieces
are found by their footers, and held against nothing.

Trade-off: Parquet's own checksums of pages would do without a file, but leave out the headers of the pages, where one
bit can change the encoding or the number of values.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from distembed.checksums import checksum_of, file_checksum
from distembed.data.dataset.mirror import RemotePieces
from distembed.errors import UserError
from distembed.files import whole_file

CHECKSUMS_NAME = "checksums.bin"
REMEDY = "prepare the data again, or fetch the file again from where a whole copy is"

PIECE = np.dtype([("bytes", "<i8"), ("checksum", "V16")])
Pieces: TypeAlias = NDArray[np.void]
"""The pieces of a file, or of several end to end, each of the type ``PIECE``."""


@dataclass(frozen=True, eq=False)
class PiecewiseFile:
    """A Parquet file of which every piece that is read is held against its checksum.

    Attributes:
        path: Path of the file; where it would be, of a remote one.
        pieces: Its pieces; None for a file without checksums.
        remote: Where its bytes come from, if they are not at the path; such a file has checksums.
    """

    path: Path
    pieces: Pieces | None = None
    remote: RemotePieces | None = None

    def __str__(self) -> str:
        """Returns the path or the URL."""
        return str(self.path) if self.remote is None else self.remote.url

    def metadata(self) -> pq.FileMetaData:
        """Reads the footer.

        Raises:
            UserError: It is damaged, or the file cannot be read.
            RunError: The server of a remote file does not answer.
        """
        try:
            if self.pieces is None:
                return pq.read_metadata(self.path)
            return pq.read_metadata(pa.BufferReader(self._read(*self._bounds(None, len(self.pieces) - 1))))
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{self} is not a readable Parquet file: {error}; {REMEDY}") from error

    def row_group(self, index: int, columns: Sequence[str]) -> pa.Table:
        """Reads columns of a row group, whose bytes are read once, held against their checksum and then decoded.

        Raises:
            UserError: The row group is damaged, or the file cannot be read.
            RunError: The server of a remote file does not answer.
        """
        metadata = self.metadata() if self.pieces is None else _kept_metadata(self)
        try:
            bounds = self._bounds(metadata, index)
            source = pa.PythonFile(_Part(self._read(*bounds), bounds[1]), "r")
            with pq.ParquetFile(source, metadata=metadata) as parquet:
                return parquet.read_row_group(index, columns=list(columns), use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{self}, row group {index} cannot be read: {error}; {REMEDY}") from error

    def damaged_pieces(self) -> Iterator[str]:
        """Yields what is wrong with each piece that is not as it was written, of a file with checksums.

        A remote file is read from its URL, whatever the cache has.

        Raises:
            OSError: The file cannot be read.
            UserError: There is no such remote file.
            RunError: The server of a remote file does not answer.
        """
        assert self.pieces is not None
        with nullcontext() if self.remote else self.path.open("rb") as file:
            for index, piece in enumerate(self.pieces):
                checksum = _checksum(piece)
                if self.remote is not None:
                    is_whole = self.remote.read_uncached(*self._bounds(None, index)[1:], checksum) is not None
                else:
                    assert file is not None
                    is_whole = file_checksum(file, int(piece["bytes"])) == checksum
                if not is_whole:
                    yield self._damaged(index)

    def _bounds(self, metadata: pq.FileMetaData | None, index: int) -> tuple[int, int, int]:
        """Returns the number of a piece, and where it begins and ends; without metadata for a file with checksums."""
        sizes = piece_sizes(self.path, metadata) if self.pieces is None else self.pieces["bytes"].tolist()
        start = sum(sizes[:index])
        return index, start, start + sizes[index]

    def _read(self, index: int, start: int, stop: int) -> bytes:
        """Reads a piece."""
        checksum = None if self.pieces is None else _checksum(self.pieces[index])
        if self.remote is not None:
            assert checksum is not None, "remote files have checksums"
            data = self.remote.read(start, stop, checksum)
        else:
            with self.path.open("rb") as file:
                file.seek(start)
                data = file.read(stop - start)
            data = data if checksum is None or checksum_of(data) == checksum else None
        if data is None:
            raise UserError(self._damaged(index))
        return data

    def _damaged(self, index: int) -> str:
        """Returns the text of an error that says which piece of the file is damaged."""
        assert self.pieces is not None
        what = "footer" if index == len(self.pieces) - 1 else f"row group {index}"
        return f"{self}, {what} is damaged: its checksum is not that of what was written; {REMEDY}"


@lru_cache(maxsize=32)
def _kept_metadata(file: PiecewiseFile) -> pq.FileMetaData:
    """Returns what the footer of a file with checksums says, which takes long to read for a file of many row groups."""
    return file.metadata()


def _checksum(piece: np.void) -> str:
    """Returns the checksum of a piece as text."""
    return str(piece["checksum"].tobytes().hex())


class _Part(io.BytesIO):
    """A part of a file as PyArrow reads it, by places in the whole file, where it begins at ``start``."""

    def __init__(self, data: bytes, start: int) -> None:
        super().__init__(data)
        self._start = start

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_SET and offset < self._start:
            raise OSError(f"byte {offset} is before the row group")
        return super().seek(offset - self._start if whence == os.SEEK_SET else offset, whence) + self._start

    def tell(self) -> int:
        return super().tell() + self._start


def piece_sizes(path: Path, metadata: pq.FileMetaData) -> list[int]:
    """Returns the size of each piece of a file, the footer's last.

    Raises:
        UserError: The row groups do not follow each other.
    """
    starts: list[int] = []
    stop = 0
    for index in range(metadata.num_row_groups):
        begin, end = _row_group_bounds(metadata.row_group(index), stop)
        if begin < stop or end < begin:
            raise UserError(f"{path}, row group {index} does not come after the one before it; write the file anew")
        starts.append(begin if starts else 0)
        stop = end
    bounds = [*starts, stop, path.stat().st_size] if starts else [0, path.stat().st_size]
    return [end - begin for begin, end in zip(bounds[:-1], bounds[1:], strict=True)]


def _row_group_bounds(row_group: pq.RowGroupMetaData, before: int) -> tuple[int, int]:
    """Returns where a row group's columns begin and end; where the one before ends, if it has no bytes."""
    starts, stops = [], []
    for column in (row_group.column(index) for index in range(row_group.num_columns)):
        # a column without rows may have a dictionary and no page, which is then said to be at 0
        pages = [offset for offset in (column.dictionary_page_offset, column.data_page_offset) if offset]
        if pages and column.total_compressed_size:
            starts.append(min(pages))
            stops.append(min(pages) + column.total_compressed_size)
    return (min(starts), max(stops)) if starts else (before, before)


def file_pieces(path: Path) -> Pieces:
    """Returns the pieces of a Parquet file as it is, a few megabytes of which are in memory at a time.

    Raises:
        UserError: Its row groups do not follow each other.
        OSError: The file cannot be read.
        pyarrow.ArrowInvalid: The file is no Parquet.
    """
    sizes = piece_sizes(path, pq.read_metadata(path))
    with path.open("rb") as file:
        return np.array([(size, bytes.fromhex(file_checksum(file, size))) for size in sizes], PIECE)


def write_pieces(folder: Path, pieces: Iterable[Pieces]) -> None:
    """Writes ``checksums.bin`` whole or not at all, from the pieces of all files of all splits in the manifest's order.

    Raises:
        RunError: The file cannot be written.
    """
    with whole_file(folder / CHECKSUMS_NAME, make_folder=False) as temporary, open(temporary, "wb") as file:
        for of_one_file in pieces:
            file.write(of_one_file.tobytes())
