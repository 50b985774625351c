"""Reads named columns of Parquet, CSV and TSV files and pipes, batch by batch, whatever the kind of file.

Text files have a header, and all their columns are read as text: what a value means is decided where it is used.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq

from distembed.data.prepare.first_line import require_text
from distembed.data.prepare.inputs import InputFiles, is_pipe, open_input, require_text_name
from distembed.data.prepare.progress import NoteCallback, ignore
from distembed.data.prepare.source_files import is_gzip
from distembed.errors import UserError
from distembed.names import nearest

_SEPARATORS = {".csv": ",", ".csv.gz": ",", ".tsv": "\t", ".tsv.gz": "\t"}
_SUFFIXES = (".parquet", *_SEPARATORS)
_PARQUET_MAGIC = b"PAR1"
_LEAST_BLOCK_BYTES = 1 << 20
_BLOCKS_READ_AHEAD = 32
"""Number of blocks that pyarrow's reader of text reads ahead."""
_BYTES_A_VALUE = 64
"""Memory that a value of a Parquet column takes, with the numbers made of it."""

INTEGER, TEXT, NUMBER = "integer", "text", "number"
"""Kinds of values; a number may have a fraction."""


@dataclass(frozen=True)
class ColumnBatch:
    """Some rows of a file.

    Attributes:
        path: Path of the file, as it was named.
        first_row: Number of the first row, counted from 1 without the header.
        columns: Columns in the order asked for, of equal length; texts are of Arrow's type string, others as they
            were.
        bytes_read: About how many bytes of the file were read so far.
    """

    path: Path
    first_row: int
    columns: tuple[pa.Array, ...]
    bytes_read: int

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.columns[0])


def list_column_files(inputs: Sequence[str | os.PathLike[str]], note: NoteCallback = ignore) -> list[Path]:
    """Returns the files to read; folders become the Parquet, CSV and TSV files that lie in them, by name.

    Args:
        inputs: Files, folders and pipes; ``-`` is standard input.
        note: Function that is told what else lies in a folder, which is not read.

    Raises:
        UserError: Nothing was named, a path does not exist or is of another kind, or a file is named twice.
    """
    files = _COLUMN_FILES.list_files(inputs, note)
    for file in files:
        require_text_name(file)
        if not _suffix(file) and not is_pipe(file):
            raise UserError(f"{file} ends in none of {', '.join(_SUFFIXES)}, which say how a file is read; rename it.")
    return files


def store_pipes(files: Sequence[Path], folder: Path) -> dict[Path, Path]:
    """Returns where the content of each file lies, which for a pipe is a copy: columns are read more than once.

    Of a pipe whose name does not say how it is read, the first bytes and the first line do.

    Args:
        files: Files and pipes to read.
        folder: Existing folder for the copies.

    Raises:
        UserError: A pipe cannot be read.
    """
    return {file: _store_pipe(file, folder / f"pipe-{n}") if is_pipe(file) else file for n, file in enumerate(files)}


def _store_pipe(pipe: Path, copy: Path) -> Path:
    try:
        with open_input(pipe) as source:
            first = source.read(_LEAST_BLOCK_BYTES)
            with open(copy, "wb") as target:
                while first:
                    target.write(first)
                    first = source.read(_LEAST_BLOCK_BYTES)
    except (PermissionError, FileNotFoundError) as error:
        raise UserError(f"{pipe} cannot be read: {error.strerror}") from error
    return copy.rename(copy.with_name(copy.name + (_suffix(pipe) or _suffix_by_content(copy))))


def _suffix_by_content(path: Path) -> str:
    """Returns the end of a name that says how a file is read, by what is in it."""
    with open(path, "rb") as file:
        if file.read(len(_PARQUET_MAGIC)) == _PARQUET_MAGIC:
            return ".parquet"
    separator = ".tsv" if b"\t" in _first_line(path) else ".csv"
    return separator + (".gz" if is_gzip(path) else "")


def _first_line(path: Path) -> bytes:
    """Returns the first line of a text file, plain or gzip; nothing where it is damaged, which reading it will say."""
    try:
        with gzip.open(path) if is_gzip(path) else open(path, "rb") as text:
            return bytes(text.readline(_LEAST_BLOCK_BYTES))
    except (EOFError, zlib.error, OSError):
        return b""


def _suffix(path: Path) -> str:
    """Returns the end of a file's name that says how it is read; empty where it has none."""
    return next((suffix for suffix in _SUFFIXES if path.name.lower().endswith(suffix)), "")


_COLUMN_FILES = InputFiles(
    can_be_named="Parquet, CSV or TSV files, or folders of them",
    is_readable=lambda path: bool(_suffix(path)),
    none_in_folder=f"file that ends in {', '.join(_SUFFIXES)}; name one that has",
    order=lambda path: path,
)


def read_columns(
    contents: Mapping[Path, Path], kinds: Mapping[str, Sequence[str]], memory_bytes: int
) -> Iterator[ColumnBatch]:
    """Yields all rows of all files, in order.

    Args:
        contents: Files of edges, and where the content of each lies, from :func:`store_pipes`.
        kinds: Kinds of values that each column may hold, by the column's name.
        memory_bytes: About what a batch may take.

    Raises:
        UserError: A file cannot be read, or lacks a column, or has one of a kind that is not allowed.
    """
    for path, content in contents.items():
        read = _read_parquet if _suffix(content) == ".parquet" else _read_text
        try:
            yield from _numbered(path, content.stat().st_size, read(path, content, kinds, memory_bytes))
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read: {error}") from error


def _numbered(path: Path, size: int, batches: Iterator[tuple[pa.RecordBatch, float]]) -> Iterator[ColumnBatch]:
    """Yields Arrow's batches of a file with the numbers of their rows; each comes with the share of the file read."""
    num_rows = 0
    for batch, share in batches:
        columns = tuple(_plain(column) for column in batch.columns)
        if batch.num_rows:
            yield ColumnBatch(path, num_rows + 1, columns, int(size * min(1.0, share)))
        num_rows += batch.num_rows


def _plain(column: pa.Array) -> pa.Array:
    """Returns a column without a dictionary, and texts of any kind as Arrow's string."""
    column = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
    return column.cast(pa.string()) if _kind(column.type) == TEXT else column


def _read_parquet(
    path: Path, content: Path, kinds: Mapping[str, Sequence[str]], memory_bytes: int
) -> Iterator[tuple[pa.RecordBatch, float]]:
    with pq.ParquetFile(content, pre_buffer=False) as file:  # which would hold whole row groups
        _require_columns(path, file.schema_arrow, kinds)
        num_rows = 0
        batch_rows = max(1, memory_bytes // (_BYTES_A_VALUE * len(kinds)))
        for batch in file.iter_batches(batch_rows, columns=list(kinds)):
            num_rows += batch.num_rows
            yield batch.select(list(kinds)), num_rows / file.metadata.num_rows


def _read_text(
    path: Path, content: Path, kinds: Mapping[str, Sequence[str]], memory_bytes: int
) -> Iterator[tuple[pa.RecordBatch, float]]:
    if not content.stat().st_size:
        raise UserError(f"{path} is empty; a text file begins with the names of its columns.")
    require_text(path, _first_line(content))
    parse = pcsv.ParseOptions(delimiter=_SEPARATORS[_suffix(content)])
    with pcsv.open_csv(content, pcsv.ReadOptions(block_size=_LEAST_BLOCK_BYTES), parse) as file:
        names = file.schema.names
    _require_columns(path, pa.schema([(name, pa.string()) for name in names]), kinds)
    convert = pcsv.ConvertOptions(
        include_columns=list(kinds),
        column_types=dict.fromkeys(kinds, pa.string()),
        null_values=[""],
        strings_can_be_null=True,
    )
    block_bytes = max(_LEAST_BLOCK_BYTES, memory_bytes // _BLOCKS_READ_AHEAD)
    with pcsv.open_csv(content, pcsv.ReadOptions(block_size=block_bytes), parse, convert) as file:
        size, text_bytes = content.stat().st_size, 0
        for batch in file:
            text_bytes += batch.nbytes
            yield batch, text_bytes / size


def _require_columns(path: Path, schema: pa.Schema, kinds: Mapping[str, Sequence[str]]) -> None:
    for column, allowed in kinds.items():
        if column not in schema.names:
            guess = nearest(column, schema.names)
            hint = f" Did you mean {guess!r}?" if guess else ""
            raise UserError(f"{path} has no column {column!r}.{hint} It has {', '.join(map(repr, schema.names))}.")
        if schema.names.count(column) > 1:
            raise UserError(f"{path} has several columns named {column!r}; rename them.")
        kind = schema.field(column).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if _kind(kind) not in allowed and _kind(kind) != TEXT:
            raise UserError(f"{path}, column {column!r}: its type is {kind}; it must be {' or '.join(allowed)}.")


def _kind(kind: pa.DataType) -> str:
    if pa.types.is_integer(kind):
        return INTEGER
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return NUMBER
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    return TEXT if is_text else "other"
