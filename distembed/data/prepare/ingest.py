"""The first pass over raw files: blocks are read, parsed by a few threads and spooled, malformed rows are listed.

One thread reads and takes the checksums; parsing, which is most of the work, runs beside it and does not hold the
interpreter's lock. Parsed blocks are handled in the order of the input, so nothing depends on which thread was faster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from distembed.data.dataset.manifest import Rejected, SourceFile
from distembed.data.prepare.blocks import RejectedRow
from distembed.data.prepare.inputs import input_names, total_bytes
from distembed.data.prepare.limits import ResourceLimits
from distembed.data.prepare.parse_rows import REASONS, parse_block
from distembed.data.prepare.progress import NoteCallback, ProgressCallback, ProgressUpdate
from distembed.data.prepare.rejected_rows import RejectedRows
from distembed.data.prepare.source_files import SourceReader
from distembed.data.prepare.spool import SpooledBlock, write_block

_ROW = "A row is a label (0 or 1), 13 integers and 26 hexadecimal ids, separated by tabs."


@dataclass
class Ingested:
    """What the first pass found.

    Attributes:
        blocks: Spooled blocks with at least one row, in the order of the input.
        sources: Input files, with checksums.
        rejected: Counts of malformed rows.
    """

    blocks: list[SpooledBlock] = field(default_factory=list)
    sources: list[SourceFile] = field(default_factory=list)
    rejected: Rejected = field(default_factory=Rejected)

    @property
    def num_rows(self) -> int:
        """Number of well-formed rows."""
        return self.blocks[-1].stop_row if self.blocks else 0

    @property
    def source_rows(self) -> list[int]:
        """Number of well-formed rows in each file."""
        return [source.num_rows - source.num_rejected for source in self.sources]


@dataclass(frozen=True)
class _Parsed:
    """What stays in memory of a block whose columns were spooled."""

    source: int
    path: Path
    num_lines: int
    num_rows: int
    num_keys: tuple[int, ...]
    rejected: tuple[RejectedRow, ...]


class Ingestion:
    """Reads files into a spool folder.

    Args:
        sources: Files in time order.
        folder: Folder that gets ``rejected.tsv`` if there are malformed rows.
        spool: Existing folder for the blocks.
        limits: Memory and threads to use.
        max_rejected: Largest share of malformed rows that is no error.
        report: Function that is called with the bytes and the rows read so far.
        note: Function that is told what was found in the files besides rows, once all are read.
    """

    def __init__(
        self,
        sources: Sequence[Path],
        folder: Path,
        spool: Path,
        limits: ResourceLimits,
        *,
        max_rejected: float,
        report: ProgressCallback,
        note: NoteCallback,
    ) -> None:
        self._sources, self._names = sources, input_names(sources)
        self._spool = spool
        self._rejected = RejectedRows(folder, sources, self._names, REASONS, max_rejected=max_rejected, wanted=_ROW)
        self._threads = limits.num_threads
        self._report, self._note = report, note
        self._total_bytes = total_bytes(sources)
        block_bytes = limits.block_bytes
        self._source_readers = [SourceReader(source, block_bytes) for source in sources]
        self._lines = [0] * len(sources)
        self._result = Ingested()

    def run(self) -> Ingested:
        """Reads everything.

        Raises:
            UserError: A file cannot be read, no row is well-formed, or too many are malformed.
        """
        try:
            for parsed in self._parse_in_order():
                self._take(parsed)
                bytes_done = sum(reader.bytes_read for reader in self._source_readers)
                self._report(ProgressUpdate("read", bytes_done, self._total_bytes, self._result.num_rows))
        finally:
            self._rejected.close()
        self._result.sources = [self._source(index) for index in range(len(self._sources))]
        self._result.rejected = self._rejected.counts()
        self._rejected.require_few(sum(self._lines))
        for note in self._found_besides_rows():
            self._note(note)
        return self._result

    def _parse_in_order(self) -> Iterator[_Parsed]:
        waiting: deque[Future[_Parsed]] = deque()
        pool = ThreadPoolExecutor(self._threads, "distembed-parse")
        try:
            for index, (source, data) in enumerate(self._raw_blocks()):
                waiting.append(pool.submit(self._parse, index, source, data))
                del data  # the thread has it: no second block is kept alive
                if len(waiting) > self._threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _raw_blocks(self) -> Iterator[tuple[int, bytes]]:
        for source, reader in enumerate(self._source_readers):
            for data in reader.blocks():
                yield source, data

    def _parse(self, index: int, source: int, data: bytes) -> _Parsed:
        block = parse_block(data)
        path = self._spool / f"block-{index:06d}"
        if block.num_rows:
            write_block(path, block)
        num_keys = tuple(len(ids.keys) for ids in block.ids)
        return _Parsed(source, path, block.num_lines, block.num_rows, num_keys, block.rejected)

    def _take(self, parsed: _Parsed) -> None:
        header_lines = 0 if self._source_readers[parsed.source].header is None else 1
        for row in parsed.rejected:
            line = header_lines + self._lines[parsed.source] + row.line + 1
            self._rejected.add(parsed.source, line, row.reason, row.text)
        self._lines[parsed.source] += parsed.num_lines
        if parsed.num_rows:
            blocks = self._result.blocks
            first_row = self._result.num_rows
            blocks.append(SpooledBlock(parsed.path, len(blocks), first_row, parsed.num_rows, parsed.num_keys))
        self._rejected.require_hope(sum(self._lines))

    def _source(self, index: int) -> SourceFile:
        reader = self._source_readers[index]
        return SourceFile(
            self._names[index], reader.bytes_read, reader.sha256, self._lines[index], self._rejected.by_source[index]
        )

    def _found_besides_rows(self) -> Iterator[str]:
        for source, reader, num_lines in zip(self._sources, self._source_readers, self._lines, strict=True):
            if reader.header is not None:
                names = ", ".join([*reader.header[:2], "...", reader.header[-1]])
                yield f"{source}: its first line is a header ({names}), which is no row"
            if not num_lines:
                yield f"{source} has no rows"
            if reader.may_be_cut:
                yield (
                    f"{source}: its last line has no line's end and may have been cut short "
                    "(kept as it is where it is well-formed)"
                )
