r"""The bytes of one input, a file, a pipe or a URL, unpacked where they are gzip or Zstandard, as blocks of lines.

The checksum is taken of the bytes as they lie there, while they are read, without a second pass. A block ends at a
line's end. Of an input that is not compressed, a range of bytes can be read by itself::

    aaaa\nbbbbbb\ncc\ndddd\n        start = 7, stop = 13
             |     |                a line belongs to the range that its first byte is in: cc, and not bbbbbb
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

import pyarrow as pa

from distembed.base.errors import UserError
from distembed.data.remote import is_url, open_remote

GZIP, ZSTD = "gzip", "zstd"
MAGIC = {b"\x1f\x8b": GZIP, b"\x28\xb5\x2f\xfd": ZSTD}
"""How compressed inputs begin."""
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
    """Refuses an input of another kind, or in UTF-16 or UTF-32, by its first bytes."""
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
    """Reads an input once, from its beginning or from a place within it."""

    def __init__(self, place: str, start: int = 0) -> None:
        self._place, self._start = place, start
        self._hash = hashlib.sha256()
        self.bytes_read = 0  # so far, compressed where the input is

    @property
    def sha256(self) -> str:
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
                while piece := unpacked.read(PIECE_BYTES):
                    yield piece
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


def lines_between(pieces: Iterator[bytes], start: int, stop: int | None) -> Iterator[bytes]:
    """Yields the lines whose first bytes are in ``[start, stop)``; the pieces begin at byte ``start - 1``, or at 0."""
    place, is_skipping = max(0, start - 1), start > 0
    for piece in pieces:
        begin = piece.find(b"\n") + 1 if is_skipping else 0
        # the range ends with the first newline at byte stop - 1 or later
        end = 0 if stop is None else piece.find(b"\n", max(0, stop - 1 - place)) + 1
        if begin or not is_skipping:
            is_skipping = False
            yield piece[begin : end or None]
        if end:
            return
        place += len(piece)


def blocks_of_lines(
    place: str, pieces: Iterator[bytes], block_bytes: int, most_line_bytes: int, quote: bytes | None = None
) -> Iterator[bytes]:
    """Yields whole lines, about ``block_bytes`` at a time; a newline between two marks ``quote`` ends no line."""
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
                + (
                    f"a value begins with {quote.decode()} and has no {quote.decode()} at its end: add one"
                    if quote
                    else "it is no file of rows that is read here; name another"
                )
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
