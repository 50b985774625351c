"""Reads named columns of Parquet, CSV and TSV files and pipes, batch by batch, whatever the kind of file.

All columns of text files are read as text: what a value means is decided where it is used. Text files have a header,
where a name may be followed by a type as in RecBole's files (``user_id:token``); or they have none, and the name of a
column is its number, from 1. A JSON object of lists is two columns: ``{"a": [1, 2]}`` has the rows ``a 1`` and ``a 2``.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from distembed.data.prepare.input_bytes import GZIP, ZSTD, InputBytes, file_compression, require_text
from distembed.data.prepare.inputs import InputFiles, is_pipe, open_input, require_text_name
from distembed.data.prepare.progress import NoteCallback, ProgressCallback, ProgressUpdate, ignore
from distembed.data.table.raw_columns import INTEGER, LIST, TEXT, plain_array, type_kind
from distembed.errors import UserError
from distembed.names import nearest

_ENDS = {None: "", GZIP: ".gz", ZSTD: ".zst"}
_SEPARATORS = {kind + end: mark for kind, mark in ((".csv", ","), (".tsv", "\t")) for end in _ENDS.values()}
_RECBOLE = (".inter", ".user", ".item", ".kg", ".link")
"""RecBole's files of interactions, of what is known of users and items, and of knowledge graphs."""
_SEPARATORS |= dict.fromkeys(_RECBOLE, "\t")
_JSON = (".json", ".json.gz")
_SUFFIXES = (".parquet", *_SEPARATORS, *_JSON)
_NO_DELIMITER = "\x1f"
"""The separator of units, which no line of text has."""
_PARQUET_MAGIC = b"PAR1"
_LEAST_BLOCK_BYTES = 1 << 20
_BLOCKS_READ_AHEAD = 32
"""Number of blocks that pyarrow's reader of text reads ahead."""
_MOST_JSON_BYTES = 1 << 28
"""Size of the largest JSON file that is read, which is in memory as a whole."""
_BYTES_A_VALUE = 64
"""Memory that a value of a Parquet column takes, with the numbers made of it."""

_RECBOLE_LIST = ":token_seq"
_RECBOLE_TYPES = ("token", "token_seq", "float", "float_seq")


@dataclass(frozen=True)
class BadRow:
    """A row of a text file that has another number of fields than the others.

    Attributes:
        line: Number of its line, counted from 1.
        text: The row.
    """

    line: int
    text: str


@dataclass(frozen=True)
class ColumnBatch:
    """Some rows of a file.

    Attributes:
        path: Path of the file, as it was named.
        first_row: Number of the first row, counted from 1 without the header.
        columns: Columns in the order asked for, of equal length; texts are of Arrow's type string, those in lists too,
            others as they were.
        bytes_read: About how many bytes of the file were read so far.
        bad_rows: Rows that were set aside before or among these, and after those of the batch before.
        lines: Number of the line of each row, where rows are set aside.
    """

    path: Path
    first_row: int
    columns: tuple[pa.Array, ...]
    bytes_read: int
    bad_rows: tuple[BadRow, ...] = ()
    lines: NDArray[np.int64] | None = None

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


def list_line_files(inputs: Sequence[str | os.PathLike[str]], note: NoteCallback = ignore) -> list[Path]:
    """Returns the files of lines to read; folders become the files in them that end in .txt or .txt.gz, by name.

    Args:
        inputs: Files, folders and pipes; ``-`` is standard input.
        note: Function that is told what else lies in a folder, which is not read.

    Raises:
        UserError: Nothing was named, a path does not exist, or a file is named twice.
    """
    files = _LINE_FILES.list_files(inputs, note)
    for file in files:
        require_text_name(file)
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
    first_line = _first_line(path)
    kind = ".tsv" if b"\t" in first_line else ".csv"
    return (".json" if first_line.lstrip().startswith(b"{") else kind) + _ENDS[file_compression(path)]


def _first_line(path: Path) -> bytes:
    """Returns the first line of a text file, up to a megabyte; nothing where it is damaged, as reading it will say."""
    try:
        return next(InputBytes(str(path)).pieces(), b"").partition(b"\n")[0]
    except UserError:
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


_LINE_FILES = InputFiles(
    can_be_named="text files, or folders of them",
    is_readable=lambda path: path.name.lower().endswith((".txt", ".txt.gz")),
    none_in_folder=".txt or .txt.gz file; name the files themselves to read others",
    order=lambda path: path,
)


@dataclass(frozen=True)
class WantedColumns:
    """The columns to read of every file.

    Attributes:
        kinds: Kinds of values that each column may hold besides texts, by the column's name.
        has_header: Whether text files begin with the names of their columns; if not, a name is a column's number.
        sets_aside: Whether rows of text files with another number of fields are set aside, rather than an error.
    """

    kinds: Mapping[str, Sequence[str]]
    has_header: bool = True
    sets_aside: bool = False


@dataclass(frozen=True)
class _Source:
    """A file that is being read.

    Attributes:
        path: Its name, for errors.
        content: Where its content lies.
        bad_rows: Rows that were set aside so far, in order; the reader is ahead of the batches that it has given.
    """

    path: Path
    content: Path
    bad_rows: list[BadRow] = field(default_factory=list)


def read_columns(contents: Mapping[Path, Path], wanted: WantedColumns, memory_bytes: int) -> Iterator[ColumnBatch]:
    """Yields all rows of all files, in order.

    Args:
        contents: Files, and where the content of each lies, from :func:`store_pipes`.
        wanted: Columns to read.
        memory_bytes: About what a batch may take.

    Raises:
        UserError: A file cannot be read, or lacks a column, or has one of a kind that is not allowed.
    """
    for path, content in contents.items():
        source, read = _Source(path, content), _READERS.get(_suffix(content), _read_text)
        try:
            yield from _numbered(source, read(source, wanted, memory_bytes), wanted)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read: {error}") from error


def read_lines(contents: Mapping[Path, Path], memory_bytes: int) -> Iterator[ColumnBatch]:
    """Yields all lines of text files, plain or gzip, in order, as a column of texts; an empty line is a missing one.

    Args:
        contents: Files, and where the content of each lies, from :func:`store_pipes`.
        memory_bytes: About what a batch may take; a line has at most a part of it.

    Raises:
        UserError: A file cannot be read.
    """
    for path, content in contents.items():
        try:
            yield from _numbered(_Source(path, content), _lines(path, content, memory_bytes))
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read: {error}") from error


def _lines(path: Path, content: Path, memory_bytes: int) -> Iterator[tuple[pa.RecordBatch, float]]:
    size, text_bytes = content.stat().st_size, 0
    if not size:
        return
    require_text(path, _first_line(content))
    block_bytes = max(_LEAST_BLOCK_BYTES, memory_bytes // _BLOCKS_READ_AHEAD)
    with (
        pa.input_stream(str(content), compression=file_compression(content)) as stream,
        pcsv.open_csv(
            stream,
            pcsv.ReadOptions(block_size=block_bytes, column_names=["line"]),
            pcsv.ParseOptions(delimiter=_NO_DELIMITER, quote_char=False, double_quote=False, ignore_empty_lines=False),
            pcsv.ConvertOptions(column_types={"line": pa.string()}, null_values=[""], strings_can_be_null=True),
        ) as file,
    ):
        for batch in file:
            text_bytes += batch.nbytes
            yield batch, text_bytes / size


def reported(
    batches: Iterator[ColumnBatch], contents: Mapping[Path, Path], report: ProgressCallback
) -> Iterator[ColumnBatch]:
    """Yields the same batches, and reports how much was read after each has been dealt with.

    Args:
        batches: Rows of the files, in the order of these.
        contents: Files, and where the content of each lies.
        report: Function that is called with the progress.
    """
    sizes = {path: content.stat().st_size for path, content in contents.items()}
    total, before, current, rows = sum(sizes.values()), 0, next(iter(sizes)), 0
    for batch in batches:
        yield batch
        while batch.path != current:  # files without rows have no batch
            before += sizes.pop(current)
            current = next(iter(sizes))
        rows += batch.num_rows
        report(ProgressUpdate("read", before + batch.bytes_read, total, rows))


def _numbered(
    source: _Source, batches: Iterator[tuple[pa.RecordBatch, float]], wanted: WantedColumns | None = None
) -> Iterator[ColumnBatch]:
    """Yields Arrow's batches of a file with the numbers of their rows; each comes with the share of the file read."""
    num_rows, num_bad, size = 0, 0, source.content.stat().st_size
    header_lines = int(wanted is not None and wanted.has_header and _suffix(source.content) in _SEPARATORS)
    for batch, share in batches:
        columns = tuple(plain_array(column) for column in batch.columns)
        if batch.num_rows and wanted is not None and wanted.sets_aside:
            lines = _line_numbers(source.bad_rows, num_rows + np.arange(1, batch.num_rows + 1), header_lines)
            bad = tuple(row for row in source.bad_rows[num_bad:] if row.line < lines[-1])
            yield ColumnBatch(source.path, num_rows + 1, columns, int(size * min(1.0, share)), bad, lines)
            num_bad += len(bad)
        elif batch.num_rows:
            yield ColumnBatch(source.path, num_rows + 1, columns, int(size * min(1.0, share)))
        num_rows += batch.num_rows
    if wanted is not None and (rest := tuple(source.bad_rows[num_bad:])):
        nothing = tuple(pa.array([], pa.string()) for _ in wanted.kinds)
        yield ColumnBatch(source.path, num_rows + 1, nothing, size, rest, np.zeros(0, np.int64))


def _line_numbers(bad_rows: Sequence[BadRow], numbers: NDArray[np.int64], header_lines: int) -> NDArray[np.int64]:
    """Returns the lines of good rows, given by their numbers among these, counted from 1."""
    good_before = np.array([row.line - header_lines for row in bad_rows], np.int64) - np.arange(1, len(bad_rows) + 1)
    return numbers + header_lines + np.searchsorted(good_before, numbers)


def _read_parquet(source: _Source, wanted: WantedColumns, memory_bytes: int) -> Iterator[tuple[pa.RecordBatch, float]]:
    path, content = source.path, source.content
    with pq.ParquetFile(content, pre_buffer=False) as file:  # which would hold whole row groups
        names = _names_in_file(path, file.schema_arrow, wanted.kinds)
        num_rows = 0
        batch_rows = max(1, memory_bytes // (_BYTES_A_VALUE * len(names)))
        for batch in file.iter_batches(batch_rows, columns=names):
            num_rows += batch.num_rows
            yield batch.select(names), num_rows / file.metadata.num_rows


def _read_text(source: _Source, wanted: WantedColumns, memory_bytes: int) -> Iterator[tuple[pa.RecordBatch, float]]:
    path, content = source.path, source.content
    if not content.stat().st_size:
        raise UserError(f"{path} is empty; {_BEGINS[wanted.has_header]}.")
    require_text(path, _first_line(content))
    # a quotation mark in RecBole's files is a letter like others
    quote = False if _suffix(content) in _RECBOLE else '"'

    def set_aside(row: pcsv.InvalidRow) -> str:
        source.bad_rows.append(BadRow(row.number, row.text))
        return "skip"

    parse = pcsv.ParseOptions(delimiter=_SEPARATORS[_suffix(content)], quote_char=quote)
    if wanted.sets_aside:
        parse.invalid_row_handler = set_aside
    header = {"autogenerate_column_names": not wanted.has_header}
    with pcsv.open_csv(content, pcsv.ReadOptions(block_size=_LEAST_BLOCK_BYTES, **header), parse) as file:
        names = file.schema.names
    if wanted.has_header:
        names = _names_in_file(path, pa.schema([(name, pa.string()) for name in names]), wanted.kinds)
    else:
        names = [names[_position(path, name, len(names))] for name in wanted.kinds]
    source.bad_rows.clear()  # those of a first look
    convert = pcsv.ConvertOptions(
        include_columns=names,
        column_types=dict.fromkeys(names, pa.string()),
        null_values=[""],
        strings_can_be_null=True,
    )
    block_bytes = max(_LEAST_BLOCK_BYTES, memory_bytes // _BLOCKS_READ_AHEAD)
    with pcsv.open_csv(content, pcsv.ReadOptions(block_size=block_bytes, **header), parse, convert) as file:
        size, text_bytes = content.stat().st_size, 0
        for batch in file:
            text_bytes += batch.nbytes
            yield _with_lists(batch, wanted), text_bytes / size


def _with_lists(batch: pa.RecordBatch, wanted: WantedColumns) -> pa.RecordBatch:
    """Returns a batch of a text file with lists in place of RecBole's texts of several words, where these may be."""
    columns = [
        pc.ascii_split_whitespace(column) if LIST in kinds and name.endswith(_RECBOLE_LIST) else column
        for name, column, kinds in zip(batch.schema.names, batch.columns, wanted.kinds.values(), strict=True)
    ]
    return pa.record_batch(columns, names=batch.schema.names)


def _read_json(source: _Source, wanted: WantedColumns, memory_bytes: int) -> Iterator[tuple[pa.RecordBatch, float]]:
    """Yields a row for each entry of the lists of a JSON object: its key and the entry, whatever the columns' names."""
    path, content = source.path, source.content
    if len(wanted.kinds) != 2:
        raise UserError(
            f"{path} is JSON, which has two columns; {len(wanted.kinds)} are read: {', '.join(wanted.kinds)}."
        )
    try:
        with gzip.open(content) if file_compression(content) == GZIP else open(content, "rb") as file:
            text = file.read(_MOST_JSON_BYTES + 1)
        value = json.loads(text) if len(text) <= _MOST_JSON_BYTES else None
    except (ValueError, EOFError, zlib.error, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); write it again, or give its rows as CSV.") from error
    if value is None:
        raise UserError(f"{path} has more than {_MOST_JSON_BYTES:,} bytes of JSON; give its rows as CSV or Parquet.")
    lists = value.items() if isinstance(value, dict) else ()
    if not lists or not all(isinstance(entries, list) for _, entries in lists):
        raise UserError(f'{path} is no JSON object of lists, such as {{"item": [1, 2]}}; write it as one.')
    rows = [(key, entry) for key, entries in lists for entry in entries]
    odd = next((f"{key!r}: {entry!r}" for key, entry in rows if type(entry) not in (int, str)), None)
    if odd is not None:
        raise UserError(f"{path} has {odd} in a list; entries must be integers or texts.")
    columns = [pa.array([str(row[column]) for row in rows], pa.string()) for column in (0, 1)]
    yield pa.record_batch(columns, names=list(wanted.kinds)), 1.0


_READERS = {".parquet": _read_parquet, **dict.fromkeys(_JSON, _read_json)}

_BEGINS = {True: "a text file begins with the names of its columns", False: "give a file with rows"}


def _position(path: Path, name: str, num_columns: int) -> int:
    """Returns the place, from 0, of the column that has this number.

    Raises:
        UserError: It is no number of a column.
    """
    if not (name.isascii() and name.isdigit() and 1 <= int(name[:9]) <= num_columns):
        raise UserError(
            f"{path} has no column {name!r}: without a header a column is named by its number, 1 to {num_columns}."
        )
    return int(name) - 1


def _names_in_file(path: Path, schema: pa.Schema, kinds: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns the names that a file has for the columns, once these are found to hold what they may.

    Raises:
        UserError: A column is missing, is there twice, or holds other values.
    """
    names = {name: _name_in_file(name, schema.names) for name in kinds}
    for column, name in names.items():
        if name not in schema.names:
            guess = nearest(column, schema.names)
            hint = f" Did you mean {guess!r}?" if guess else ""
            raise UserError(f"{path} has no column {column!r}.{hint} It has {', '.join(map(repr, schema.names))}.")
        if schema.names.count(name) > 1:
            raise UserError(f"{path} has several columns named {name!r}; rename them.")
        kind = schema.field(name).type
        if _kind(kind) not in (*kinds[column], TEXT):
            allowed = " or ".join(dict.fromkeys((*kinds[column], TEXT)))
            raise UserError(f"{path}, column {column!r}: its type is {kind}; it must be {allowed}.")
    return list(names.values())


def _name_in_file(column: str, names: Sequence[str]) -> str:
    """Returns the name itself, or the one in the file that is the name with a type of RecBole's."""
    typed = [name for name in names if name.rpartition(":")[::2] in [(column, kind) for kind in _RECBOLE_TYPES]]
    return typed[0] if column not in names and len(typed) == 1 else column


def _kind(type_: pa.DataType) -> str | None:
    """Returns the kind of a type; lists are of integers or texts."""
    kind = type_kind(type_)
    return kind if kind != LIST or type_kind(type_.value_type) in (INTEGER, TEXT) else "other"
