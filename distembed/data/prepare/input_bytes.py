r"""The bytes of one input, a file, a pipe or a URL, unpacked where they are gzip or Zstandard, as blocks of lines.

The checksum is taken of the bytes as they lie there, while they are read, without a second pass. A block ends at a
line's end. Of an input that is not compressed, a range of bytes can be read by itself::

    aaaa\nbbbbbb\ncc\ndddd\n        start = 7, stop = 13
             |     |                a line belongs to the range that its first byte is in: cc, and not bbbbbb
"""

from __future__ import annotations

import hashlib
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import IO

import pyarrow as pa

from distembed.data.prepare.inputs import open_input
from distembed.data.remote import is_url, open_remote
from distembed.errors import UserError

GZIP, ZSTD = "gzip", "zstd"
MAGIC = {b"\x1f\x8b": GZIP, b"\x28\xb5\x2f\xfd": ZSTD}
"""How compressed inputs begin."""

_READ_BYTES = 1 << 20
_FIRST_BYTES = 16
_GZIP_OR_ZLIB_HEADER = 16 + zlib.MAX_WBITS


def compression_of(first: bytes) -> str | None:
    """Returns how an input that begins with these bytes is compressed; None where it is not."""
    return next((name for magic, name in MAGIC.items() if first.startswith(magic)), None)


def file_compression(path: Path) -> str | None:
    """Returns how a file is compressed, by its first bytes; None where it is not, or cannot be read."""
    try:
        with open(path, "rb") as file:
            return compression_of(file.read(_FIRST_BYTES))
    except OSError:
        return None


class InputBytes:
    """Reads an input once, from its beginning or from a place within it.

    Args:
        place: Path or URL of the input; ``/dev/stdin`` is standard input.
        start: First byte that is read; only of what is not compressed, and no pipe.

    Attributes:
        bytes_read: Number of bytes read so far, compressed where the input is.
        compression: How the input is compressed; known once its first piece is there.
    """

    def __init__(self, place: str, start: int = 0) -> None:
        self._place, self._start = place, start
        self._hash = hashlib.sha256()
        self.bytes_read = 0
        self.compression: str | None = None

    @property
    def sha256(self) -> str:
        """SHA-256 of the bytes read so far: of the whole input once all of its pieces were taken."""
        return self._hash.hexdigest()

    def pieces(self) -> Iterator[bytes]:
        """Yields the input, unpacked, about a megabyte at a time.

        Raises:
            UserError: It cannot be read, is cut short, or is damaged.
        """
        try:
            with closing(self._open()) as file:
                first = self._read(file)
                while 0 < len(first) < _FIRST_BYTES and (more := self._read(file)):  # a pipe may give byte after byte
                    first += more
                self.compression = compression_of(first) if not self._start else None
                yield from _UNPACKERS[self.compression](first, lambda: self._read(file))
        except (zlib.error, pa.ArrowException, EOFError) as error:
            raise UserError(f"{self._place} is a damaged {self.compression} file ({error}); fetch it again") from error
        except OSError as error:
            reason = error.strerror or str(error)
            raise UserError(f"{self._place} cannot be read: {reason}; see whether it is whole") from error

    def _open(self) -> IO[bytes]:
        file: IO[bytes] = open_remote(self._place) if is_url(self._place) else open_input(Path(self._place))
        if self._start:
            file.seek(self._start)
        return file

    def _read(self, file: IO[bytes]) -> bytes:
        piece = file.read(_READ_BYTES)
        self._hash.update(piece)
        self.bytes_read += len(piece)
        return piece


def _plain(piece: bytes, read: Callable[[], bytes]) -> Iterator[bytes]:
    while piece:
        yield piece
        piece = read()


def _unzip(piece: bytes, read: Callable[[], bytes]) -> Iterator[bytes]:
    """Yields the text of a gzip file: one or more members, one after the other, perhaps with zeros at the end."""
    member = zlib.decompressobj(_GZIP_OR_ZLIB_HEADER)
    while piece:
        yield member.decompress(piece, _READ_BYTES)
        while member.unconsumed_tail and not member.eof:  # at the end it keeps what follows
            yield member.decompress(member.unconsumed_tail, _READ_BYTES)
        piece = member.unused_data or read()
        if member.eof:
            while piece and not piece.strip(b"\0"):
                piece = read()
            piece = piece.lstrip(b"\0")
            if not piece:
                return
            member = zlib.decompressobj(_GZIP_OR_ZLIB_HEADER)
    raise zlib.error("it ends too early")


def _unpack_zstd(piece: bytes, read: Callable[[], bytes]) -> Iterator[bytes]:
    try:
        with pa.CompressedInputStream(pa.PythonFile(_Pieces(piece, read), mode="r"), ZSTD) as stream:
            while unpacked := stream.read(_READ_BYTES):
                yield unpacked
    except OSError as error:
        if error.errno is None:  # Arrow's own, of a stream that is damaged or cut short
            raise EOFError(str(error)) from error
        raise


_UNPACKERS = {None: _plain, GZIP: _unzip, ZSTD: _unpack_zstd}


class _Pieces(io.RawIOBase):
    """A file of pieces that come one after the other."""

    def __init__(self, first: bytes, read: Callable[[], bytes]) -> None:
        super().__init__()
        self._rest, self._next = first, read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._rest:
            self._rest = self._next()
        taken = self._rest[: len(buffer)]
        buffer[: len(taken)] = taken
        self._rest = self._rest[len(taken) :]
        return len(taken)


def lines_between(pieces: Iterator[bytes], start: int, stop: int | None) -> Iterator[bytes]:
    """Yields the lines whose first bytes are in a range.

    Args:
        pieces: The input from byte ``start - 1`` on; from its beginning where ``start`` is 0.
        start: First byte of the range.
        stop: Byte after the last one; None for the end of the input.
    """
    place = max(0, start - 1)
    is_skipping = start > 0
    for piece in pieces:
        if is_skipping:
            end = piece.find(b"\n") + 1
            if not end:
                place += len(piece)
                continue
            is_skipping, place, piece = False, place + end, piece[end:]
        if stop is None:
            yield piece
            continue
        if place >= stop:  # the lines of this range ended with the last byte before
            return
        if place + len(piece) >= stop:
            end = piece.find(b"\n", stop - 1 - place) + 1
            if end:
                yield piece[:end]
                return
            stop = place + len(piece) + 1  # the last line goes on
        yield piece
        place += len(piece)


def blocks_of_lines(
    place: str, pieces: Iterator[bytes], block_bytes: int, most_line_bytes: int, quote: bytes | None = None
) -> Iterator[bytes]:
    """Yields whole lines, about ``block_bytes`` at a time; only the last one may lack its newline.

    Args:
        place: The input, for the error.
        pieces: Its text.
        block_bytes: About how many bytes a block has.
        most_line_bytes: Size that no line exceeds.
        quote: A quotation mark between two of which a newline ends no line; None where each does.

    Raises:
        UserError: A line is far too long.
    """
    waiting: list[bytes] = []
    size = 0
    for piece in pieces:
        waiting.append(piece)
        size += len(piece)
        if size < block_bytes:
            continue
        if quote is not None:
            waiting = [piece := b"".join(waiting)]
        end = piece.rfind(b"\n") + 1 if quote is None else _end_outside_quotes(piece, quote)
        if end:
            waiting[-1] = piece[:end]
            yield b"".join(waiting)
            waiting, size = [piece[end:]], len(piece) - end
        elif size > block_bytes + most_line_bytes:
            raise UserError(
                f"{place} has a line of more than {most_line_bytes} bytes: "
                + ("a quotation mark is never closed there" if quote else "it is no file of rows that is read here")
                + "; name another"
            )
    if size:
        yield b"".join(waiting)


def _end_outside_quotes(text: bytes, quote: bytes) -> int:
    """Returns the place after the last newline before which quotation marks are even in number; 0 without one."""
    end, num_quotes = len(text), text.count(quote)
    while newline := text.rfind(b"\n", 0, end) + 1:
        num_quotes -= text.count(quote, newline, end)
        if num_quotes % 2 == 0:
            return newline
        end = newline - 1
    return 0
