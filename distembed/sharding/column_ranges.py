"""The ranges of columns that each rank has of a table, from those of a plan.

TorchRec keeps what a rank has of a weight in one matrix, so the rank's ranges of its columns are equally wide. Ranges
that are neighbours become one; where that would make them unequal, they are cut to the greatest width that divides
all::

    planned, of 128 columns    [0, 32) on rank 3, [32, 64) on 3, [64, 96) on 2, [96, 128) on 3
    on rank 3                  [0, 32), [32, 64), [96, 128) in place of [0, 64), [96, 128)
"""

import math
from collections.abc import Sequence

from torchrec.distributed.types import ShardMetadata

from distembed.base.errors import UserError
from distembed.embedding.config import CompositionalEmbeddingConfig, PartitionTable
from distembed.sharding.table_slice import partition_slices, width


def own_ranges(
    table: CompositionalEmbeddingConfig, shards: Sequence[ShardMetadata], columns: int | None = None
) -> list[ShardMetadata]:
    """Returns ranges of columns without neighbours on one rank, cut into ``columns`` or as is needed on each rank."""
    merged, parts = _merge_neighbours(shards), table.partition_tables()
    _require_all_columns(table, merged)
    by_rank: dict[int, list[ShardMetadata]] = {}
    for shard in merged:
        by_rank.setdefault(shard_rank(shard), []).append(shard)
    widths = {rank: columns or _equal_columns(table, parts, own) for rank, own in by_rank.items()}
    return [piece for shard in merged for piece in _cut(shard, widths[shard_rank(shard)])]


def _equal_columns(
    table: CompositionalEmbeddingConfig, parts: Sequence[PartitionTable], shards: Sequence[ShardMetadata]
) -> int | None:
    """Returns into how wide ranges a rank's have to be cut so that those of each partition are equally wide, or None.

    Partitions begin and end at multiples of it within a range, so that no piece is narrower.
    """
    widths: dict[int, set[int]] = {}
    for shard in shards:
        for own in partition_slices(table, parts, *column_range(shard)):
            widths.setdefault(own.partition, set()).add(own.num_columns)
    return math.gcd(*set().union(*widths.values())) if any(len(own) > 1 for own in widths.values()) else None


def _cut(shard: ShardMetadata, columns: int | None) -> list[ShardMetadata]:
    """Returns a shard in pieces of this many columns, or whole."""
    if columns is None:
        return [shard]
    row, num_rows = shard.shard_offsets[0], shard.shard_sizes[0]
    return [
        ShardMetadata([row, start], [num_rows, columns], shard.placement)
        for start in range(*column_range(shard), columns)
    ]


def column_range(shard: ShardMetadata) -> tuple[int, int]:
    """Returns the first column of a shard, and the one behind its last."""
    start: int = shard.shard_offsets[1]
    return start, start + shard.shard_sizes[1]


def shard_rank(shard: ShardMetadata) -> int:
    """Returns the rank that a shard lies on."""
    rank = shard.placement.rank() if shard.placement is not None else None
    assert rank is not None
    return rank


def _merge_neighbours(shards: Sequence[ShardMetadata]) -> list[ShardMetadata]:
    merged: list[ShardMetadata] = []
    for shard in sorted(shards, key=lambda shard: shard.shard_offsets[1]):
        if merged and shard_rank(merged[-1]) == shard_rank(shard):
            last = merged.pop()
            columns = last.shard_sizes[1] + shard.shard_sizes[1]
            shard = ShardMetadata(last.shard_offsets, [last.shard_sizes[0], columns], last.placement)
        merged.append(shard)
    return merged


def _require_all_columns(table: CompositionalEmbeddingConfig, shards: Sequence[ShardMetadata]) -> None:
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
