"""The first pass over the inputs, a part at a time: blocks are read, parsed by a few threads and spooled.

One thread reads and takes the checksums; parsing, which is most of the work, runs beside it and does not hold the
interpreter's lock. Parsed blocks are handled in the order of the input, so nothing depends on which thread was faster.
"""

from __future__ import annotations

import tempfile
from collections import Counter, deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import REJECTED_NAME, Rejected, SourceFile
from distembed.data.prepare.options import SplitRule
from distembed.data.prepare.spool import SpooledBlock, require_known_splits, write_block
from distembed.data.prepare.work import Advance
from distembed.data.table.blocks import BlockLayout, ParsedBlock, RejectedRow


@dataclass(frozen=True)
class RawInput:
    """A file, a pipe or a URL that has rows."""

    name: str  # in the dataset (:func:`distembed.data.prepare.table.inputs.input_names`)
    place: str  # for errors and notes
    num_bytes: int | None  # its size, compressed where it is; None where that is not known before it is read
    is_compressed: bool = False
    version: str = ""  # changes when the content of a URL changes; empty where it is not known, and for files


@dataclass(frozen=True)
class InputPart:
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

    def parts(self, part_bytes: int) -> list[InputPart]:
        """Returns the parts of all inputs in order, of about so many bytes each, by the inputs and this size alone."""

    def checksum(self, source: int) -> str:
        """Returns the SHA-256 of an input that is cut into several parts, given its number."""

    def open(self, part: InputPart, block_bytes: int) -> OpenPart:
        """Begins to read a part, in blocks of about so many bytes of text."""

    def parse(self, raw: Any) -> ParsedBlock:
        """Parses a raw block, in any thread; a malformed row becomes a rejected row, never an error."""


_EXAMPLES, _EXAMPLE_CHARACTERS = 5, 120
_HEADER = b"file\tline\treason\trow\n"
_ESCAPED = {ord("\t"): "\\t", ord("\n"): "\\n", ord("\r"): "\\r"}  # of a file's name, a field of rejected.tsv
_HOPELESS_ROWS = 1000  # if more than half of them are malformed, it is another kind of file, and not read to its end


@dataclass
class RejectedRows:
    """Writes malformed rows to ``rejected.tsv`` and counts them; a folder without malformed rows gets no file."""

    folder: Path  # that gets ``rejected.tsv``
    inputs: Sequence[RawInput]
    reasons: Sequence[str]  # as of :class:`RowSource`
    max_rejected: float  # largest share of malformed rows that is no error
    wanted: str
    hints: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.by_source = [0] * len(self.inputs)  # number of malformed rows of each input
        self._file: BinaryIO | None = None
        self._counts = Counter(dict.fromkeys(self.reasons, 0))
        self._examples: list[str] = []

    @property
    def num_rows(self) -> int:
        return sum(self.by_source)

    def add(self, source: int, line: int, reason: str, row: bytes) -> None:
        """Appends a malformed row to the file; ``source`` is the number of its input, ``line`` counts from 1."""
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
        """Raises a UserError for a file of another kind: over half of 1000 or more rows so far are malformed."""
        if num_rows >= _HOPELESS_ROWS and self.num_rows > max(0.5, self.max_rejected) * num_rows:
            raise UserError(f"{self._complaint(num_rows)} so far, so nothing more is read")

    def require_few(self, num_rows: int) -> None:
        """Raises a UserError if there are no rows, no well-formed rows, or too many malformed ones in ``num_rows``."""
        if not num_rows:
            examples = ", ".join(raw_input.place for raw_input in self.inputs[:_EXAMPLES])
            raise UserError(f"the input has no rows: {examples}")
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


_Parsed = tuple[list[int], int, tuple[RejectedRow, ...]]  # of a spooled block: sizes, number of lines, malformed rows
_SIZES = "sizes.bin"  # file in a part's folder: the number of rows of each block, and where its arrays begin


@dataclass(frozen=True)
class PartFound:
    """The result of reading a part."""

    folder: str  # of its blocks in the spool
    num_rows: int  # well-formed ones
    num_lines: int  # from the first row on
    header_lines: int  # before the first row
    bytes_read: int
    sha256: str | None  # of the input, of a part that is the whole input
    num_rejected: int  # malformed rows, which ``rejected.tsv`` in the folder lists
    notes: list[str]  # sentences for the user


@dataclass(frozen=True)
class PartReader:
    """Reads parts of inputs into a spool folder; it can be pickled."""

    source: RowSource
    spool: Path
    max_rejected: float  # largest share of malformed rows that is no error
    rule: SplitRule
    block_bytes: int  # of text in a block, about
    threads: int  # that parse

    def read(self, numbered: tuple[int, InputPart], advance: Advance) -> PartFound:
        """Spools the blocks, sizes and rejected rows of a part, numbered among all parts, in a new folder."""
        index, part = numbered
        self.spool.mkdir(exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"part-{index:06d}-", dir=self.spool))  # of this attempt alone
        opened = self.source.open(part, self.block_bytes)
        inputs = list(self.source.inputs)
        if part.start:
            raw_input = inputs[part.source]
            inputs[part.source] = replace(raw_input, place=f"{raw_input.place}, from {part.start:,} on")
        source, sizes = self.source, list[list[int]]()
        rejected = RejectedRows(folder, inputs, source.reasons, self.max_rejected, source.wanted, source.hints)
        num_rows = num_lines = bytes_before = 0
        try:
            for block_sizes, block_lines, malformed in self._parse_in_order(folder, part, opened):
                for row in malformed:
                    line = opened.header_lines + num_lines + row.line + 1
                    rejected.add(part.source, line, row.reason, row.text)
                num_lines += block_lines
                num_rows += block_sizes[0]
                sizes.append(block_sizes)
                rejected.require_hope(num_lines)
                advance(opened.bytes_read - bytes_before, block_sizes[0])
                bytes_before = opened.bytes_read
        finally:
            rejected.close()
        advance(opened.bytes_read - bytes_before, 0)
        (folder / _SIZES).write_bytes(np.array(sizes, np.int64).tobytes())
        statistics = (opened.header_lines, opened.bytes_read, opened.sha256, rejected.num_rows, opened.notes())
        return PartFound(folder.name, num_rows, num_lines, *statistics)

    def _parse_in_order(self, folder: Path, part: InputPart, opened: OpenPart) -> Generator[_Parsed, None, None]:
        """Parses and spools blocks in threads, at most one more than threads at a time; yields them in input order."""
        waiting: deque[Future[_Parsed]] = deque()
        pool = ThreadPoolExecutor(self.threads, "distembed-parse")
        raw_blocks = opened.raw_blocks()
        try:
            for index, raw in enumerate(raw_blocks):
                waiting.append(pool.submit(self._parse, _block_path(folder, index), part, raw))
                del raw  # the thread has it: no second block is kept alive
                if len(waiting) > self.threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
            raw_blocks.close()

    def _parse(self, path: Path, part: InputPart, raw: Any) -> _Parsed:
        block = self.source.parse(raw)
        require_known_splits(self.rule, self.source.layout, block, self.source.inputs[part.source].place)
        return [block.num_rows, *write_block(path, block, self.source.layout)], block.num_lines, block.rejected


def _block_path(folder: Path, index: int) -> Path:
    return folder / f"block-{index:06d}"


@dataclass(frozen=True)
class Ingested:
    """The result of the first pass over all parts."""

    source: RowSource
    spool: Path  # folder of the blocks
    found: Sequence[Sequence[PartFound]]  # of the parts of each input, in order

    @property
    def source_rows(self) -> list[int]:
        return [sum(part.num_rows for part in input_parts) for input_parts in self.found]

    def blocks(self) -> list[SpooledBlock]:
        """Returns the blocks with at least one row, in the order of the inputs."""
        blocks: list[SpooledBlock] = []
        layout, first_row = self.source.layout, 0
        for folder in (self.spool / part_found.folder for input_parts in self.found for part_found in input_parts):
            rows_and_starts = np.fromfile(folder / _SIZES, np.int64).reshape(-1, 2 + len(layout.arrays))
            for number, sizes in enumerate(rows_and_starts):
                path, num_rows = _block_path(folder, number), int(sizes[0])
                if num_rows:
                    blocks.append(SpooledBlock(path, len(blocks), first_row, num_rows, sizes[1:], layout))
                    first_row += num_rows
        return blocks

    def source_files(self, checksums: Mapping[int, str]) -> list[SourceFile]:
        files = []
        for number, (described, input_parts) in enumerate(zip(self.source.inputs, self.found, strict=True)):
            num_bytes = input_parts[0].bytes_read if described.num_bytes is None else described.num_bytes
            rejected = sum(part.num_rejected for part in input_parts)
            sha256 = input_parts[0].sha256 or checksums.get(number, "")
            files.append(SourceFile(described.name, num_bytes, sha256, self.source_rows[number] + rejected, rejected))
        return files

    def notes(self) -> Iterator[str]:
        for described, input_parts in zip(self.source.inputs, self.found, strict=True):
            yield from (note for part in input_parts for note in part.notes)
            if not any(part.num_rows + part.num_rejected for part in input_parts):
                yield f"{described.place} has no rows"

    def rejected(self, folder: Path, max_rejected: float) -> Rejected:
        """Joins the parts' malformed rows in ``rejected.tsv`` of a folder, with line numbers of the whole inputs.

        Returns their counts; raises a UserError if they are more than ``max_rejected`` of all rows.
        """
        source = self.source
        rows = RejectedRows(folder, source.inputs, source.reasons, max_rejected, source.wanted, source.hints)
        for number, input_parts in enumerate(self.found):
            lines_before = 0  # a part counts its lines from its own beginning
            for part in input_parts:
                if part.num_rejected:
                    for line, reason, row in read_rejected(self.spool / part.folder):
                        rows.add(number, lines_before + line, reason, row)
                lines_before += part.header_lines + part.num_lines
        rows.close()
        rows.require_few(sum(self.source_rows) + rows.num_rows)
        return rows.counts()
