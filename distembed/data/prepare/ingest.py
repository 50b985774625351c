"""The first pass over the inputs, a part at a time: blocks are read, parsed by a few threads and spooled.

One thread reads and takes the checksums; parsing, which is most of the work, runs beside it and does not hold the
interpreter's lock. Parsed blocks are handled in the order of the input, so nothing depends on which thread was faster.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from distembed.data.dataset.manifest import Rejected, SourceFile
from distembed.data.prepare.row_source import OpenPart, Part, RejectedRows, RowSource, read_rejected
from distembed.data.prepare.split import SplitRule
from distembed.data.prepare.spool import SpooledBlock, require_known_splits, write_block
from distembed.data.prepare.work import Advance
from distembed.data.table.blocks import RejectedRow

_Parsed = tuple[list[int], int, tuple[RejectedRow, ...]]
"""The part of a block that stays in memory once it is spooled: its sizes, number of lines, malformed rows."""
_SIZES = "sizes.bin"
"""Name of the file, in a part's folder, with the number of rows of each block and where its arrays begin."""


@dataclass(frozen=True)
class PartFound:
    """The result of reading a part."""

    folder: str  # of its blocks in the spool
    num_rows: int  # well-formed ones
    num_lines: int  # but for those before the first row
    header_lines: int  # before the first row
    bytes_read: int
    sha256: str | None  # of the input, of a part that is the whole input
    num_rejected: int  # malformed rows, which ``rejected.tsv`` in the folder lists
    notes: list[str]  # sentences that a user should know besides


@dataclass(frozen=True)
class PartReader:
    """Reads parts of inputs into a spool folder; it can be pickled."""

    source: RowSource
    spool: Path
    max_rejected: float  # largest share of malformed rows that is no error
    rule: SplitRule
    block_bytes: int  # of text in a block, about
    threads: int  # that parse

    def read(self, numbered: tuple[int, Part], advance: Advance) -> PartFound:
        """Reads a part, given its number among all parts too."""
        index, part = numbered
        self.spool.mkdir(exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"part-{index:06d}-", dir=self.spool))  # of this attempt alone
        opened = self.source.open(part, self.block_bytes)
        inputs = list(self.source.inputs)
        if part.start:
            given = inputs[part.source]
            inputs[part.source] = replace(given, place=f"{given.place}, from {part.start:,} on")
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
        found = (opened.header_lines, opened.bytes_read, opened.sha256, rejected.num_rows, opened.notes())
        return PartFound(folder.name, num_rows, num_lines, *found)

    def _parse_in_order(self, folder: Path, part: Part, opened: OpenPart) -> Generator[_Parsed, None, None]:
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

    def _parse(self, path: Path, part: Part, raw: Any) -> _Parsed:
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
        return [sum(found.num_rows for found in parts) for parts in self.found]

    def blocks(self) -> list[SpooledBlock]:
        """Returns the blocks with at least one row, in the order of the inputs."""
        blocks: list[SpooledBlock] = []
        layout, first_row = self.source.layout, 0
        for folder in (self.spool / found.folder for parts in self.found for found in parts):
            rows_and_starts = np.fromfile(folder / _SIZES, np.int64).reshape(-1, 2 + len(layout.arrays))
            for number, sizes in enumerate(rows_and_starts):
                path, num_rows = _block_path(folder, number), int(sizes[0])
                if num_rows:
                    blocks.append(SpooledBlock(path, len(blocks), first_row, num_rows, sizes[1:], layout))
                    first_row += num_rows
        return blocks

    def source_files(self, checksums: Mapping[int, str]) -> list[SourceFile]:
        files = []
        for number, (described, parts) in enumerate(zip(self.source.inputs, self.found, strict=True)):
            num_bytes = parts[0].bytes_read if described.num_bytes is None else described.num_bytes
            rejected = sum(found.num_rejected for found in parts)
            sha256 = parts[0].sha256 or checksums.get(number, "")
            files.append(SourceFile(described.name, num_bytes, sha256, self.source_rows[number] + rejected, rejected))
        return files

    def notes(self) -> Iterator[str]:
        for described, parts in zip(self.source.inputs, self.found, strict=True):
            yield from (note for found in parts for note in found.notes)
            if not any(found.num_rows + found.num_rejected for found in parts):
                yield f"{described.place} has no rows"

    def rejected(self, folder: Path, max_rejected: float) -> Rejected:
        """Lists the malformed rows in ``rejected.tsv`` of a folder, and returns their counts."""
        source = self.source
        rows = RejectedRows(folder, source.inputs, source.reasons, max_rejected, source.wanted, source.hints)
        for number, parts in enumerate(self.found):
            lines_before = 0
            for found in parts:
                if found.num_rejected:
                    for line, reason, row in read_rejected(self.spool / found.folder):
                        rows.add(number, lines_before + line, reason, row)
                lines_before += found.header_lines + found.num_lines
        rows.close()
        rows.require_few(sum(self.source_rows) + rows.num_rows)
        return rows.counts()
