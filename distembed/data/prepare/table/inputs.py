"""The inputs of tables: files, folders, patterns, URLs and pipes, and how each is read, by its name or first bytes."""

from __future__ import annotations

import codecs
import glob
import gzip
import hashlib
import io
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from distembed.base.errors import UserError
from distembed.base.units import enumerate_names
from distembed.data.prepare.ingest import RawInput
from distembed.data.prepare.options import NoteCallback, ignore
from distembed.data.prepare.staging import require_text_name
from distembed.data.remote import RemoteFile, is_url, list_remote, open_remote

GZIP, ZSTD = "gzip", "zstd"
MAGIC = {b"\x1f\x8b": GZIP, b"\x28\xb5\x2f\xfd": ZSTD}  # how compressed inputs begin
OTHER_KINDS = {
    b"PK\x03\x04": "a zip archive",
    b"BZh": "a bzip2 file",
    b"\xfd7zXZ\x00": "an xz file",
    b"PAR1": "a Parquet file",
}
"""How files begin that are not read as text."""

STANDARD_INPUT = "/dev/stdin"
PIECE_BYTES = 1 << 20
_FIRST_BYTES = 16


def compression_of(first: bytes) -> str | None:
    """Returns how an input that begins with these bytes is compressed; None where it is not."""
    return next((name for magic, name in MAGIC.items() if first.startswith(magic)), None)


def require_text(place: str, data: bytes) -> None:
    """Raises a UserError if the first bytes are of an archive, of Parquet, or of text in UTF-16 or UTF-32."""
    kind = next((name for magic, name in OTHER_KINDS.items() if data.startswith(magic)), None)
    if kind is not None:
        raise UserError(
            f"{place} is {kind}; give its rows as text, plain, gzip or Zstandard, or unpack it into a pipe and name "
            "that, or - for standard input"
        )
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)) and b"\0" in data[:8]:
        raise UserError(
            f"{place} is text in UTF-16 or UTF-32; rows are read as ASCII or UTF-8: convert it, such as with "
            "`iconv -f UTF-16 -t UTF-8`"
        )


def open_input(place: str) -> IO[bytes]:
    """Opens a file, a pipe or a URL for reading; an OSError where it cannot be read."""
    if is_url(place):
        return open_remote(place)
    if place == STANDARD_INPUT:  # from where it stands; a socket, moreover, cannot be opened by its name
        return open(0, "rb", closefd=False)
    return open(place, "rb")


class InputBytes(io.RawIOBase):
    """Reads an input once from byte ``start``, unpacks it (from byte 0 only), and hashes the bytes as stored."""

    def __init__(self, place: str, start: int = 0) -> None:
        self._place, self._start = place, start
        self._hash = hashlib.sha256()
        self.bytes_read = 0  # so far, compressed where the input is

    @property
    def sha256(self) -> str:  # of the bytes read so far
        return self._hash.hexdigest()

    def pieces(self) -> Iterator[bytes]:
        """Yields the input, unpacked, in pieces of :data:`PIECE_BYTES`, but for the last one."""
        compression = None
        try:
            with open_input(self._place) as self._file:
                if self._start:
                    self._file.seek(self._start)
                packed = io.BufferedReader(self, PIECE_BYTES)
                compression = None if self._start else compression_of(packed.peek(_FIRST_BYTES))
                unpacked = _UNPACKERS[compression](packed)
                while chunk := unpacked.read(PIECE_BYTES):
                    yield chunk
        except (OSError, zlib.error, EOFError) as error:
            if compression and getattr(error, "errno", None) is None:  # the unpacker's own
                text = f"is a damaged {compression} file ({error}); fetch it again"
            else:
                text = f"cannot be read: {getattr(error, 'strerror', None) or error}; see whether it is whole"
            raise UserError(f"{self._place} {text}") from error

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Reads the next bytes as they lie there, fewer than fit only at the end."""
        count: int = self._file.readinto(buffer)  # type: ignore[attr-defined]
        self._hash.update(memoryview(buffer)[:count])
        self.bytes_read += count
        return count


_UNPACKERS: dict[str | None, Callable[[Any], Any]] = {
    None: lambda packed: packed,
    GZIP: lambda packed: gzip.GzipFile(fileobj=packed),  # members one after the other, perhaps zeros at the end
    ZSTD: lambda packed: pa.CompressedInputStream(pa.PythonFile(packed, mode="r"), ZSTD),
}


def sha256_of(place: str) -> str:
    """Returns the SHA-256 of an input, for which it is read once more."""
    with open_input(place) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def lines_between(chunks: Iterator[bytes], start: int, stop: int | None) -> Iterator[bytes]:
    """Yields the text of the lines whose first bytes are in ``[start, stop)``, in pieces that may split lines.

    ``chunks`` begin at byte ``max(0, start - 1)``, so a line that begins at ``start`` follows a newline in them. Each
    line of an input is in exactly one of its ranges.
    """
    position, is_skipping = max(0, start - 1), start > 0
    for chunk in chunks:
        begin = chunk.find(b"\n") + 1 if is_skipping else 0
        # the range ends with the first newline at byte stop - 1 or later
        end = 0 if stop is None else chunk.find(b"\n", max(0, stop - 1 - position)) + 1
        if begin or not is_skipping:
            is_skipping = False
            yield chunk[begin : end or None]
        if end:
            return
        position += len(chunk)


def blocks_of_lines(
    place: str, chunks: Iterator[bytes], block_bytes: int, most_line_bytes: int, quote: bytes | None = None
) -> Iterator[bytes]:
    """Yields whole lines, about ``block_bytes`` at a time; a newline between two marks ``quote`` ends no line.

    Raises a UserError, naming ``place``, for a line longer than ``most_line_bytes`` beyond a block.
    """
    waiting: list[bytes] = []
    size = 0
    for chunk in chunks:
        waiting.append(chunk)
        size += len(chunk)
        if size < block_bytes:
            continue
        if quote is not None:
            waiting = [chunk := b"".join(waiting)]
        end = chunk.rfind(b"\n") + 1 if quote is None else _end_outside_quotes(chunk, quote)
        if end:
            waiting[-1] = chunk[:end]
            yield b"".join(waiting)
            waiting, size = [chunk[end:]], len(chunk) - end
        elif size > block_bytes + most_line_bytes:
            raise UserError(
                f"{place} has a line of more than {most_line_bytes} bytes: "
                + (
                    f"a value begins with {quote.decode()} and has no {quote.decode()} at its end: add one"
                    if quote
                    else "it is no file of rows that is read here; name another"
                )
            )
    if size:
        yield b"".join(waiting)


def _end_outside_quotes(text: bytes, quote: bytes) -> int:
    """Returns the position after the last newline that an even number of marks precedes; 0 without one."""
    end, num_quotes = len(text), text.count(quote)
    while newline := text.rfind(b"\n", 0, end) + 1:
        num_quotes -= text.count(quote, newline, end)
        if num_quotes % 2 == 0:
            return newline
        end = newline - 1
    return 0


TEXT, JSON_LINES, PARQUET = "text", "json_lines", "parquet"  # formats of files; text is CSV, TSV and the like

_FORMATS = {".parquet": PARQUET, ".pq": PARQUET} | dict.fromkeys((".jsonl", ".ndjson", ".json"), JSON_LINES)
_RECBOLE = (".inter", ".user", ".item", ".kg", ".link")
"""Ends of RecBole's files: interactions, users and items, knowledge graphs."""
_FORMATS |= dict.fromkeys((".csv", ".tsv", ".txt", *_RECBOLE), TEXT)
_COMPRESSIONS = (".gz", ".zst")
_SEPARATORS = {".csv": ",", **dict.fromkeys((".tsv", *_RECBOLE), "\t")}
_CAN_BE_NAMED = "CSV, TSV, JSON lines or Parquet files, folders, patterns, URLs or pipes"
_PARQUET_MAGIC = b"PAR1"
_FIRST_BYTES = 16


@dataclass(frozen=True)
class TableInput:
    """One input of a table."""

    raw: RawInput  # its name, place and size
    format: str | None  # None for a pipe whose name does not say it: its first bytes do
    separator: str | None = None  # of fields, as the name says; None where it does not
    compression: str | None = None  # None where it is not compressed, or is a pipe
    is_pipe: bool = False  # whether it can be read only once, from its beginning

    @property
    def place(self) -> str:
        return self.raw.place

    @property
    def can_be_cut(self) -> bool:
        """Whether a range of its bytes can be read by itself: web servers promise it no more than pipes do."""
        is_web = self.place.startswith(("http://", "https://"))
        return not (self.is_pipe or is_web or self.compression is not None or self.raw.num_bytes is None)


def find_inputs(
    named: Sequence[str | os.PathLike[str]],
    note: NoteCallback = ignore,
    is_readable: Callable[[Path], bool] | None = None,
) -> list[TableInput]:
    """Returns the named inputs in their order; the files of a folder or pattern are sorted, day_2 before day_10.

    Args:
        named: Files, folders, patterns like ``day_*.csv``, URLs and pipes; ``-`` is standard input.
        note: Function that is told which files of a folder are not read, and that files may be out of order.
        is_readable: Whether a file of a folder is read; None for all files of tables.

    Raises:
        UserError: Nothing is named or matched, an input cannot be read, or a file is named twice.
    """
    if not named:
        raise UserError(f"no input was named: give one or more {_CAN_BE_NAMED}.")
    files: list[Path | RemoteFile] = []
    for name in [os.fspath(path) for path in named]:
        if is_url(name):
            remote = sorted(list_remote(name), key=lambda file: natural_order(file.url))
            files += remote
        else:
            files += [file for path in _matching(name) for file in _files(path, is_readable or is_table, note)]
    seen_files: set[object] = set()
    for file in files:
        file_name = file.url if isinstance(file, RemoteFile) else str(file)
        key: object = file_name if isinstance(file, RemoteFile) else os.stat(file_name)[1:3]  # its inode and device
        if key in seen_files:
            raise UserError(f"{file_name} is named twice: its rows would be counted twice; name it once")
        seen_files.add(key)
    local = [file for file in files if isinstance(file, Path)]
    paths = [str(file) for file in local]
    moved = [pair for pair in zip(paths, sorted(paths, key=natural_order), strict=True) if pair[0] != pair[1]]
    if moved and paths == sorted(paths):
        first, second = moved[0]
        note(
            f"{first} is read before {second}, as a shell lists them, though rows are taken to be in the order of "
            "time: name their folder, or each in its place, for the order of their numbers"
        )
    names = dict(zip(local, input_names(local), strict=True))
    inputs = []
    for input_file in files:
        if isinstance(input_file, Path):
            inputs.append(_local_input(input_file, names[input_file]))
            continue
        with open_input(input_file.url) as opened:
            start = opened.read(_FIRST_BYTES)
        # without secrets of the URL: a signature in its query, a password before its server; object stores take a
        # question mark for a letter of a file's name
        shown = re.sub(r"^(https?://)([^/?#]*@)?([^?#]*).*", r"\1\3", input_file.url)
        raw = RawInput(shown, input_file.url, input_file.num_bytes, version=input_file.version)
        inputs.append(_described(raw, start))
    return inputs


def _matching(pattern: str) -> list[Path]:
    """Returns the files that a pattern matches, in natural order; a path that is no pattern or exists, as it is."""
    if not glob.has_magic(pattern) or os.path.lexists(pattern):
        return [Path(STANDARD_INPUT if pattern == "-" else pattern)]
    paths = sorted(glob.glob(pattern, recursive=True), key=natural_order)
    if not paths:
        raise UserError(f"no file matches {pattern!r}; name {_CAN_BE_NAMED}.")
    return list(map(Path, paths))


def _files(path: Path, is_readable: Callable[[Path], bool], note: NoteCallback) -> list[Path]:
    """Returns a file or pipe, or the readable files of a folder that are not hidden, in natural order."""
    if not stat.S_ISDIR(_mode(path)):
        return [path]
    try:
        entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise UserError(f"the folder {path} cannot be read: {error.strerror}; name one that can.") from error
    files = [entry for entry in entries if entry.is_file() and is_readable(entry)]
    if not files:
        raise UserError(f"the folder {path} has no files of rows, by their names: name the files themselves.")
    if unread := [entry.name for entry in entries if entry not in files]:
        note(f"of the folder {path} not read: {enumerate_names(unread)}; name what else is to be read")
    return sorted(files, key=natural_order)


def _mode(path: Path) -> int:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        if str(path) == STANDARD_INPUT:
            raise UserError("standard input is closed: pipe rows into the command, or name a file.") from None
        raise UserError(f"{os.path.realpath(path)} does not exist; name {_CAN_BE_NAMED}.") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise UserError(f"{str(path)!r} cannot be read: {error}; name {_CAN_BE_NAMED}.") from error
    if str(path) == STANDARD_INPUT and os.isatty(0):
        raise UserError("standard input is a terminal: pipe rows into the command, or name a file.")
    return mode


def natural_order(place: str | Path) -> list[list[tuple[int, int, str]]]:
    """Returns a key that sorts paths and URLs, folder by folder, with ``day_2`` before ``day_10``."""
    names = [re.split(r"(\d+)", name) for name in str(place).split("/")]
    return [[(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name_parts] for name_parts in names]


def _is_pipe(file: Path) -> bool:
    return str(file) == STANDARD_INPUT or (file.exists() and not file.is_file())


def input_names(files: Sequence[Path]) -> list[str]:
    """Returns each file's name relative to their common folder; a pipe is ``stdin`` or, as second input, ``pipe-2``."""
    pipes = {file: f"pipe-{number}" for number, file in enumerate(files, start=1) if _is_pipe(file)}
    pipes |= {Path(STANDARD_INPUT): "stdin"}
    parents = [file.absolute().parent for file in files if file not in pipes]
    common = os.path.commonpath(parents) if parents else ""
    return [pipes.get(file) or file.absolute().relative_to(common).as_posix() for file in files]


def _local_input(path: Path, name: str) -> TableInput:
    if _by_name(path.name)[0] == PARQUET:
        require_text_name(path)
    if _is_pipe(path):
        return TableInput(RawInput(name, str(path), None), *_by_name(path.name), is_pipe=True)
    try:
        with open_input(str(path)) as file:
            return _described(RawInput(name, str(path), path.stat().st_size), file.read(_FIRST_BYTES))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; name {_CAN_BE_NAMED}.") from error


def _described(raw: RawInput, first: bytes) -> TableInput:
    """Finds format and compression from name and first bytes; refuses a Parquet name without Parquet's first bytes."""
    compression = compression_of(first)
    format, separator = _by_name(raw.name)
    if first.startswith(_PARQUET_MAGIC):
        format = PARQUET
    elif format == PARQUET:
        raise UserError(f"{raw.place} is named as a Parquet file and is none; write it again, or rename it.")
    is_compressed = compression is not None or format == PARQUET
    format = format if first else TEXT
    return TableInput(replace(raw, is_compressed=is_compressed), format or TEXT, separator, compression)


def _by_name(name: str) -> tuple[str | None, str | None]:
    lower = name.lower()
    for suffix in _COMPRESSIONS:
        lower = lower.removesuffix(suffix)
    end = os.path.splitext(lower)[1]
    return _FORMATS.get(end), _SEPARATORS.get(end)


def is_table(path: Path) -> bool:
    """Returns whether a file of a folder is read: by its end, or with none unless it begins with _ (Spark's own)."""
    format, _ = _by_name(path.name)
    return format is not None or (path.suffix.lower() in ("", *_COMPRESSIONS) and not path.name.startswith("_"))
