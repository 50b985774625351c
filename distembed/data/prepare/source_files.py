"""Raw text files and pipes, plain or compressed, as blocks of whole lines.

A byte order mark and a header are no part of the blocks. A block ends at a line's end and never spans two files, so
blocks can be parsed independently of each other. The checksum of a file is taken of the bytes as they are on disk,
while they are read, without a second pass. A plain file can be read in ranges too, of which each has the lines that
begin in it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from distembed.data.prepare.first_line import require_text, split_first_line
from distembed.data.prepare.input_bytes import InputBytes, blocks_of_lines, lines_between
from distembed.data.prepare.inputs import InputFiles
from distembed.data.prepare.progress import NoteCallback, ignore

# The last row of a file that may have been cut: it has no line's end, and its last id is not whole.
_LAST_LINE_WHOLE = re.compile(rb"(\n|\t[0-9a-fA-F]{8}\r?)\Z")

# A line of Criteo's is about 230 bytes. Anything near this is another kind of file.
MAX_LINE_BYTES = 1 << 20

_TEXT_SUFFIXES = {"", ".tsv", ".txt", ".gz", ".zst"}


def list_sources(inputs: Sequence[str | os.PathLike[str]], note: NoteCallback = ignore) -> list[Path]:
    """Returns the files to read: folders become their text files, in natural order (``day_2`` before ``day_10``).

    Hidden files in folders are left out, and so are those that end in something else than .tsv, .txt, .gz, .zst or
    nothing, which ``note`` is told, as it is that files may be out of order. ``-`` is standard input.

    Raises:
        UserError: Nothing was named, a path does not exist, a folder has no such file, or a file is named twice.
    """
    files = _TEXT_FILES.list_files(inputs, note)
    note_order_of_letters(files, note)
    return files


def natural_key(path: Path) -> list[tuple[int, int, str]]:
    """Returns a key that sorts numbers within names by their value."""
    parts = re.split(r"(\d+)", path.name)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]


def natural_order(place: str) -> list[list[tuple[int, int, str]]]:
    """Returns a key that sorts paths and URLs so, folder by folder."""
    return [natural_key(Path(name)) for name in place.split("/")]


def note_order_of_letters(files: Sequence[Path], note: NoteCallback) -> None:
    """Notes that files are in the order in which a shell lists them, ``day_10`` before ``day_2``.

    Args:
        files: The files in the order in which they are read, which is taken for that of time.
        note: Function that is told.
    """
    places = [str(file) for file in files]
    by_number = sorted(places, key=natural_order)
    if places != sorted(places) or places == by_number:
        return
    first, second = next((one, other) for one, other in zip(places, by_number, strict=True) if one != other)
    note(
        f"{first} is read before {second}, as a shell lists them, though rows are taken to be in the order of time: "
        "name their folder, or each in its place, for the order of their numbers"
    )


_TEXT_FILES = InputFiles(
    can_be_named="files or folders of tab-separated rows",
    is_readable=lambda path: path.suffix.lower() in _TEXT_SUFFIXES,
    none_in_folder=".tsv, .txt, .gz or .zst file; name the files themselves to read others",
    order=natural_key,
)


class SourceReader:
    """Streams one file or pipe, which is opened when its blocks are asked for.

    Args:
        path: File to read.
        block_bytes: About how many bytes of text a block has.
        start: First byte of the range to read, of a plain file.
        stop: Byte after the range; None for the end of the file.

    Attributes:
        header: Names of the columns where the first line is a header, else None; known once the first block is there.
        may_be_cut: Whether the last row has no line's end and no whole last id; known once the blocks are exhausted.
    """

    def __init__(self, path: Path, block_bytes: int, start: int = 0, stop: int | None = None) -> None:
        self._path = path
        self._block_bytes = block_bytes
        self._start, self._stop = start, stop
        self._bytes = InputBytes(str(path), max(0, start - 1))
        self.may_be_cut = False
        self.header: list[str] | None = None

    @property
    def bytes_read(self) -> int:
        """Number of bytes read so far, compressed where the file is; of a range, to the end of its last line."""
        return self._bytes.bytes_read

    @property
    def is_compressed(self) -> bool:
        """Whether the file is compressed; known once its first block is there."""
        return self._bytes.compression is not None

    @property
    def sha256(self) -> str:
        """SHA-256 of the bytes read so far: of the whole file once its blocks are exhausted."""
        return self._bytes.sha256

    def blocks(self) -> Generator[bytes, None, None]:
        """Yields whole lines, about ``block_bytes`` at a time; only the last one may lack its newline.

        Raises:
            UserError: A compressed file is cut short or damaged, the file cannot be read, or a line is far too long.
        """
        last = b"\n"
        pieces = self._bytes.pieces() if self._start else self._text(self._bytes.pieces())
        lines = lines_between(pieces, self._start, self._stop)
        blocks = blocks_of_lines(str(self._path), lines, self._block_bytes, MAX_LINE_BYTES)
        for last in blocks if self._start else self._rows(blocks):
            yield last
        self.may_be_cut = _LAST_LINE_WHOLE.search(last, len(last) - 11) is None

    def _text(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """Yields the same pieces, if they begin as text does."""
        first = next(pieces, b"")
        require_text(self._path, first)
        yield first
        yield from pieces

    def _rows(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        """Yields the blocks without what stands before the rows: a byte order mark, and a header."""
        first = next(blocks, b"")
        require_text(self._path, first)
        self.header, rows = split_first_line(first)
        if rows:
            yield rows
        yield from blocks
