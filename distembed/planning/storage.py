"""Storage of tables on each rank under a plan: weights and optimizer states, exact to the byte.

The bytes follow from where the parameters go (:mod:`distembed.sharding.placement`) and from each one's optimizer:

================================ ==========================================================
sharded partitions               the sparse optimizer, fused by FBGEMM; torch's form of it where the kernel is ``dense``
replicated partitions            torch's form of the sparse optimizer
functions of path-based tables   the dense optimizer
tables with gradients in all     the dense optimizer
rows (``dense_gradient``)
================================ ==========================================================

A rank with a part of an ``explicit`` table also stores the rows of all ids, which count as weights.

Partitions of the kernels ``fused_uvm`` and ``fused_uvm_caching`` lie in host memory. The device keeps the optimizer's
numbers per row, and the cache with FBGEMM's notes on it.
"""

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import cache, cached_property
from operator import add

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.constants import UVM_CACHING_RATIO

from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.optim.declared import TableOptimizers
from distembed.optim.kinds import OPTIMIZERS
from distembed.optim.table_storage import (
    TableStorage,
    parameter_storage,
    replicated_storage,
    total_storage,
)
from distembed.sharding.placement import IN_HOST_MEMORY, Placement, rows_in_block
from distembed.sharding.table_slice import TableSlice

DEFAULT_CACHE_RATIO = UVM_CACHING_RATIO
"""Slots of a cache per row of its table unless set: the default of TorchRec and FBGEMM."""
CACHED = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
_Part = tuple[str, tuple[tuple[int, int], ...]]
"""Compute kernel of a partition, and (rows, columns) of each of the partition's shards on one rank."""


def storage_by_rank(
    placement: Placement, world_size: int, optimizers: TableOptimizers, cache_ratio: float = DEFAULT_CACHE_RATIO
) -> dict[int, TableStorage]:
    """Returns a table's storage by rank, for each rank with a part of it; ranks with equal parts share one value."""
    table, replicated = placement.table, replicated_storage(placement.table, placement.replicated, optimizers)
    parts_by_rank: dict[int, list[_Part]] = {}
    for sharding in placement.sharded.values():
        shards: dict[int, list[tuple[int, int]]] = {}
        for shard in sharding.sharding_spec.shards:
            if all(shard.shard_sizes):  # a rank beyond the last rows has an empty shard
                shards.setdefault(shard.placement.rank(), []).append(tuple(shard.shard_sizes))
        for rank, sizes in shards.items():
            parts_by_rank.setdefault(rank, []).append((sharding.compute_kernel, tuple(sizes)))

    @cache
    def stored(rank_parts: tuple[_Part, ...]) -> TableStorage:
        shards = [_sharded_storage(table, part, optimizers, cache_ratio) for part in rank_parts]
        return total_storage([replicated, *shards, TableStorage(weights=table.scheme.assignment_bytes)])

    ranks = range(world_size) if placement.replicated else parts_by_rank
    return {rank: stored(tuple(parts_by_rank.get(rank, ()))) for rank in ranks}


def slice_storage(
    table_slice: TableSlice, num_row_blocks: int, optimizers: TableOptimizers, cache_ratio: float, is_grid: bool = False
) -> TableStorage:
    """Returns the storage of a rank's columns of a table, without replicated partitions.

    Rows of sharded partitions are divided over ``num_row_blocks`` ranks; the result is the first rank's, with most.
    """
    parts = [
        (part.kernel, ((rows_in_block(part.part.num_rows, num_row_blocks, is_grid), part.num_columns),))
        for part in table_slice.partitions
        if part.kernel is not None
    ]
    shards = [_sharded_storage(table_slice.table, part, optimizers, cache_ratio) for part in parts]
    return total_storage([*shards, TableStorage(weights=table_slice.table.scheme.assignment_bytes)])


def _sharded_storage(
    table: CompositionalEmbeddingConfig, part: _Part, optimizers: TableOptimizers, cache_ratio: float
) -> TableStorage:
    """Returns a partition's storage on one rank; with a kernel in host memory, states per row stay on the device."""
    kernel, shards = part
    optimizer = optimizers.for_table(table).sparse
    storage = parameter_storage(shards, table.bytes_per_number, optimizer, kernel != EmbeddingComputeKernel.DENSE.value)
    if kernel not in IN_HOST_MEMORY:
        return storage
    num_rows = sum(rows for rows, _ in shards)
    row_states = num_rows * OPTIMIZERS[optimizer].row_state_bytes
    # an int32 a row, and two int64 a slot
    cache = cache_ratio * storage.weights + num_rows * (4 + 16 * cache_ratio) if kernel == CACHED else 0
    return TableStorage(
        optimizer_state=row_states,
        cache=round(cache),
        host_weights=storage.weights,
        host_optimizer_state=storage.optimizer_state - row_states,
    )


@dataclass(frozen=True)
class SentBytes:
    """Bytes that a rank sends to other ranks in a step."""

    ids: int = 0  # with the number of ids in each row of the batch
    vectors: int = 0  # composed vectors, to the ranks whose batches need them
    gradients: int = 0  # of the vectors, back to the ranks that looked them up
    all_reduce: int = 0  # gradients of weights that every rank has, around a ring

    @property
    def total(self) -> int:
        return sum(astuple(self))

    def __add__(self, other: "SentBytes") -> "SentBytes":
        return SentBytes(*map(add, vars(self).values(), vars(other).values()))


@dataclass(frozen=True)
class StepTime:
    """Estimated time of a step on one rank, in milliseconds."""

    lookup: float = 0.0  # looking tables up, their gradients and their update
    exchange: float = 0.0  # exchanging ids, vectors and their gradients
    networks: float = 0.0  # forward and backward passes of the networks
    all_reduce: float = 0.0  # averaging the gradients of weights that every rank has
    starts: float = 0.0  # starting kernels and exchanges
    waiting: float = 0.0  # waiting for cores that other ranks of the node use

    @property
    def total(self) -> float:
        """Sum of all times: nothing overlaps."""
        return sum(astuple(self))


@dataclass(frozen=True)
class PlannedRank:
    """One rank at the fullest moment of a step."""

    rank: int
    tables: Mapping[str, TableStorage]  # of all tables with a part on the rank, by name
    memory: Mapping[str, int]  # bytes on the device by item; on a CPU, bytes of the machine's memory
    moment: str  # name of the fullest moment
    sent: SentBytes
    times: StepTime = StepTime()
    capacity_bytes: int = 0
    host_capacity_bytes: int = 0  # of the node's host memory, for this rank's tables besides its managed ids

    @cached_property
    def storage(self) -> TableStorage:
        return total_storage(self.tables.values())

    @cached_property
    def total_bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def excess_bytes(self) -> tuple[int, int]:
        """Bytes that the device and the host lack; negative where there is room."""
        return self.total_bytes - self.capacity_bytes, self.storage.host - self.host_capacity_bytes

    @property
    def fits(self) -> bool:
        return max(self.excess_bytes) <= 0
