"""The first pass over the inputs, a part at a time: blocks are read, parsed by a few threads and spooled.

One thread reads and takes the checksums; parsing, which is most of the work, runs beside it and does not hold the
interpreter's lock. Parsed blocks are handled in the order of the input, so nothing depends on which thread was faster.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distembed.data.dataset.manifest import Rejected, SourceFile
from distembed.data.prepare.blocks import OpenPart, Part, RejectedRow, RowSource
from distembed.data.prepare.rejected_rows import RejectedRows, read_rejected
from distembed.data.prepare.row_splits import SplitColumn
from distembed.data.prepare.spool import BlockShape, SpooledBlock, write_block

Advance = Callable[[int, int], None]
"""Takes how many bytes and rows were dealt with since it was last called."""


@dataclass(frozen=True)
class PartFound:
    """The result of reading a part.

    Attributes:
        folder: Name of the folder of its blocks in the spool.
        shapes: Shape of each block, also of those without rows.
        num_lines: Number of its lines, but for those before the first row.
        header_lines: Number of its lines before the first row.
        bytes_read: Number of bytes of the input that were read.
        sha256: Checksum of the input, of a part that is the whole input.
        num_rejected: Number of malformed rows, which ``rejected.tsv`` in the folder lists.
        notes: Sentences that a user should know besides.
    """

    folder: str
    shapes: tuple[BlockShape, ...]
    num_lines: int
    header_lines: int
    bytes_read: int
    sha256: str | None
    num_rejected: int
    notes: tuple[str, ...]

    @property
    def num_rows(self) -> int:
        """Number of well-formed rows."""
        return sum(shape.num_rows for shape in self.shapes)

    def to_json(self) -> dict[str, Any]:
        """Returns the same in plain values."""
        return {**self.__dict__, "shapes": [shape.to_json() for shape in self.shapes]}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> PartFound:
        """Returns the result of plain values that :meth:`to_json` returned."""
        return cls(**{**value, "shapes": tuple(BlockShape.from_json(shape) for shape in value["shapes"])})


@dataclass(frozen=True)
class _Parsed:
    """The part of a block that stays in memory once its columns are spooled."""

    shape: BlockShape
    num_lines: int
    rejected: tuple[RejectedRow, ...]


@dataclass(frozen=True)
class PartReader:
    """Reads parts of inputs into a spool folder; it can be pickled.

    Attributes:
        source: The inputs.
        spool: Folder for the blocks.
        max_rejected: Largest share of malformed rows that is no error.
        split_column: The column whose values say which split a row is in; None where no column does.
        block_bytes: About how many bytes of text a block has.
        threads: Threads that parse.
    """

    source: RowSource
    spool: Path
    max_rejected: float
    split_column: SplitColumn | None
    block_bytes: int
    threads: int

    def read(self, index: int, part: Part, advance: Advance) -> PartFound:
        """Reads a part, given its number among all parts.

        Raises:
            UserError: The input cannot be read or is another kind of file, or the splits' column has an unknown value.
        """
        self.spool.mkdir(exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"part-{index:06d}-", dir=self.spool))  # of this attempt alone
        opened = self.source.open(part, self.block_bytes)
        inputs = list(self.source.inputs)
        if part.start:
            given = inputs[part.source]
            inputs[part.source] = replace(given, place=f"{given.place}, from {part.start:,} on")
        rejected = RejectedRows(
            folder, inputs, self.source.reasons, self.max_rejected, self.source.wanted, self.source.hints
        )
        shapes: list[BlockShape] = []
        num_lines = bytes_before = 0
        try:
            for parsed in self._parse_in_order(folder, part, opened):
                for row in parsed.rejected:
                    line = opened.header_lines + num_lines + row.line + 1
                    rejected.add(part.source, line, row.reason, row.text)
                num_lines += parsed.num_lines
                shapes.append(parsed.shape)
                rejected.require_hope(num_lines)
                advance(opened.bytes_read - bytes_before, parsed.shape.num_rows)
                bytes_before = opened.bytes_read
        finally:
            rejected.close()
        advance(opened.bytes_read - bytes_before, 0)
        return PartFound(
            folder.name,
            tuple(shapes),
            num_lines,
            opened.header_lines,
            opened.bytes_read,
            opened.sha256,
            rejected.num_rows,
            tuple(opened.notes()),
        )

    def _parse_in_order(self, folder: Path, part: Part, opened: OpenPart) -> Generator[_Parsed, None, None]:
        waiting: deque[Future[_Parsed]] = deque()
        pool = ThreadPoolExecutor(self.threads, "distembed-parse")
        raw_blocks = opened.raw_blocks()
        try:
            for index, raw in enumerate(raw_blocks):
                waiting.append(pool.submit(self._parse, block_path(folder, index), part, raw))
                del raw  # the thread has it: no second block is kept alive
                if len(waiting) > self.threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
            raw_blocks.close()

    def _parse(self, path: Path, part: Part, raw: Any) -> _Parsed:
        block = self.source.parse(raw)
        if self.split_column is not None:
            ids = block.ids[self.split_column.place]
            self.split_column.require_known(ids, self.source.inputs[part.source].place)
        if block.num_rows:
            write_block(path, block, self.source.layout)
        return _Parsed(BlockShape.of(block), block.num_lines, block.rejected)


def block_path(folder: Path, index: int) -> Path:
    """Returns the file of a block of a part, given its number in the part."""
    return folder / f"block-{index:06d}"


@dataclass(frozen=True)
class Ingested:
    """The result of the first pass over all parts.

    Attributes:
        source: The inputs.
        parts: The parts in order.
        found: The result of each.
        spool: Folder of the blocks.
    """

    source: RowSource
    parts: Sequence[Part]
    found: Sequence[PartFound]
    spool: Path

    def blocks(self) -> list[SpooledBlock]:
        """Returns the blocks with at least one row, in the order of the inputs."""
        blocks: list[SpooledBlock] = []
        first_row = 0
        for found in self.found:
            for number, shape in enumerate(found.shapes):
                if shape.num_rows:
                    path = block_path(self.spool / found.folder, number)
                    blocks.append(SpooledBlock(path, len(blocks), first_row, shape, self.source.layout))
                    first_row += shape.num_rows
        return blocks

    def source_files(self, checksums: Mapping[int, str]) -> list[SourceFile]:
        """Returns the manifest's entries of the inputs.

        Args:
            checksums: SHA-256 of each input that was cut into several parts, by its number.
        """
        files = []
        for number, described in enumerate(self.source.inputs):
            found = self._source_parts(number)
            num_bytes = found[0].bytes_read if described.num_bytes is None else described.num_bytes
            rows, rejected = sum(each.num_rows for each in found), sum(each.num_rejected for each in found)
            sha256 = found[0].sha256 or checksums.get(number, "")
            files.append(SourceFile(described.name, num_bytes, sha256, rows + rejected, rejected))
        return files

    def source_rows(self) -> list[int]:
        """Returns the number of well-formed rows of each input."""
        numbers = range(len(self.source.inputs))
        return [sum(found.num_rows for found in self._source_parts(number)) for number in numbers]

    def _source_parts(self, number: int) -> list[PartFound]:
        return [found for part, found in zip(self.parts, self.found, strict=True) if part.source == number]

    def notes(self) -> Iterator[str]:
        """Yields what was found in the inputs besides rows, input after input."""
        for number, described in enumerate(self.source.inputs):
            found = self._source_parts(number)
            yield from (note for each in found for note in each.notes)
            if not sum(each.num_rows + each.num_rejected for each in found):
                yield f"{described.place} has no rows"

    def rejected(self, folder: Path, max_rejected: float) -> Rejected:
        """Lists the malformed rows, and returns their counts.

        Args:
            folder: Folder that gets ``rejected.tsv``.
            max_rejected: Largest share of malformed rows that is no error.

        Raises:
            UserError: There is no row, too many are malformed, or all are.
        """
        source = self.source
        rows = RejectedRows(folder, source.inputs, source.reasons, max_rejected, source.wanted, source.hints)
        lines = [0] * len(source.inputs)
        for part, found in zip(self.parts, self.found, strict=True):
            if found.num_rejected:
                for line, reason, row in read_rejected(self.spool / found.folder):
                    rows.add(part.source, lines[part.source] + line, reason, row)
            lines[part.source] += found.header_lines + found.num_lines
        rows.close()
        rows.require_few(sum(found.num_rows + found.num_rejected for found in self.found))
        return rows.counts()
