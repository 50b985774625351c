"""Criteo's rows as a source of rows of any kind: files, their parts, and the columns of their blocks."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from distembed.data.dataset.schema import CRITEO_CATEGORICAL, CRITEO_DENSE
from distembed.data.prepare.blocks import BlockLayout, KeyColumn, NumberColumn, ParsedBlock, Part, RawInput
from distembed.data.prepare.input_bytes import file_compression
from distembed.data.prepare.inputs import input_names, is_pipe
from distembed.data.prepare.parse_rows import REASONS, parse_block
from distembed.data.prepare.source_files import SourceReader

if TYPE_CHECKING:
    from distembed.data.prepare.criteo import CriteoOptions


class CriteoSource:
    """Files and pipes of Criteo's rows.

    Args:
        files: Files in time order.
        options: How values become ids, and what becomes of missing integers.

    Attributes:
        inputs: The files.
        layout: The columns of every block: label, integers and ids.
    """

    reasons = REASONS
    wanted = "A row is a label (0 or 1), 13 integers and 26 hexadecimal ids, separated by tabs."
    hints: Mapping[str, str] = {}

    def __init__(self, files: Sequence[Path], options: CriteoOptions) -> None:
        self._files = list(files)
        self.inputs = [_describe(file, name) for file, name in zip(files, input_names(files), strict=True)]
        keeps_missing = options.missing == "keep"
        float32, int8 = np.dtype(np.float32), np.dtype(np.int8)
        dense = [NumberColumn(name, "dense", float32, keeps_missing=keeps_missing) for name in CRITEO_DENSE]
        ids = [
            KeyColumn(
                name,
                "feature",
                "hexadecimal",
                min_count=options.min_count,
                hash_size=options.hash_size,
                hash_seed=options.hash_seed,
            )
            for name in CRITEO_CATEGORICAL
        ]
        self.layout = BlockLayout((NumberColumn("label", "label", int8), *dense), tuple(ids), CRITEO_CATEGORICAL)

    def parts(self, part_bytes: int) -> list[Part]:
        return [part for number, each in enumerate(self.inputs) for part in _parts(number, each, part_bytes)]

    def checksum(self, source: int) -> str:
        with open(self._files[source], "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def open(self, part: Part, block_bytes: int) -> _OpenFile:
        return _OpenFile(self._files[part.source], part, block_bytes)

    def parse(self, raw: bytes) -> ParsedBlock:
        return parse_block(raw)


def _describe(file: Path, name: str) -> RawInput:
    """Returns a file's size and kind; nothing is read of a pipe."""
    if is_pipe(file):
        return RawInput(name, str(file), None)
    return RawInput(name, str(file), file.stat().st_size, file_compression(file) is not None)


def _parts(number: int, described: RawInput, part_bytes: int) -> list[Part]:
    """Returns the parts of a file: of about so many bytes of a plain one, else the whole."""
    if described.num_bytes is None or described.is_compressed or described.num_bytes <= part_bytes:
        return [Part(number)]
    starts = range(0, described.num_bytes, part_bytes)
    return [Part(number, start, start + part_bytes if start != starts[-1] else None) for start in starts]


class _OpenFile:
    """A file, or a part of it, that is being read."""

    def __init__(self, file: Path, part: Part, block_bytes: int) -> None:
        self._file = file
        self._part = part
        self._reader = SourceReader(file, block_bytes, part.start, part.stop)

    @property
    def bytes_read(self) -> int:
        read, part = self._reader.bytes_read, self._part
        # to the end of a line, which may be one of the next part
        return read if part.stop is None else min(read, part.stop - part.start)

    @property
    def header_lines(self) -> int:
        return 0 if self._reader.header is None else 1

    @property
    def sha256(self) -> str | None:
        return self._reader.sha256 if self._part.is_whole else None

    def raw_blocks(self) -> Generator[bytes, None, None]:
        return self._reader.blocks()

    def notes(self) -> list[str]:
        notes = []
        if self._reader.header is not None:
            names = ", ".join([*self._reader.header[:2], "...", self._reader.header[-1]])
            notes.append(f"{self._file}: its first line is a header ({names}), which is no row")
        if self._part.stop is None and self._reader.may_be_cut:
            notes.append(
                f"{self._file}: its last line has no line's end and may have been cut short (kept as it is where it is "
                "well-formed)"
            )
        return notes
