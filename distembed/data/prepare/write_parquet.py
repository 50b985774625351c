"""Writes spooled blocks, with ids for their keys, as the Parquet files of a split.

Where files and row groups end depends on the rows alone, and every row group is written from whole arrays of its own,
so the bytes do not depend on how the input was cut into blocks, on the threads or on the memory.

Byte-stream-split puts the equal high bytes of neighbouring values together; with zstd it gives smaller files, faster,
than zstd alone, on ids as on float32 (measured).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from distembed.data.dataset.manifest import DataFile, Pieces, Split, file_pieces, summed_split
from distembed.data.dataset.records import Jagged
from distembed.data.dataset.schema import Schema
from distembed.data.prepare.feature_ids import LookupTables, list_rows
from distembed.data.prepare.spool import Rows, RowSplits, SpooledBlock
from distembed.data.prepare.staging import Destination
from distembed.data.table.vocabulary import regrouped

ROW_GROUP_ROWS = 131_072

# About 64 files a split, to be written and read side by side, of 2 to 32 row groups (0.3 to 4 million rows).
_FILES_WANTED, _FEWEST_GROUPS, _MOST_GROUPS = 64, 2, 32

_GROUP_ENTRIES = 2**20


def rows_per_group(mean_entries: float) -> int:
    """Returns the rows of a row group: 131,072, or fewer so that its lists have about 2^20 entries, to bound memory."""
    return max(1, min(ROW_GROUP_ROWS, int(_GROUP_ENTRIES / max(1.0, mean_entries))))


@dataclass(frozen=True)
class FilePlan:
    """One file to write: rows ``[start, stop)`` of a split."""

    split: str  # name of the split
    path: str  # path of the file in the dataset folder
    start: int  # first row
    stop: int  # row after the last one


def plan_files(split: str, num_rows: int, group_rows: int) -> list[FilePlan]:
    """Cuts a split into files of 2 to 32 row groups, about 64 files if it is large enough; none without rows."""
    groups = -(-num_rows // group_rows)
    rows = group_rows * min(max(-(-groups // _FILES_WANTED), _FEWEST_GROUPS), _MOST_GROUPS)
    return [
        FilePlan(split, f"{split}/part-{index:05d}.parquet", start, min(start + rows, num_rows))
        for index, start in enumerate(range(0, num_rows, rows))
    ]


@dataclass(frozen=True)
class WrittenFile:
    """One file that was written."""

    file: DataFile  # its entry in the manifest
    sums: dict[str, float]  # of its labels and weights, by column
    counts: dict[str, int]  # rows that have a label or a weight, by column
    pieces: Pieces  # its pieces with their checksums


def written_split(files: Sequence[WrittenFile], schema: Schema) -> Split:
    """Returns the manifest's entry of a split, given its files in the order of their rows."""
    sums = {name: sum(written.sums[name] for written in files) for name in schema.targets}
    counts = {name: sum(written.counts[name] for written in files) for name in schema.targets}
    return summed_split(schema, [written.file for written in files], sums, counts)


def write_file(
    path: Path, plan: FilePlan, columns: pa.Schema, groups: Iterable[pa.Table], schema: Schema
) -> WrittenFile:
    """Writes each table of ``groups`` as a row group, adds up labels and weights, and computes checksums of pieces."""
    sums, counts = dict.fromkeys(schema.targets, 0.0), dict.fromkeys(schema.targets, 0)
    with pq.ParquetWriter(
        path,
        columns,
        compression="zstd",
        use_dictionary=False,
        use_byte_stream_split=[
            f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name
            for field in columns
            if field.name not in schema.label_names
        ],
        write_statistics=False,
        write_page_checksum=True,
    ) as writer:
        for table in groups:
            for name in sums:
                sums[name] += pc.sum(pc.cast(table[name], pa.float64())).as_py() or 0.0  # null if all are missing
                counts[name] += len(table) - table[name].null_count
            writer.write_table(table, len(table))
    file = DataFile(plan.path, plan.stop - plan.start, path.stat().st_size)
    return WrittenFile(file, sums, counts, file_pieces(path))


# A column of a dataset's files: its name and type, and a function that reads some rows of a block.
OutputColumn: TypeAlias = tuple[pa.Field, Callable[[SpooledBlock, Rows], pa.Array]]


def spooled_numbers(
    block: SpooledBlock,
    rows: Rows,
    index: int,
    change: Callable[[NDArray[Any]], NDArray[Any]] | None,
    type_: pa.DataType | None,
) -> pa.Array:
    """Reads rows of number column ``index`` and applies ``change``.

    ``type_`` is the type of a column that may lack numbers: NaN becomes null. None keeps the numbers' own.
    """
    numbers = block.numbers(index)[rows]
    values = pa.array(numbers if change is None else change(numbers), from_pandas=type_ is not None)
    return values if type_ is None else values.cast(type_)


def spooled_number_lists(
    block: SpooledBlock,
    rows: Rows,
    index: int,
    beside: int,
    change: Callable[[NDArray[Any]], NDArray[Any]] | None,
    type_: pa.DataType | None,
) -> pa.Array:
    """Reads rows of number column ``index``, of lists as long as the lists of id column ``beside``.

    ``change`` and ``type_`` are the arguments of :func:`spooled_numbers`, for the numbers of the lists.
    """
    lengths = block.lengths(beside).astype(np.int64)
    lists = list_rows(Jagged.from_lengths(block.numbers(index), lengths), rows)
    values = lists.values if change is None else change(lists.values)
    return pa.ListArray.from_arrays(
        pa.array(lists.offsets.astype(np.int32)), pa.array(values, from_pandas=type_ is not None)
    )


def spooled_ids(block: SpooledBlock, rows: Rows, index: int, lookup: LookupTables) -> pa.Array:
    """Reads rows of id column ``index`` of the layout, and replaces codes by ids; lists stay lists."""
    table = lookup.table(block.index)
    if not block.layout.ids[index].is_list:
        return pa.array(np.take(table, block.codes(index)[rows], mode="clip"))
    lists = list_rows(block.lists(index), rows)
    return pa.ListArray.from_arrays(pa.array(lists.offsets.astype(np.int32)), pa.array(table[lists.values]))


@dataclass(frozen=True, eq=False)
class FileWriter:
    """Writes the planned files; different files can be written at the same time."""

    folder: Path  # dataset folder
    destination: Destination  # where its files go
    schema: Schema  # of the dataset
    columns: Sequence[OutputColumn]
    splits: RowSplits  # all rows, and which of them are in which split
    group_rows: int  # of a row group

    def write(self, plan: FilePlan) -> WrittenFile:
        columns, split = pa.schema([field for field, _ in self.columns]), self.splits.rule.names.index(plan.split)

        def table(index: int, first: int, end: int) -> pa.Table:
            block = self.splits.blocks[index]
            rows = self.splits.rows(block, split)
            block_table = pa.table([read(block, rows) for _, read in self.columns], schema=columns)
            return block_table.slice(first, end - first)

        tables = (table(*block_range) for block_range in self.splits.parts(split, plan.start, plan.stop))
        with self.destination.file(self.folder, plan.path) as path:
            groups = filter(len, regrouped(tables, columns, self.group_rows))
            return write_file(path, plan, columns, groups, self.schema)
