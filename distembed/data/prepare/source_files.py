"""Raw text files and pipes, plain or gzip, as blocks of whole lines.

A byte order mark and a header are no part of the blocks. A block ends at a line's end and never spans two files, so
blocks can be parsed independently of each other. The checksum of a file is taken of the bytes as they are on disk,
while they are read, without a second pass. A plain file can be read in ranges too, of which each has the lines that
begin in it.
"""

from __future__ import annotations

import hashlib
import os
import re
import zlib
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from distembed.data.prepare.first_line import require_text, split_first_line
from distembed.data.prepare.inputs import InputFiles, open_input
from distembed.data.prepare.progress import NoteCallback, ignore
from distembed.errors import UserError

# The last row of a file that may have been cut: it has no line's end, and its last id is not whole.
_LAST_LINE_WHOLE = re.compile(rb"(\n|\t[0-9a-fA-F]{8}\r?)\Z")

# A line of Criteo's is about 230 bytes. Anything near this is another kind of file.
MAX_LINE_BYTES = 1 << 20

_READ_BYTES = 1 << 20
_FIRST_BYTES = 16
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_OR_ZLIB_HEADER = 16 + zlib.MAX_WBITS
_TEXT_SUFFIXES = {"", ".tsv", ".txt", ".gz"}


def list_sources(inputs: Sequence[str | os.PathLike[str]], note: NoteCallback = ignore) -> list[Path]:
    """Returns the files to read: folders become their text files, in natural order (``day_2`` before ``day_10``).

    Hidden files in folders are left out, and so are those that end in something else than .tsv, .txt, .gz or nothing,
    which ``note`` is told. ``-`` is standard input.

    Raises:
        UserError: Nothing was named, a path does not exist, a folder has no such file, or a file is named twice.
    """
    return _TEXT_FILES.list_files(inputs, note)


def natural_key(path: Path) -> list[tuple[int, int, str]]:
    """Returns a key that sorts numbers within names by their value."""
    parts = re.split(r"(\d+)", path.name)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]


_TEXT_FILES = InputFiles(
    can_be_named="files or folders of tab-separated rows",
    is_readable=lambda path: path.suffix.lower() in _TEXT_SUFFIXES,
    none_in_folder=".tsv, .txt or .gz file; name the files themselves to read others",
    order=natural_key,
)


def is_gzip(path: Path) -> bool:
    """Returns whether a file is compressed, by its first bytes; False where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    except OSError:
        return False


class SourceReader:
    """Streams one file or pipe, which is opened when its blocks are asked for.

    Args:
        path: File to read.
        block_bytes: About how many bytes of text a block has.
        start: First byte of the range to read, of a plain file.
        stop: Byte after the range; None for the end of the file.

    Attributes:
        bytes_read: Number of bytes of the range read so far, compressed where the file is.
        is_gzip: Whether the file is compressed; known once its first block is there.
        header: Names of the columns where the first line is a header, else None; known likewise.
        may_be_cut: Whether the last row has no line's end and no whole last id; known once the blocks are exhausted.
    """

    def __init__(self, path: Path, block_bytes: int, start: int = 0, stop: int | None = None) -> None:
        self._path = path
        self._block_bytes = block_bytes
        self._start, self._stop = start, stop
        self._hash = hashlib.sha256()
        self.bytes_read = 0
        self.is_gzip = self.may_be_cut = False
        self.header: list[str] | None = None

    @property
    def sha256(self) -> str:
        """SHA-256 of the bytes read so far: of the whole file once its blocks are exhausted."""
        return self._hash.hexdigest()

    def blocks(self) -> Generator[bytes, None, None]:
        """Yields whole lines, about ``block_bytes`` at a time; only the last one may lack its newline.

        Raises:
            UserError: A gzip file is cut short or damaged, the file cannot be read, or a line is far too long.
        """
        last = b"\n"
        try:
            with open_input(self._path) as file:
                blocks = self._cut(self._lines_of_range(file) if self._start else self._content(file))
                for last in blocks if self._start else self._rows(blocks):
                    yield last
        except zlib.error as error:
            raise UserError(f"{self._path} is a damaged gzip file ({error}); fetch it again") from error
        except OSError as error:
            raise UserError(f"{self._path} cannot be read: {error.strerror}") from error
        self.may_be_cut = _LAST_LINE_WHOLE.search(last, len(last) - 11) is None

    def _rows(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        """Yields the blocks without what stands before the rows: a byte order mark, and a header."""
        first = next(blocks, b"")
        require_text(self._path, first)
        self.header, rows = split_first_line(first)
        if rows:
            yield rows
        yield from blocks

    def _content(self, file: BinaryIO) -> Iterator[bytes]:
        first = self._read(file)
        while 0 < len(first) < _FIRST_BYTES and (more := self._read(file)):  # a pipe may give byte after byte
            first += more
        require_text(self._path, first)
        self.is_gzip = first.startswith(_GZIP_MAGIC)
        return self._unzip(file, first) if self.is_gzip else self._plain(file, first)

    def _lines_of_range(self, file: BinaryIO) -> Iterator[bytes]:
        """Yields the lines of a range that does not begin the file."""
        file.seek(self._start - 1)
        piece = self._read(file)
        while piece and b"\n" not in piece:
            piece = self._read(file)
        piece = piece[piece.find(b"\n") + 1 :] or self._read(file)  # the line before belongs to the range before
        if self._stop is None or file.tell() - len(piece) < self._stop:
            yield from self._plain(file, piece)

    def _plain(self, file: BinaryIO, piece: bytes) -> Iterator[bytes]:
        """Yields a piece and those after it, up to the end of the last line that begins in the range."""
        while piece:
            if self._stop is not None and (position := file.tell()) >= self._stop:
                end = piece.find(b"\n", max(0, self._stop - 1 - (position - len(piece)))) + 1
                if end:
                    yield piece[:end]
                    return
            yield piece
            piece = self._read(file)

    def _unzip(self, file: BinaryIO, piece: bytes) -> Iterator[bytes]:
        """Yields the text of a gzip file: one or more members, one after the other, perhaps with zeros at the end."""
        member = zlib.decompressobj(_GZIP_OR_ZLIB_HEADER)
        while piece:
            yield member.decompress(piece, self._block_bytes)
            while member.unconsumed_tail and not member.eof:  # at the end it keeps what follows
                yield member.decompress(member.unconsumed_tail, self._block_bytes)
            piece = member.unused_data or self._read(file)
            if member.eof:
                while piece and not piece.strip(b"\0"):
                    piece = self._read(file)
                piece = piece.lstrip(b"\0")
                if not piece:
                    return
                member = zlib.decompressobj(_GZIP_OR_ZLIB_HEADER)
        raise UserError(f"{self._path} is a gzip file that ends too early; fetch it again")

    def _cut(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        waiting: list[bytes] = []
        size = 0
        for piece in pieces:
            waiting.append(piece)
            size += len(piece)
            if size < self._block_bytes:
                continue
            end = piece.rfind(b"\n") + 1
            if end:
                waiting[-1] = piece[:end]
                yield b"".join(waiting)
                waiting, size = [piece[end:]], len(piece) - end
            elif size > self._block_bytes + MAX_LINE_BYTES:
                raise UserError(
                    f"{self._path} has a line of more than {MAX_LINE_BYTES} bytes: it is not a file of Criteo rows"
                )
        if size:
            yield b"".join(waiting)

    def _read(self, file: BinaryIO) -> bytes:
        piece = file.read(_READ_BYTES)
        self._hash.update(piece)
        self.bytes_read += len(piece)
        return piece
