"""The rows that a preparation reads: inputs, parts of inputs, and the malformed rows among them.

An input is cut into *parts*, which any process can read: a range of bytes of a plain text file, some row
groups of a Parquet file, or the whole of an input that can only be read from its beginning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import Rejected
from distembed.data.table.blocks import (
    BlockLayout,
    ParsedBlock,
)


@dataclass(frozen=True)
class RawInput:
    """A file, a pipe or a URL that has rows."""

    name: str  # in the dataset (:func:`distembed.data.prepare.table.inputs.input_names`)
    place: str  # for errors and notes
    num_bytes: int | None  # its size, compressed where it is; None where that is not known before it is read
    is_compressed: bool = False
    version: str = ""  # changes when the content of a URL changes; empty where it is not known, and for files


@dataclass(frozen=True)
class Part:
    """A piece of an input that is read by itself: bytes or row groups ``[start, stop)``, None for the end."""

    source: int  # number of the input among all, from 0
    start: int = 0
    stop: int | None = None

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.stop is None


class OpenPart(Protocol):
    """A part that is being read."""

    @property
    def bytes_read(self) -> int: ...  # of the input so far, compressed where it is

    @property
    def header_lines(self) -> int: ...  # before the first row, known with the first block; 0 within an input

    @property
    def sha256(self) -> str | None: ...  # of the whole input, once all was read; None for other parts

    def raw_blocks(self) -> Generator[Any, None, None]:
        """Yields about a block's size of rows at a time for :meth:`RowSource.parse`, in order."""

    def notes(self) -> list[str]:
        """Returns sentences on the part that a user should know, once all blocks were read."""


class RowSource(Protocol):
    """One kind of rows, and the inputs that hold them; it can be pickled."""

    inputs: list[RawInput]
    layout: BlockLayout
    reasons: tuple[str, ...]  # why a row can be malformed, in the order of the manifest
    wanted: str  # describes a well-formed row in a sentence, for errors
    hints: Mapping[str, str]  # by reason: a sentence on the likely cause, where most malformed rows have that reason

    def parts(self, part_bytes: int) -> list[Part]:
        """Returns the parts of all inputs in order, of about so many bytes each, by the inputs and this size alone."""

    def checksum(self, source: int) -> str:
        """Returns the SHA-256 of an input that is cut into several parts, given its number."""

    def open(self, part: Part, block_bytes: int) -> OpenPart:
        """Begins to read a part, in blocks of about so many bytes of text."""

    def parse(self, raw: Any) -> ParsedBlock:
        """Parses a raw block, in any thread; a malformed row becomes a rejected row, never an error."""


REJECTED_NAME = "rejected.tsv"
_EXAMPLES = 5
_EXAMPLE_CHARACTERS = 120
_HEADER = b"file\tline\treason\trow\n"

# A file's name in rejected.tsv takes one field of one line.
_ESCAPED = {ord("\t"): "\\t", ord("\n"): "\\n", ord("\r"): "\\r"}

# More than half of this many rows malformed is another kind of file: no need to read a terabyte of it.
_HOPELESS_ROWS = 1000


@dataclass
class RejectedRows:
    """Takes the malformed rows as they are found; the file is made with the first one."""

    folder: Path  # that gets ``rejected.tsv``
    inputs: Sequence[RawInput]  # of the rows
    reasons: Sequence[str]  # why a row can be malformed, in the order of the manifest; other reasons come last
    max_rejected: float  # largest share of malformed rows that is no error
    wanted: str  # describes a well-formed row in a sentence, for errors
    hints: Mapping[str, str] = field(default_factory=dict)  # by reason: a likely cause, where most rows have it

    def __post_init__(self) -> None:
        self.by_source = [0] * len(self.inputs)  # number of malformed rows of each input
        self._file: BinaryIO | None = None
        self._counts = Counter(dict.fromkeys(self.reasons, 0))
        self._examples: list[str] = []

    @property
    def num_rows(self) -> int:
        return sum(self.by_source)

    def add(self, source: int, line: int, reason: str, row: bytes) -> None:
        """Lists a malformed row: the number of its input, its line counted from 1, why, and its bytes."""
        if self._file is None:
            self._file = open(self.folder / REJECTED_NAME, "wb")
            self._file.write(_HEADER)
        row = row.replace(b"\n", b"\\n")  # within the quotes of a field
        name = self.inputs[source].name.translate(_ESCAPED).encode(errors="backslashreplace")
        self._file.write(name + f"\t{line}\t{reason}\t".encode() + row + b"\n")
        self._counts[reason] += 1
        self.by_source[source] += 1
        if len(self._examples) < _EXAMPLES:
            text = row.decode(errors="backslashreplace")[:_EXAMPLE_CHARACTERS]
            self._examples.append(f"{self.inputs[source].place}:{line}: {reason}: {text!r}")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def counts(self) -> Rejected:
        by_reason = {reason: count for reason, count in self._counts.items() if count}
        return Rejected(self.num_rows, by_reason, REJECTED_NAME if self.num_rows else None)

    def require_hope(self, num_rows: int) -> None:
        """Ends the reading of a file of another kind, given the number of rows so far, malformed ones included."""
        if num_rows >= _HOPELESS_ROWS and self.num_rows > max(0.5, self.max_rejected) * num_rows:
            raise UserError(f"{self._complaint(num_rows)} so far, so nothing more is read")

    def require_few(self, num_rows: int) -> None:
        """Makes sure that not too many of all rows are malformed, and that some are well-formed."""
        if not num_rows:
            raise UserError(f"the input has no rows: {', '.join(each.place for each in self.inputs[:_EXAMPLES])}")
        if self.num_rows > self.max_rejected * num_rows:
            raise UserError(self._complaint(num_rows))
        if self.num_rows == num_rows:
            raise UserError(f"no row of the input is well-formed: {self._complaint(num_rows)}")

    def _complaint(self, num_rows: int) -> str:
        reasons = ", ".join(f"{reason} {count}" for reason, count in self._counts.items() if count)
        commonest = max(self._counts, key=self._counts.__getitem__)
        hint = f"{self.hints[commonest]} " if commonest in self.hints else ""
        return (
            f"{self.num_rows} of {num_rows} rows are malformed ({reasons}), which is more than max_rejected="
            f"{self.max_rejected:g}; nothing was written. {self.wanted} {hint}Mend the rows or allow more "
            "(--max-rejected). The first ones:\n  " + "\n  ".join(self._examples)
        )


def read_rejected(folder: Path) -> Iterator[tuple[int, str, bytes]]:
    """Yields the malformed rows that are listed in a folder, in order: line, reason and bytes."""
    with open(folder / REJECTED_NAME, "rb") as file:
        next(file)
        for entry in file:
            _, line, reason, row = entry.removesuffix(b"\n").split(b"\t", 3)
            yield int(line), reason.decode(), row
