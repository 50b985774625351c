"""Where the parameters of a table go, from the planner's answer for the table as a whole.

The planner places one unit a table, ``[rows, columns of the output]``. A rank with a range of these columns has the
columns of every partition that take part in them, so it composes its range alone, and only composed, pooled vectors are
communicated::

    product of two, 16 columns, column-wise        concat of two, 16 columns, column-wise
                 rank 0     rank 1                              rank 0     rank 1
    partition 0  [0, 8)     [8, 16)                partition 0  [0, 8)
    partition 1  [0, 8)     [8, 16)                partition 1             [0, 8)

Row-wise, the partition with most numbers is divided by rows; an id goes to the rank that has its row there. All other
partitions are replicated on all ranks. Data-parallel, every partition is replicated.

Over two levels, the rows are divided between the ranks of one node. A grid has ranges of columns on several nodes::

    4 ranks, 2 a node        table_row_wise on node 1       grid_shard, 16 columns
                             node 0        node 1           node 0             node 1
    largest partition        -             rows, all        rows, [0, 8)       rows, [8, 16)
    other partitions         replicated    replicated       replicated         replicated

Replicated partitions are parameters of the sharded module, whose gradients are averaged over all ranks.

Only the large partitions of a table in host memory lie there (:func:`partition_kernels`): a small partition, which is
read as often, stays in device memory.
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

from distembed.base.errors import UserError
from distembed.embedding.config import CompositionalEmbeddingBagConfig, CompositionalEmbeddingConfig, PartitionTable
from distembed.sharding.table_slice import (
    PartitionSlice,
    TableSlice,
    column_range,
    is_pooled,
    own_ranges,
    partition_slices,
    shard_rank,
    slice_table,
)

BY_COLUMNS = (ShardingType.TABLE_WISE.value, ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value)
WITHIN_NODES = (ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value)
"""Rows are divided between the ranks of a node; for bags only."""
BY_ROWS = (ShardingType.ROW_WISE.value, *WITHIN_NODES)
SHARDING_TYPES = (*BY_COLUMNS, *BY_ROWS, ShardingType.DATA_PARALLEL.value)
_BAGS_ONLY = (ShardingType.TABLE_COLUMN_WISE.value, *WITHIN_NODES)
_IN_RANGES = (ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value, ShardingType.GRID_SHARD.value)
IN_HOST_MEMORY = (EmbeddingComputeKernel.FUSED_UVM_CACHING.value, EmbeddingComputeKernel.FUSED_UVM.value)
COMPUTE_KERNELS = (EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.DENSE.value, *IN_HOST_MEMORY[::-1])
SMALL_SHARE = UVM_CACHING_RATIO
"""Largest ratio of the small partitions' bytes on a device to the largest partition's: TorchRec's size of a cache."""


@dataclass(frozen=True)
class Placement:
    """One table and where its parameters go."""

    table: CompositionalEmbeddingConfig  # the table
    unit: ParameterSharding  # where the table's unit goes, a shard for each range of columns that a rank composes
    # shards and compute kernels of the sharded partitions, by partition table's name; all others are replicated
    sharded: dict[str, ParameterSharding]
    divided: int | None = None  # number of the partition that is divided by rows, or None
    collection: str = ""  # path of the table's collection within the model; collections communicate one after the other
    is_frozen: bool = False  # whether the table's vectors are never updated

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
        """Number of ranks between which rows are divided: all ranks, the ranks of a node, or 1."""
        if self.divided is None:
            return 1
        # every range of columns has the same number of blocks, so the first range's blocks are counted
        return sum(shard.shard_offsets[1] == 0 for shard in _shards(self.table, self.unit))

    @property
    def rows_per_block(self) -> int:
        """Number of rows of the divided partition on each rank; the last ranks may have fewer or none."""
        assert self.divided is not None
        is_grid = len(_shards(self.table, self.unit)) > self.num_row_blocks
        return rows_in_block(self.parts[self.divided].num_rows, self.num_row_blocks, is_grid)

    def slice(self, start: int, stop: int) -> TableSlice:
        """Returns columns ``[start, stop)`` of the output, with the partitions' columns that contribute to them."""
        return slice_table(self.table, (start, stop), self._kernels)

    @cached_property
    def _kernels(self) -> list[str | None]:
        return [self.sharded[part.name].compute_kernel if part.name in self.sharded else None for part in self.parts]


def can_be_placed(table: CompositionalEmbeddingConfig, sharding_type: str) -> bool:
    """Returns whether a table supports a sharding type, for every number of shards that the planner may try."""
    if sharding_type == ShardingType.DATA_PARALLEL.value:
        return True
    if any(part.dim % 4 for part in table.lookup_tables()):
        return False
    if sharding_type in _BAGS_ONLY and not is_pooled(table):
        return False
    if sharding_type in BY_ROWS and getattr(table, "pooling", None) == "max":
        return False
    if sharding_type in WITHIN_NODES and table.all_scored:
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
    """Returns the placement of each table of a collection, from the plan of its unit; refuses as :func:`place_table`.

    TorchRec's dists of sequences need column ranges of one width over all ranks and tables: unequal ranges are cut to
    their greatest common divisor.
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
                part_slice.num_columns
                for name, placement in divided.items()
                for shard in ranges[name]
                for part_slice in partition_slices(placement.table, *column_range(shard))
            ]
        )
        placements |= {
            name: _by_columns(placement.table, placement.unit, collection, columns)
            for name, placement in divided.items()
        }
    return list(placements.values())


def place_table(
    table: CompositionalEmbeddingConfig, unit: ParameterSharding, world_size: int, collection: str = ""
) -> Placement:
    """Returns a table's placement from its unit's plan, regardless of its collection's other tables.

    Raises:
        UserError: The table does not support the planned sharding type, kernel or widths, or the plan was made for
            other ranks or nodes.
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
    if table.dense_gradient and unit.compute_kernel != EmbeddingComputeKernel.DENSE.value:
        if unit.compute_kernel in IN_HOST_MEMORY:
            raise UserError(
                f"{where} is planned with compute kernel {unit.compute_kernel}, and has gradients in all rows, which "
                "only dense tables in device memory have; give the sharders host_memory=False."
            )
        # the planner offers one list of kernels for all tables of a collection, so it may choose a fused one
        unit = dataclasses.replace(unit, compute_kernel=EmbeddingComputeKernel.DENSE.value)
    if unit.sharding_type in WITHIN_NODES and table.all_scored:
        raise UserError(
            f"{where} is planned {unit.sharding_type}, and all of its vectors are scored; place it table_wise, "
            "column_wise, row_wise or data_parallel."
        )
    if unit.sharding_type == ShardingType.DATA_PARALLEL.value:
        return Placement(table, unit, {}, collection=collection)
    ranks = [shard_rank(shard) for shard in _shards(table, unit)]
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
    """Returns, for each range of columns, its block of rows on each rank; ranges are merged and cut (`own_ranges`).

    Raises a UserError unless each range has one block on every rank of one node, in order of ranks.
    """
    by_column: dict[int, list[ShardMetadata]] = {}
    for shard in _shards(table, unit):
        by_column.setdefault(shard.shard_offsets[1], []).append(shard)
    ranks = [[shard_rank(block) for block in blocks] for blocks in by_column.values()]
    ranks_per_node = len(ranks[0])
    nodes = [list(range(first, first + ranks_per_node)) for first in range(0, world_size, ranks_per_node)]
    if world_size % ranks_per_node or not all(range_ranks in nodes for range_ranks in ranks):
        raise UserError(
            f"table {table.name!r} is planned {unit.sharding_type} on ranks {ranks}, but each range of columns has its "
            f"rows on all ranks of one node, in order, and there are {world_size} ranks; the plan was made for other "
            "nodes. Plan anew."
        )
    # by range [[r0b0, r0b1], [r1b0, r1b1]] -> by block, merged -> by range again
    columns_of_blocks = [own_ranges(table, list(blocks)) for blocks in zip(*by_column.values(), strict=True)]
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
    largest = max(table.lookup_tables(), key=lambda part: part.num_parameters)
    shards = []
    for blocks in ranges:
        for part_slice in partition_slices(table, *column_range(blocks[0])):
            if part_slice.part.name == largest.name:
                _require_multiple_of_four(table, largest.name, part_slice.num_columns)
                shards += _block_shards(part_slice, blocks, is_grid=len(ranges) > 1)
    unit_blocks = _with_shards(unit, [block for blocks in ranges for block in blocks])
    sharded = {largest.name: _with_shards(unit, shards)}
    return Placement(table, unit_blocks, sharded, largest.number, collection)


def _block_shards(part_slice: PartitionSlice, blocks: Sequence[ShardMetadata], is_grid: bool) -> list[ShardMetadata]:
    """Returns the shards of the divided partition, one for each rank with rows; the last ranks may have none."""
    num_rows = part_slice.part.num_rows
    rows_per_block = rows_in_block(num_rows, len(blocks), is_grid)
    return [
        ShardMetadata(
            [start, part_slice.start], [min(rows_per_block, num_rows - start), part_slice.num_columns], block.placement
        )
        for start, block in zip(range(0, num_rows, rows_per_block), blocks, strict=False)
    ]


def rows_in_block(num_rows: int, num_blocks: int, is_grid: bool) -> int:
    """Returns the number of rows in each block; the last blocks may have fewer rows or none.

    TorchRec's grids need rows on every rank of a node, or on one rank alone: if the last rank would have none, the
    first rank gets all rows.
    """
    rows_per_block = -(-num_rows // num_blocks)
    leaves_ranks_out = rows_per_block * (num_blocks - 1) >= num_rows
    return num_rows if is_grid and leaves_ranks_out else rows_per_block


def _by_columns(
    table: CompositionalEmbeddingConfig, unit: ParameterSharding, collection: str, columns: int | None = None
) -> Placement:
    """Divides a table by columns, in ranges of ``columns``, or in the widest that :func:`own_ranges` allows."""
    shards = own_ranges(table, _shards(table, unit), columns)
    sharded: dict[str, list[ShardMetadata]] = {part.name: [] for part in table.lookup_tables()}
    for shard in shards:
        for part_slice in partition_slices(table, *column_range(shard)):
            _require_multiple_of_four(table, part_slice.part.name, part_slice.num_columns)
            sizes = [part_slice.part.num_rows, part_slice.num_columns]
            sharded[part_slice.part.name].append(ShardMetadata([0, part_slice.start], sizes, shard.placement))
    kernels = partition_kernels(table, unit.compute_kernel)
    by_name = {
        name: dataclasses.replace(_with_shards(unit, shards), compute_kernel=kernels[name])
        for name, shards in sharded.items()
    }
    return Placement(table, _with_shards(unit, shards), by_name, collection=collection)


def partition_kernels(table: CompositionalEmbeddingConfig, compute_kernel: str) -> dict[str, str]:
    """Returns the compute kernel of each partition that holds vectors, by partition table's name.

    All get ``compute_kernel``, except that host memory is for large partitions only: from the smallest on, partitions
    stay in device memory while their total is at most :data:`SMALL_SHARE` of the largest one's bytes.
    """
    by_size = sorted(table.lookup_tables(), key=lambda part: part.num_parameters)
    kernels = {part.name: compute_kernel for part in by_size}
    if compute_kernel in IN_HOST_MEMORY:
        small_numbers = SMALL_SHARE * by_size[-1].num_parameters
        for part, total in zip(by_size, accumulate(part.num_parameters for part in by_size), strict=True):
            if total <= small_numbers:
                kernels[part.name] = EmbeddingComputeKernel.FUSED.value
    return kernels


def _shards(table: CompositionalEmbeddingConfig, unit: ParameterSharding) -> list[ShardMetadata]:
    if not isinstance(unit.sharding_spec, EnumerableShardingSpec) or not unit.sharding_spec.shards:
        raise UserError(f"table {table.name!r}: the plan says {unit.sharding_type}, but not which rank has which part.")
    return unit.sharding_spec.shards


def _with_shards(unit: ParameterSharding, shards: list[ShardMetadata]) -> ParameterSharding:
    return dataclasses.replace(
        unit, ranks=[shard_rank(shard) for shard in shards], sharding_spec=EnumerableShardingSpec(shards)
    )


def without_memory(plan: Mapping[str, ParameterSharding]) -> dict[str, ParameterSharding]:
    """Returns a plan with all shards on the meta device of their ranks, for a module whose weights take no memory."""
    units = {}
    for name, unit in plan.items():
        units[name] = unit
        if isinstance(unit.sharding_spec, EnumerableShardingSpec):
            shards = [
                ShardMetadata(shard.shard_offsets, shard.shard_sizes, f"rank:{shard_rank(shard)}/meta")
                for shard in unit.sharding_spec.shards
            ]
            units[name] = dataclasses.replace(unit, sharding_spec=EnumerableShardingSpec(shards))
    return units


def _require_multiple_of_four(table: CompositionalEmbeddingConfig, name: str, columns: int) -> None:
    if columns % 4:
        raise UserError(
            f"table {table.name!r}: the vectors of partition table {name!r} have {columns} numbers on a rank; FBGEMM "
            "takes multiples of 4. Choose embedding_dim, dims of concat, rank of tensor_train, or min_partition "
            "accordingly."
        )


def _alternatives(names: Sequence[str]) -> str:
    """Returns several names as text: ``a, b or c``."""
    return ", ".join(names[:-1]) + f" or {names[-1]}"
