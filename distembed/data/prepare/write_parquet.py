"""Writes spooled blocks, with ids for their keys, as the Parquet files of a split.

Where files and row groups end depends on the rows alone, and every row group is written from whole arrays of its own,
so the bytes do not depend on how the input was cut into blocks, on the threads or on the memory.

Byte-stream-split puts the equal high bytes of neighbouring values together; with zstd it gives smaller files, faster,
than zstd alone, on ids as on float32 (measured).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from distembed.data.dataset.manifest import DataFile
from distembed.data.dataset.pieces import Pieces, file_pieces
from distembed.data.dataset.schema import Schema
from distembed.data.prepare.spool import SpooledBlock, blocks_within
from distembed.data.prepare.vocabulary import LookupTables

ROW_GROUP_ROWS = 131_072

# About 64 files a split, to be written and read side by side, of 2 to 32 row groups (0.3 to 4 million rows).
_FILES_WANTED, _FEWEST_GROUPS, _MOST_GROUPS = 64, 2, 32


@dataclass(frozen=True)
class FilePlan:
    """One file to write: rows ``[start, stop)`` of the input, counted over the well-formed ones.

    Attributes:
        split: Name of the split.
        path: Path of the file in the dataset folder.
        start: First row.
        stop: Row after the last one.
    """

    split: str
    path: str
    start: int
    stop: int


def plan_files(split: str, start: int, stop: int) -> list[FilePlan]:
    """Returns the files of a split, none where it has no rows."""
    groups = -(-(stop - start) // ROW_GROUP_ROWS)
    rows = ROW_GROUP_ROWS * min(max(-(-groups // _FILES_WANTED), _FEWEST_GROUPS), _MOST_GROUPS)
    starts = range(start, stop, rows)
    return [
        FilePlan(split, f"{split}/part-{index:05d}.parquet", first, min(first + rows, stop))
        for index, first in enumerate(starts)
    ]


@dataclass(frozen=True)
class WrittenFile:
    """One file that was written.

    Attributes:
        file: What the manifest says of it.
        positives: Number of its labels that are 1.
        pieces: Its pieces with their checksums.
    """

    file: DataFile
    positives: int
    pieces: Pieces


@dataclass(frozen=True)
class FileWriter:
    """Writes the planned files; different files can be written at the same time.

    Attributes:
        folder: Dataset folder.
        schema: Schema that names the columns.
        blocks: All spooled blocks.
        lookups: Ids of the blocks' keys, for every categorical feature.
    """

    folder: Path
    schema: Schema
    blocks: Sequence[SpooledBlock]
    lookups: Sequence[LookupTables]

    def write(self, plan: FilePlan) -> WrittenFile:
        """Writes one file."""
        path = self.folder / plan.path
        positives = 0
        arrow = self._arrow_schema()
        with pq.ParquetWriter(
            path,
            arrow,
            compression="zstd",
            use_dictionary=False,
            use_byte_stream_split=[name for name in arrow.names if name != self.schema.label],
            write_statistics=False,
            write_page_checksum=True,
        ) as writer:
            for columns in self._row_groups(plan):
                positives += int(columns[0].sum())
                writer.write_table(pa.table([pa.array(c) for c in columns], schema=arrow), len(columns[0]))
        file = DataFile(plan.path, plan.stop - plan.start, path.stat().st_size)
        return WrittenFile(file, positives, file_pieces(path))

    def _arrow_schema(self) -> pa.Schema:
        dense = [(name, pa.float32()) for name in self.schema.dense]
        ids = zip(
            self.schema.categorical_names, (pa.from_numpy_dtype(table.dtype) for table in self.lookups), strict=True
        )
        return pa.schema([(self.schema.label, pa.int8()), *dense, *ids])

    def _row_groups(self, plan: FilePlan) -> Iterator[list[NDArray[Any]]]:
        """Yields the columns of one row group after the other, filled from the blocks."""
        stop = min(plan.start + ROW_GROUP_ROWS, plan.stop)
        columns = self._empty_columns(stop - plan.start)
        start = plan.start
        for block in blocks_within(self.blocks, plan.start, plan.stop):
            source = _BlockRows(block, self.schema, self.lookups)
            position = max(block.first_row, plan.start)
            while position < min(block.stop_row, plan.stop):
                upto = min(block.stop_row, stop)
                source.copy(position, upto, [column[position - start : upto - start] for column in columns])
                position = upto
                if position == stop:
                    yield columns
                    start, stop = stop, min(stop + ROW_GROUP_ROWS, plan.stop)
                    columns = self._empty_columns(stop - start)

    def _empty_columns(self, num_rows: int) -> list[NDArray[Any]]:
        dtypes: list[np.dtype[Any]] = [np.dtype(np.int8), *[np.dtype(np.float32)] * len(self.schema.dense)]
        dtypes += [table.dtype for table in self.lookups]
        return [np.empty(num_rows, dtype) for dtype in dtypes]


class _BlockRows:
    """The rows of one block, with ids for their keys."""

    def __init__(self, block: SpooledBlock, schema: Schema, lookups: Sequence[LookupTables]) -> None:
        self._first_row = block.first_row
        dense = [block.dense(column) for column in range(len(schema.dense))]
        self._numbers: list[NDArray[Any]] = [block.labels(), *dense]
        self._codes = [block.codes(feature) for feature in range(len(lookups))]
        self._tables = [table.table(block.index, size) for table, size in zip(lookups, block.num_keys, strict=True)]

    def copy(self, start: int, stop: int, out: Sequence[NDArray[Any]]) -> None:
        """Copies the rows ``[start, stop)`` into these arrays, one for each column."""
        rows = slice(start - self._first_row, stop - self._first_row)
        for target, values in zip(out, self._numbers, strict=False):
            target[:] = values[rows]
        for target, codes, table in zip(out[len(self._numbers) :], self._codes, self._tables, strict=True):
            np.take(table, codes[rows], out=target, mode="clip")
