"""The malformed rows of an input: listed in a file of the dataset, counted by reason, and too many of them an error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import Rejected
from distembed.data.prepare.blocks import RawInput

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
        """Number of malformed rows so far."""
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
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def counts(self) -> Rejected:
        """Returns what the manifest says of the malformed rows."""
        by_reason = {reason: count for reason, count in self._counts.items() if count}
        return Rejected(self.num_rows, by_reason, REJECTED_NAME if self.num_rows else None)

    def require_hope(self, num_rows: int) -> None:
        """Ends the reading of a file of another kind, given the number of rows so far, malformed ones included.

        Raises:
            UserError: So many rows are malformed that the rest need not be read.
        """
        if num_rows >= _HOPELESS_ROWS and self.num_rows > max(0.5, self.max_rejected) * num_rows:
            raise UserError(f"{self._complaint(num_rows)} so far, so nothing more is read")

    def require_few(self, num_rows: int) -> None:
        """Makes sure that not too many of all rows are malformed, and that some are well-formed.

        Raises:
            UserError: There is no row, too many are malformed, or all are.
        """
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
