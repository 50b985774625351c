"""Where the parameters of a table go, from the planner's answer for the table as a whole.

The planner places one unit a table, ``[rows, columns of the output]``. A rank that has a range of those columns has the
columns of every partition that take part in them, so it composes its range alone, and nothing but composed, pooled
vectors is communicated::

    product of two, 16 columns, column-wise        concat of two, 16 columns, column-wise
                 rank 0     rank 1                              rank 0     rank 1
    partition 0  [0, 8)     [8, 16)                partition 0  [0, 8)
    partition 1  [0, 8)     [8, 16)                partition 1             [0, 8)

Row-wise, the partition with most numbers is divided by rows; an id goes to the rank that has its row there. The others
are replicated on all ranks. Data-parallel, all are.

Over two levels, the rows are divided between the ranks of one node. A grid has ranges of columns on several nodes::

    4 ranks, 2 a node        table_row_wise on node 1       grid_shard, 16 columns
                             node 0        node 1           node 0             node 1
    largest partition        -             rows, all        rows, [0, 8)       rows, [8, 16)
    other partitions         replicated    replicated       replicated         replicated

The replicated partitions are on every rank, those of other nodes too: they are plain parameters of the sharded module,
whose gradients are averaged over all ranks.

Of a table in host memory only what is large lies there (:func:`partition_kernels`): a small partition, which is read as
often, stays in device memory.

TorchRec keeps what a rank has of a weight in one matrix, so the rank's ranges of its columns are equally wide. Ranges
that are neighbours become one; where that would make them unequal, they are cut to the greatest width that divides
all::

    planned, of 128 columns    [0, 32) on rank 3, [32, 64) on 3, [64, 96) on 2, [96, 128) on 3
    on rank 3                  [0, 32), [32, 64), [96, 128) in place of [0, 64), [96, 128)
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.constants import UVM_CACHING_RATIO
from torchrec.distributed.types import ParameterSharding, ShardingType, ShardMetadata

from distembed.embedding.config import CompositionalEmbeddingBagConfig, CompositionalEmbeddingConfig, PartitionTable
from distembed.errors import UserError

BY_COLUMNS = (ShardingType.TABLE_WISE.value, ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value)
WITHIN_NODES = (ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value)
"""Rows are divided between the ranks of a node; for bags only."""
BY_ROWS = (ShardingType.ROW_WISE.value, *WITHIN_NODES)
SHARDING_TYPES = (*BY_COLUMNS, *BY_ROWS, ShardingType.DATA_PARALLEL.value)
_BAGS_ONLY = (ShardingType.TABLE_COLUMN_WISE.value, *WITHIN_NODES)
_IN_RANGES = (
    ShardingType.COLUMN_WISE.value,
    ShardingType.TABLE_COLUMN_WISE.value,
    ShardingType.GRID_SHARD.value,
)
COMPUTE_KERNELS = tuple(
    kernel.value
    for kernel in (
        EmbeddingComputeKernel.FUSED,
        EmbeddingComputeKernel.DENSE,
        EmbeddingComputeKernel.FUSED_UVM,
        EmbeddingComputeKernel.FUSED_UVM_CACHING,
    )
)
IN_HOST_MEMORY = (EmbeddingComputeKernel.FUSED_UVM_CACHING.value, EmbeddingComputeKernel.FUSED_UVM.value)
SMALL_SHARE = UVM_CACHING_RATIO
"""Share of the largest partition's bytes that the smaller ones may take of a device: what a cache of it would."""


@dataclass(frozen=True)
class PartitionSlice:
    """Columns ``[start, stop)`` of one partition's weight, which take part in a range of the output's columns.

    Attributes:
        part: The partition's parameters.
        partition: Number of the partition.
        start: First of the columns.
        stop: The column behind the last.
    """

    part: PartitionTable
    partition: int
    start: int
    stop: int

    @property
    def num_columns(self) -> int:
        """Number of columns."""
        return self.stop - self.start


@dataclass(frozen=True)
class TableSlice:
    """Columns of a table's output that one rank composes, and what it composes them from.

    Attributes:
        table: The table.
        num_columns: Number of columns of the output.
        partitions: The partitions' columns that take part; empty where this rank has no rows of the table.
        kernels: Compute kernel of each of these; None where the weights are not sharded, but the same on every rank.
    """

    table: CompositionalEmbeddingConfig
    num_columns: int
    partitions: tuple[PartitionSlice, ...]
    kernels: tuple[str | None, ...]

    @property
    def sharded(self) -> frozenset[int]:
        """Numbers of the partitions whose weights are sharded."""
        return frozenset(part.partition for part, kernel in zip(self.partitions, self.kernels, strict=True) if kernel)

    @property
    def shape(self) -> tuple[tuple[int, int, str | None], ...]:
        """Number, columns and compute kernel of each partition that takes part."""
        return tuple(
            (part.partition, part.num_columns, kernel)
            for part, kernel in zip(self.partitions, self.kernels, strict=True)
        )


@dataclass(frozen=True)
class Placement:
    """One table and where its parameters go.

    Attributes:
        table: The table.
        unit: Where the table's unit goes, a shard for each range of columns that a rank composes.
        sharded: Where the weights of the sharded partitions go, by partition table's name, and the compute kernel of
            each; all others are replicated.
        divided: Number of the partition that is divided by rows, or None.
        collection: Path of the table's collection within the model; collections communicate one after the other.
    """

    table: CompositionalEmbeddingConfig
    unit: ParameterSharding
    sharded: dict[str, ParameterSharding]
    divided: int | None = None
    collection: str = ""

    @cached_property
    def parts(self) -> list[PartitionTable]:
        """Parameters of the table's partitions."""
        return self.table.partition_tables()

    @property
    def replicated(self) -> list[PartitionTable]:
        """Parameters of the partitions, functions too, whose weights are the same on every rank."""
        return [part for part in self.parts if part.name not in self.sharded]

    @cached_property
    def num_row_blocks(self) -> int:
        """Number of ranks between which rows are divided: all of them, those of a node, or 1 where none are."""
        if self.divided is None:
            return 1
        # every range of columns has as many
        return sum(shard.shard_offsets[1] == 0 for shard in _shards(self.table, self.unit))

    @property
    def rows_per_block(self) -> int:
        """Number of rows of the divided partition on a rank, but for the last ranks, which may have fewer or none."""
        assert self.divided is not None
        is_grid = len(_shards(self.table, self.unit)) > self.num_row_blocks
        return _rows_per_block(self.parts[self.divided].num_rows, self.num_row_blocks, is_grid)

    def slice(self, start: int, stop: int) -> TableSlice:
        """Returns columns ``[start, stop)`` of the output, and the partitions' columns that take part in them."""
        return slice_table(self.table, self.parts, (start, stop), self._kernels)

    @cached_property
    def _kernels(self) -> list[str | None]:
        return [self.sharded[part.name].compute_kernel if part.name in self.sharded else None for part in self.parts]


def width(table: CompositionalEmbeddingConfig) -> int:
    """Returns the number of columns of a table's output: those of all vectors that an id has."""
    return table.num_vectors * table.embedding_dim


def unit_size(table: CompositionalEmbeddingConfig) -> tuple[int, int]:
    """Returns rows and columns of a table's unit of placement: numbers that are looked up, as wide as the output."""
    numbers = sum(part.num_parameters for part in table.lookup_tables())
    return -(-numbers // width(table)), width(table)


def is_pooled(table: CompositionalEmbeddingConfig) -> bool:
    """Returns whether the ids of a bag have one vector together; else, in a sequence, each id has its own."""
    return isinstance(table, CompositionalEmbeddingBagConfig)


def can_be_placed(table: CompositionalEmbeddingConfig, sharding_type: str) -> bool:
    """Returns whether a table can have a sharding type, in as many shards as the planner may make."""
    if sharding_type == ShardingType.DATA_PARALLEL.value:
        return True
    if any(part.dim % 4 for part in table.lookup_tables()):
        return False
    if sharding_type in _BAGS_ONLY and not is_pooled(table):
        return False
    if sharding_type in BY_ROWS and getattr(table, "pooling", None) == "max":
        return False
    if sharding_type in _IN_RANGES:
        return table.combine.columns(table.embedding_dim, len(table.scheme.num_rows)) is not None
    return sharding_type in SHARDING_TYPES


def place_tables(
    tables: Sequence[CompositionalEmbeddingConfig],
    units: Mapping[str, ParameterSharding],
    world_size: int,
    collection: str = "",
) -> list[Placement]:
    """Returns where the parameters of a collection's tables go if the planner places their units so.

    TorchRec's dists of sequences need ranges of one width on all ranks and in all tables; unequal ones are cut to the
    greatest width that divides all.

    Args:
        tables: The tables.
        units: The planner's answer for each table as a whole, by the table's name.
        world_size: Number of ranks.
        collection: Path of the collection within the model.

    Raises:
        UserError: A table cannot be placed so, or the plan was made for others.
    """
    placements = {table.name: place_table(table, units[table.name], world_size, collection) for table in tables}
    divided = {
        name: placement
        for name, placement in placements.items()
        if not is_pooled(placement.table) and placement.unit.sharding_type == ShardingType.COLUMN_WISE.value
    }
    ranges = {name: _shards(placement.table, placement.unit) for name, placement in divided.items()}
    if len({shard.shard_sizes[1] for shards in ranges.values() for shard in shards}) > 1:
        columns = math.gcd(
            *[
                own.num_columns
                for name, placement in divided.items()
                for shard in ranges[name]
                for own in _partition_slices(placement.table, placement.parts, *_columns(shard))
            ]
        )
        placements |= {name: _by_columns(it.table, it.unit, collection, columns) for name, it in divided.items()}
    return list(placements.values())


def place_table(
    table: CompositionalEmbeddingConfig, unit: ParameterSharding, world_size: int, collection: str = ""
) -> Placement:
    """Returns where a table's parameters go if the planner places its unit so, alone in its collection.

    Args:
        table: The table.
        unit: The planner's answer for the table as a whole.
        world_size: Number of ranks.
        collection: Path of the table's collection within the model.

    Raises:
        UserError: Compositional tables cannot be placed so, or the plan was made for another table.
    """
    where = f"table {table.name!r}"
    if unit.sharding_type not in SHARDING_TYPES:
        raise UserError(
            f"{where} is planned {unit.sharding_type}; compositional tables are placed "
            f"{_alternatives(SHARDING_TYPES)}. Constrain the planner: ParameterConstraints(sharding_types=[...])."
        )
    if unit.compute_kernel not in COMPUTE_KERNELS:
        raise UserError(
            f"{where} is planned with compute kernel {unit.compute_kernel}; compositional tables have "
            f"{_alternatives(COMPUTE_KERNELS)}."
        )
    if unit.sharding_type == ShardingType.DATA_PARALLEL.value:
        return Placement(table, unit, {}, collection=collection)
    ranks = [_rank(shard) for shard in _shards(table, unit)]
    needs_all = unit.sharding_type == ShardingType.ROW_WISE.value
    if max(ranks) >= world_size or (needs_all and ranks != list(range(world_size))):
        raise UserError(
            f"{where} is planned {unit.sharding_type} on ranks {ranks}, but there are {world_size} ranks; the plan was "
            "made for another number of them. Plan anew."
        )
    if unit.sharding_type in BY_ROWS:
        return _by_rows(table, unit, _row_blocks(table, unit, world_size), collection)
    return _by_columns(table, unit, collection)


def _row_blocks(
    table: CompositionalEmbeddingConfig, unit: ParameterSharding, world_size: int
) -> list[list[ShardMetadata]]:
    """Returns the blocks of rows of each range of columns; neighbouring ranges on the same ranks are one.

    Raises:
        UserError: The blocks of a range are not on the ranks of one node, in order, or are those of another table.
    """
    by_column: dict[int, list[ShardMetadata]] = {}
    for shard in _shards(table, unit):
        by_column.setdefault(shard.shard_offsets[1], []).append(shard)
    ranks = [[_rank(block) for block in blocks] for blocks in by_column.values()]
    ranks_per_node = len(ranks[0])
    nodes = [list(range(first, first + ranks_per_node)) for first in range(0, world_size, ranks_per_node)]
    if world_size % ranks_per_node or not all(own in nodes for own in ranks):
        raise UserError(
            f"table {table.name!r} is planned {unit.sharding_type} on ranks {ranks}, but each range of columns has its "
            f"rows on all ranks of one node, in order, and there are {world_size} ranks; the plan was made for other "
            "nodes. Plan anew."
        )
    columns_of_blocks = [_own_ranges(table, list(blocks)) for blocks in zip(*by_column.values(), strict=True)]
    return [list(blocks) for blocks in zip(*columns_of_blocks, strict=True)]


def _by_rows(
    table: CompositionalEmbeddingConfig, unit: ParameterSharding, ranges: list[list[ShardMetadata]], collection: str
) -> Placement:
    if isinstance(table, CompositionalEmbeddingBagConfig) and table.pooling == "max":
        raise UserError(
            f"table {table.name!r} has pooling max and is planned {unit.sharding_type}, where each rank has only some "
            f"ids of a bag and their vectors are summed; place it {_alternatives(BY_COLUMNS)} or data_parallel, or "
            "pool with sum or mean."
        )
    parts = table.partition_tables()
    largest = max(table.lookup_tables(), key=lambda part: part.num_parameters)
    shards = []
    for blocks in ranges:
        for own in _partition_slices(table, parts, *_columns(blocks[0])):
            if own.part.name == largest.name:
                _require_multiple_of_four(table, largest.name, own.num_columns)
                shards += _block_shards(own, blocks, is_grid=len(ranges) > 1)
    whole = _with_shards(unit, [block for blocks in ranges for block in blocks])
    sharded = {largest.name: _with_shards(unit, shards)}
    return Placement(table, whole, sharded, [part.name for part in parts].index(largest.name), collection)


def _block_shards(own: PartitionSlice, blocks: Sequence[ShardMetadata], is_grid: bool) -> list[ShardMetadata]:
    """Returns the shards of a partition whose rows are divided; where there are few rows, the last ranks have none."""
    num_rows = own.part.num_rows
    rows_per_block = _rows_per_block(num_rows, len(blocks), is_grid)
    return [
        ShardMetadata([start, own.start], [min(rows_per_block, num_rows - start), own.num_columns], block.placement)
        for start, block in zip(range(0, num_rows, rows_per_block), blocks, strict=False)
    ]


def _rows_per_block(num_rows: int, num_blocks: int, is_grid: bool) -> int:
    """Returns the number of rows in each block but for the last ones, which may have fewer or none.

    TorchRec takes the ranges of a grid to have a block on each rank of their node, or one alone: where the rows are too
    few for all ranks, the first has them.
    """
    rows_per_block = -(-num_rows // num_blocks)
    leaves_ranks_out = rows_per_block * (num_blocks - 1) >= num_rows
    return num_rows if is_grid and leaves_ranks_out else rows_per_block


def _by_columns(
    table: CompositionalEmbeddingConfig, unit: ParameterSharding, collection: str, columns: int | None = None
) -> Placement:
    """Divides a table by columns, in ranges of ``columns``, or as wide as the ranges of each rank can be."""
    shards, parts = _own_ranges(table, _shards(table, unit), columns), table.partition_tables()
    sharded: dict[str, list[ShardMetadata]] = {part.name: [] for part in table.lookup_tables()}
    for shard in shards:
        for own in _partition_slices(table, parts, *_columns(shard)):
            _require_multiple_of_four(table, own.part.name, own.num_columns)
            sharded[own.part.name].append(
                ShardMetadata([0, own.start], [own.part.num_rows, own.num_columns], shard.placement)
            )
    kernels = partition_kernels(table, unit.compute_kernel)
    by_name = {
        name: dataclasses.replace(_with_shards(unit, shards), compute_kernel=kernels[name])
        for name, shards in sharded.items()
    }
    return Placement(table, _with_shards(unit, shards), by_name, collection=collection)


def partition_kernels(table: CompositionalEmbeddingConfig, compute_kernel: str) -> dict[str, str]:
    """Returns the compute kernel of each partition that vectors are looked up in, by partition table's name.

    Of a table that is planned into host memory the largest partition lies there. The others, from the smallest on, stay
    in device memory as long as they take together at most :data:`SMALL_SHARE` of its bytes.

    Args:
        table: The table.
        compute_kernel: What is planned for the table as a whole.
    """
    by_size = sorted(table.lookup_tables(), key=lambda part: part.num_parameters)
    kernels = {part.name: compute_kernel for part in by_size}
    if compute_kernel in IN_HOST_MEMORY:
        small_numbers = SMALL_SHARE * by_size[-1].num_parameters
        for part, together in zip(by_size, accumulate(part.num_parameters for part in by_size), strict=True):
            if together <= small_numbers:
                kernels[part.name] = EmbeddingComputeKernel.FUSED.value
    return kernels


def _own_ranges(
    table: CompositionalEmbeddingConfig, shards: Sequence[ShardMetadata], columns: int | None = None
) -> list[ShardMetadata]:
    """Returns ranges of columns without neighbours on one rank, cut into ``columns`` or as is needed on each rank."""
    merged, parts = _merge_neighbours(shards), table.partition_tables()
    _require_all_columns(table, merged)
    by_rank: dict[int, list[ShardMetadata]] = {}
    for shard in merged:
        by_rank.setdefault(_rank(shard), []).append(shard)
    widths = {rank: columns or _equal_columns(table, parts, own) for rank, own in by_rank.items()}
    return [piece for shard in merged for piece in _cut(shard, widths[_rank(shard)])]


def _equal_columns(
    table: CompositionalEmbeddingConfig, parts: Sequence[PartitionTable], shards: Sequence[ShardMetadata]
) -> int | None:
    """Returns into how wide ranges a rank's have to be cut so that those of each partition are equally wide, or None.

    Partitions begin and end at multiples of it within a range, so that no piece is narrower.
    """
    widths: dict[int, set[int]] = {}
    for shard in shards:
        for own in _partition_slices(table, parts, *_columns(shard)):
            widths.setdefault(own.partition, set()).add(own.num_columns)
    return math.gcd(*set().union(*widths.values())) if any(len(own) > 1 for own in widths.values()) else None


def _cut(shard: ShardMetadata, columns: int | None) -> list[ShardMetadata]:
    """Returns a shard in pieces of this many columns, or whole."""
    if columns is None:
        return [shard]
    row, num_rows = shard.shard_offsets[0], shard.shard_sizes[0]
    return [
        ShardMetadata([row, start], [num_rows, columns], shard.placement) for start in range(*_columns(shard), columns)
    ]


def slice_table(
    table: CompositionalEmbeddingConfig,
    parts: Sequence[PartitionTable],
    columns: tuple[int, int],
    kernels: Sequence[str | None],
) -> TableSlice:
    """Returns columns of a table's output, and the partitions' columns that take part in them.

    Args:
        table: The table.
        parts: Parameters of its partitions.
        columns: The first of the columns, and the one behind the last.
        kernels: Compute kernel of each partition; None where its weights are not sharded.
    """
    start, stop = columns
    partitions = tuple(_partition_slices(table, parts, start, stop))
    return TableSlice(table, stop - start, partitions, tuple(kernels[own.partition] for own in partitions))


def _partition_slices(
    table: CompositionalEmbeddingConfig, parts: Sequence[PartitionTable], start: int, stop: int
) -> list[PartitionSlice]:
    """Returns the partitions' columns that take part in columns ``[start, stop)`` of the output."""
    columns = table.combine.columns(table.embedding_dim, len(parts))
    if columns is None:
        if (start, stop) != (0, width(table)):
            raise UserError(
                f"table {table.name!r}: columns [{start}, {stop}) are planned apart, but each number of a vector that "
                f"{table.combine.name} composes depends on all {parts[0].dim} columns; place the table table_wise, "
                "row_wise or data_parallel, or in one range of columns."
            )
        return [PartitionSlice(part, j, 0, part.dim) for j, part in enumerate(parts) if not part.is_function]
    overlaps = [(max(start, own.start), min(stop, own.stop)) for own in columns]
    return [
        PartitionSlice(parts[j], j, begin - columns[j].start, end - columns[j].start)
        for j, (begin, end) in enumerate(overlaps)
        if begin < end
    ]


def _shards(table: CompositionalEmbeddingConfig, unit: ParameterSharding) -> list[ShardMetadata]:
    if not isinstance(unit.sharding_spec, EnumerableShardingSpec) or not unit.sharding_spec.shards:
        raise UserError(f"table {table.name!r}: the plan says {unit.sharding_type}, but not which rank has which part.")
    return unit.sharding_spec.shards


def _columns(shard: ShardMetadata) -> tuple[int, int]:
    """Returns the first column of a shard, and the one behind its last."""
    start: int = shard.shard_offsets[1]
    return start, start + shard.shard_sizes[1]


def _rank(shard: ShardMetadata) -> int:
    rank = shard.placement.rank() if shard.placement is not None else None
    assert rank is not None
    return rank


def _merge_neighbours(shards: Sequence[ShardMetadata]) -> list[ShardMetadata]:
    merged: list[ShardMetadata] = []
    for shard in sorted(shards, key=lambda shard: shard.shard_offsets[1]):
        if merged and _rank(merged[-1]) == _rank(shard):
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
        ranges = [list(_columns(shard)) for shard in shards]
        raise UserError(
            f"table {table.name!r} has {width(table)} columns, but the plan gives the ranks {ranges}; it was made for "
            "another table. Plan anew."
        )


def _with_shards(unit: ParameterSharding, shards: list[ShardMetadata]) -> ParameterSharding:
    return dataclasses.replace(
        unit, ranks=[_rank(shard) for shard in shards], sharding_spec=EnumerableShardingSpec(shards)
    )


def _require_multiple_of_four(table: CompositionalEmbeddingConfig, name: str, columns: int) -> None:
    if columns % 4:
        raise UserError(
            f"table {table.name!r}: the vectors of partition table {name!r} have {columns} numbers on a rank; FBGEMM "
            "takes multiples of 4. Choose embedding_dim, dims of concat, or min_partition accordingly."
        )


def _alternatives(names: Sequence[str]) -> str:
    """Returns several names as text, such as ``a, b or c``."""
    return ", ".join(names[:-1]) + f" or {names[-1]}"
