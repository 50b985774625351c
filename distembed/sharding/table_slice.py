"""Columns of a table's output on a rank, and the columns of its partitions that compose them.

The chain of values from a table to a rank's lookup::

    CompositionalEmbeddingConfig   the table: partitions, composition, pooling, id policy
    Placement                      its shards on all ranks
    TableSlice                     a range of its output's columns, all that plans need
    LocalTable                     the slice with its shards, as this rank looks them up

TorchRec keeps a rank's part of a weight in one matrix, so that a rank's ranges of its columns are equally wide.
Neighbouring ranges on one rank are merged; where that makes them unequal, they are cut to the greatest common width::

    planned, of 128 columns    [0, 32) on rank 3, [32, 64) on 3, [64, 96) on 2, [96, 128) on 3
    on rank 3                  [0, 32), [32, 64), [96, 128) in place of [0, 64), [96, 128)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchrec.distributed.embedding_types import ShardedEmbeddingTable
from torchrec.distributed.types import ShardMetadata

from distembed.base.errors import UserError
from distembed.embedding.config import CompositionalEmbeddingBagConfig, CompositionalEmbeddingConfig, PartitionTable


@dataclass(frozen=True)
class PartitionSlice:
    """Columns ``[start, stop)`` of one partition's weight, which contribute to a range of the output's columns."""

    part: PartitionTable  # the partition's parameters
    start: int  # first of the columns
    stop: int  # last column + 1
    kernel: str | None = None  # TorchRec's compute kernel of the weight; None where every rank has the weight

    @property
    def partition(self) -> int:
        return self.part.number

    @property
    def num_columns(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class TableSlice:
    """Columns of a table's output that one rank composes."""

    table: CompositionalEmbeddingConfig  # the table
    num_columns: int  # number of columns of the output
    # the partitions' columns that contribute to them; empty where this rank has no rows of the table
    partitions: tuple[PartitionSlice, ...]

    @property
    def sharded(self) -> frozenset[int]:
        """Numbers of the partitions whose weights are sharded."""
        return frozenset(part_slice.partition for part_slice in self.partitions if part_slice.kernel)

    @property
    def shape(self) -> tuple[tuple[int, int, str | None], ...]:
        """Number, number of columns and compute kernel of each partition that contributes."""
        return tuple((part.partition, part.num_columns, part.kernel) for part in self.partitions)


@dataclass(frozen=True)
class LocalTable(TableSlice):
    """A slice of a table with this rank's weights."""

    # TorchRec's description of each sharded partition's shard, by number of the partition; the rest are replicated
    shards: Mapping[int, ShardedEmbeddingTable] = field(default_factory=dict)
    first_row: int = 0  # first row of the shard of the partition that is divided by rows
    is_frozen: bool = False  # whether the table's vectors are never updated


def width(table: CompositionalEmbeddingConfig) -> int:
    """Returns the number of columns of a table's output: of all vectors that an id has."""
    return table.num_vectors * table.embedding_dim


def unit_size(table: CompositionalEmbeddingConfig) -> tuple[int, int]:
    """Returns the shape of a table's unit, by which the planner counts bytes.

    It is as wide as the output, with as many numbers as the vectors of all partitions, rounded up to a whole row.
    """
    numbers = sum(part.num_parameters for part in table.lookup_tables())
    return -(-numbers // width(table)), width(table)


def is_pooled(table: CompositionalEmbeddingConfig) -> bool:
    """Returns whether a table pools the ids of a bag into one vector; a table of sequences gives one for each id."""
    return isinstance(table, CompositionalEmbeddingBagConfig)


def slice_table(
    table: CompositionalEmbeddingConfig, columns: tuple[int, int], kernels: Sequence[str | None]
) -> TableSlice:
    """Returns a range ``(start, stop)`` of a table's output; ``kernels`` has each partition's compute kernel."""
    start, stop = columns
    slices = [replace(part, kernel=kernels[part.partition]) for part in partition_slices(table, start, stop)]
    return TableSlice(table, stop - start, tuple(slices))


def partition_slices(table: CompositionalEmbeddingConfig, start: int, stop: int) -> list[PartitionSlice]:
    """Returns the partitions' columns that contribute to columns ``[start, stop)`` of the output.

    Where a path composes them, every output column depends on all columns of every partition: this table cannot be
    divided by columns, and less than all of them is a UserError.
    """
    parts = table.partition_tables()
    columns = table.combine.columns(table.embedding_dim, len(parts))
    if columns is None:  # a path
        if (start, stop) != (0, width(table)):
            raise UserError(
                f"table {table.name!r}: columns [{start}, {stop}) are planned apart, but each number of a vector that "
                f"{table.combine.name} composes depends on all {parts[0].dim} columns; place the table table_wise, "
                "row_wise or data_parallel, or in one range of columns."
            )
        # the functions of a path lie whole on every rank, outside of all slices; other compositions have none
        return [PartitionSlice(part, 0, part.dim) for part in parts if not part.is_function]
    slices = []
    for part, part_columns in zip(parts, columns, strict=True):
        begin, end = max(start, part_columns.start), min(stop, part_columns.stop)
        if begin < end:
            slices.append(PartitionSlice(part, begin - part_columns.start, end - part_columns.start))
    return slices


def own_ranges(
    table: CompositionalEmbeddingConfig, shards: Sequence[ShardMetadata], columns: int | None = None
) -> list[ShardMetadata]:
    """Returns a table's column ranges, with neighbouring ranges of a rank merged and then cut to equal widths.

    TorchRec keeps a rank's shards of a weight in one matrix, so all ranges of a rank need one width: ``columns``, or
    without it the greatest width that divides the rank's merged ranges. Raises a UserError unless the ranges cover the
    output's columns once, without gaps.
    """
    merged: list[ShardMetadata] = []
    for shard in sorted(shards, key=lambda shard: shard.shard_offsets[1]):
        if merged and shard_rank(merged[-1]) == shard_rank(shard):
            previous = merged.pop()
            num_columns = previous.shard_sizes[1] + shard.shard_sizes[1]
            shard = ShardMetadata(previous.shard_offsets, [previous.shard_sizes[0], num_columns], previous.placement)
        merged.append(shard)
    _require_all_columns(table, merged)
    by_rank: dict[int, list[ShardMetadata]] = {}  # merged stays sorted by first column, which the cuts keep
    for shard in merged:
        by_rank.setdefault(shard_rank(shard), []).append(shard)
    widths = {rank: columns or _equal_columns(table, rank_shards) for rank, rank_shards in by_rank.items()}
    return [cut_shard for shard in merged for cut_shard in _cut(shard, widths[shard_rank(shard)])]


def _equal_columns(table: CompositionalEmbeddingConfig, shards: Sequence[ShardMetadata]) -> int | None:
    """Returns the width to cut a rank's ranges to, for shards of one width in each partition; None if they have it."""
    widths: dict[int, set[int]] = {}
    for shard in shards:
        for part_slice in partition_slices(table, *column_range(shard)):
            widths.setdefault(part_slice.partition, set()).add(part_slice.num_columns)
    if all(len(partition_widths) == 1 for partition_widths in widths.values()):
        return None
    return math.gcd(*set().union(*widths.values()))


def _cut(shard: ShardMetadata, columns: int | None) -> list[ShardMetadata]:
    """Returns a shard in ranges of ``columns`` columns each; whole without a width."""
    if columns is None:
        return [shard]
    row, num_rows = shard.shard_offsets[0], shard.shard_sizes[0]
    return [
        ShardMetadata([row, start], [num_rows, columns], shard.placement)
        for start in range(*column_range(shard), columns)
    ]


def column_range(shard: ShardMetadata) -> tuple[int, int]:
    """Returns the first column of a shard, and its last column + 1."""
    start: int = shard.shard_offsets[1]
    return start, start + shard.shard_sizes[1]


def shard_rank(shard: ShardMetadata) -> int:
    """Returns the rank that holds a shard."""
    rank = shard.placement.rank() if shard.placement is not None else None
    assert rank is not None
    return rank


def _require_all_columns(table: CompositionalEmbeddingConfig, shards: Sequence[ShardMetadata]) -> None:
    """Raises a UserError unless shards, in the order of their columns, cover a table's output once, without gaps."""
    end = 0
    for shard in shards:
        if shard.shard_offsets[1] != end:
            break
        end += shard.shard_sizes[1]
    if end != width(table):
        ranges = [list(column_range(shard)) for shard in shards]
        raise UserError(
            f"table {table.name!r} has {width(table)} columns, but the plan gives the ranks {ranges}; it was made for "
            "another table. Plan anew."
        )
