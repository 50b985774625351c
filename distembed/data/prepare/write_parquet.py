"""Writes spooled blocks, with ids for their keys, as the Parquet files of a split.

Where files and row groups end depends on the rows alone, and every row group is written from whole arrays of its own,
so the bytes do not depend on how the input was cut into blocks, on the threads or on the memory. What each column is
filled with says ``output_columns.py``.

Byte-stream-split puts the equal high bytes of neighbouring values together; with zstd it gives smaller files, faster,
than zstd alone, on ids as on float32 (measured).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from distembed.data.dataset.manifest import DataFile, Split
from distembed.data.dataset.pieces import Pieces, file_pieces
from distembed.data.prepare.destination import Destination
from distembed.data.prepare.output_columns import IdOutput, OutputColumn
from distembed.data.prepare.row_splits import RowSplits, some_rows
from distembed.data.prepare.spool import SpooledBlock

ROW_GROUP_ROWS = 131_072

# About 64 files a split, to be written and read side by side, of 2 to 32 row groups (0.3 to 4 million rows).
_FILES_WANTED, _FEWEST_GROUPS, _MOST_GROUPS = 64, 2, 32

_GROUP_ENTRIES = 2**20


def rows_per_group(mean_entries: float) -> int:
    """Returns how many rows a row group has, so that one of long lists takes no more memory to read than others.

    Args:
        mean_entries: Mean number of entries of the longest list of a row; 1 or less without lists.
    """
    return max(1, min(ROW_GROUP_ROWS, int(_GROUP_ENTRIES / max(1.0, mean_entries))))


@dataclass(frozen=True)
class FilePlan:
    """One file to write: rows ``[start, stop)`` of a split."""

    split: str  # name of the split
    path: str  # path of the file in the dataset folder
    start: int  # first row
    stop: int  # row after the last one


def plan_files(split: str, start: int, stop: int, group_rows: int | None = None) -> list[FilePlan]:
    """Returns the files of a split, none where it has no rows; each but the last has whole row groups."""
    group_rows = group_rows or ROW_GROUP_ROWS
    groups = -(-(stop - start) // group_rows)
    rows = group_rows * min(max(-(-groups // _FILES_WANTED), _FEWEST_GROUPS), _MOST_GROUPS)
    starts = range(start, stop, rows)
    return [
        FilePlan(split, f"{split}/part-{index:05d}.parquet", first, min(first + rows, stop))
        for index, first in enumerate(starts)
    ]


@dataclass(frozen=True)
class WrittenFile:
    """One file that was written."""

    file: DataFile  # its entry in the manifest
    label_sum: float | None  # sum of its labels; None where rows have none
    pieces: Pieces  # its pieces with their checksums
    weight_sum: float | None = None  # sum of its rows' weights; None where rows have none


def written_split(files: Sequence[WrittenFile]) -> Split:
    """Returns what the manifest says of a split, given its files in the order of their rows."""
    num_rows = sum(one.file.num_rows for one in files)
    label_rate = _mean([one.label_sum for one in files], num_rows)
    mean_weight = _mean([one.weight_sum for one in files], num_rows)
    return Split(num_rows, label_rate, tuple(one.file for one in files), mean_weight)


def _mean(sums: Sequence[float | None], num_rows: int) -> float | None:
    """Returns the mean over the rows of all files; None without rows, and of what rows do not have."""
    known = [each for each in sums if each is not None]
    return sum(known) / num_rows if known and num_rows else None


def write_file(
    path: Path,
    plan: FilePlan,
    schema: pa.Schema,
    label: str | None,
    groups: Iterable[pa.Table],
    weight: str | None = None,
) -> WrittenFile:
    """Writes one file.

    Args:
        path: The file.
        plan: What the manifest says of it.
        schema: Columns of the file.
        label: Name of the label's column, if there is one.
        groups: The file's rows, a table for each row group.
        weight: Name of the column of the rows' weights, if there is one.
    """
    sums = {name: 0.0 for name in (label, weight) if name is not None}
    with pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        use_dictionary=False,
        use_byte_stream_split=[_leaf(field) for field in schema if field.name != label],
        write_statistics=False,
        write_page_checksum=True,
    ) as writer:
        for table in groups:
            for name in sums:
                sums[name] += float(pc.sum(pc.cast(table[name], pa.float64())).as_py())
            writer.write_table(table, len(table))
    file = DataFile(plan.path, plan.stop - plan.start, path.stat().st_size)
    label_sum, weight_sum = (None if name is None else sums[name] for name in (label, weight))
    return WrittenFile(file, label_sum, file_pieces(path), weight_sum)


def _leaf(field: pa.Field) -> str:
    """Returns the name that Parquet has for a column's values."""
    return f"{field.name}.list.element" if pa.types.is_list(field.type) else str(field.name)


@dataclass(frozen=True, eq=False)
class FileWriter:
    """Writes the planned files; different files can be written at the same time."""

    folder: Path  # dataset folder
    destination: Destination  # where its files go
    columns: Sequence[OutputColumn]  # the columns of the dataset
    label: str | None  # name of the label's column, if there is one
    weight: str | None  # name of the column of the rows' weights, if there is one
    blocks: Sequence[SpooledBlock]  # all spooled blocks
    splits: RowSplits  # which rows are in which split

    @property
    def group_rows(self) -> int:
        """Rows of a row group, fewer where lists are long."""
        lists = [column for column in self.columns if isinstance(column, IdOutput) and column.is_list]
        return rows_per_group(max((column.mean_values(self.blocks) for column in lists), default=1.0))

    def write(self, plan: FilePlan) -> WrittenFile:
        """Writes one file."""
        schema = pa.schema([column.field for column in self.columns])
        tables = (pa.table(arrays, schema=schema) for arrays in self._row_groups(plan, self.group_rows))
        with self.destination.file(self.folder, plan.path) as path:
            return write_file(path, plan, schema, self.label, tables, self.weight)

    def _row_groups(self, plan: FilePlan, group_rows: int) -> Iterator[list[pa.Array]]:
        """Yields the columns of one row group after the other, taken from the blocks."""
        split = self.splits.rule.names.index(plan.split)
        room, parts = group_rows, [list[pa.Array]() for _ in self.columns]
        for index, first, last in self.splits.parts(split, plan.start, plan.stop):
            block = self.blocks[index]
            rows = self.splits.rows(block, split)
            takes = [column.read(block) for column in self.columns]
            while first < last:
                taken = min(room, last - first)
                for part, take in zip(parts, takes, strict=True):
                    part.append(take(some_rows(rows, first, first + taken)))
                first, room = first + taken, room - taken
                if not room:
                    yield self._arrays(parts)
                    room = group_rows
        if room < group_rows:
            yield self._arrays(parts)

    def _arrays(self, parts: Sequence[list[pa.Array]]) -> list[pa.Array]:
        """Returns the columns of a row group, and empties the lists of their parts."""
        arrays = [pa.concat_arrays(part) for part in parts]
        for part in parts:
            part.clear()
        return arrays
