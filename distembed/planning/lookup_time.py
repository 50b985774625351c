"""How long a rank looks a table up, composes, and updates what it looked up: bytes over bandwidths.

Of each partition a lookup reads n rows of d numbers and writes m sums, and the backward pass reads n gradients, sorts
the n rows, and reads and writes each of the rows that occur with its states. Weights that are the same on every rank
are looked up by torch, whose gradients are those of all rows, and so is the update. Rows of fewer than 128 numbers are
read more slowly on GPUs, as TorchRec's planner has it. What composing moves is said by the group
(:mod:`distembed.sharding.groups`).
"""

from dataclasses import dataclass

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.constants import FULL_BLOCK_EMB_DIM, HALF_BLOCK_PENALTY, QUARTER_BLOCK_PENALTY

from distembed.optim.declared import TableOptimizers
from distembed.optim.kinds import OPTIMIZERS
from distembed.planning.devices import Device
from distembed.planning.storage import CACHED
from distembed.sharding.groups import Group, TableLoad, group_type
from distembed.sharding.groups.load import FLOAT_BYTES, LONG_BYTES, expected_distinct
from distembed.sharding.placement import IN_HOST_MEMORY
from distembed.sharding.table_slice import PartitionSlice

_MS = 1e3
_SORT_BYTES = 64
"""Bytes that FBGEMM's backward pass reads and writes for each id, to sort them by row."""
_REPEATED = 0.15
"""Share of a row's seconds that each lookup of it takes; the row itself takes the seconds once, as it is updated."""
_ONE_PASS_ROWS = 0.25
"""Share of FBGEMM's seconds of a row that a partition's row takes in one pass."""
_DENSE_COPIES = 3
"""Numbers read or written for each weight that torch trains: its gradient is zeroed, and copied into a bucket."""
_REPLICATED_LAUNCHES = 11
"""Further operations of a partition that torch looks up in the place of FBGEMM: stacking, sums and their gradients."""
_FUNCTION_LAUNCHES = 60
"""Operations of the functions of one partition of a path."""


class LookupTimes:
    """Times of lookups on one device.

    Args:
        device: Device of the rank.
        optimizers: Optimizers of the tables.
        bf16: Whether the functions of paths compute in bf16.
        cache_ratio: Cached rows of a table in host memory, as a share of its rows.
    """

    def __init__(self, device: Device, optimizers: TableOptimizers, bf16: bool, cache_ratio: float) -> None:
        self._device, self._optimizers, self._cache_ratio = device, optimizers, cache_ratio
        self._flops = device.reached_flops(bf16)

    def milliseconds(self, load: TableLoad, num_shards: int) -> float:
        """Returns the milliseconds of a table's lookups on a rank, forward and backward, and of their update.

        Args:
            load: What the rank looks up.
            num_shards: Over how many ranks the rows of the sharded partition are divided.
        """
        table_optimizers = self._optimizers.for_table(load.slice.table)
        own, work = load.slice, self._group_type(load).work(load)
        seconds = work.moved_bytes / self._device.memory_bandwidth + work.operations / self._flops
        for part, kernel, (num_ids, num_bags) in zip(own.partitions, own.kernels, work.lookups, strict=True):
            is_sharded = kernel is not None
            rows = _Rows(part, own.table.bytes_per_number, num_ids, num_bags, num_shards if is_sharded else 1)
            if kernel is not None and kernel != EmbeddingComputeKernel.DENSE.value:
                lookup_seconds = self._one_pass_seconds if work.in_one_pass else self._fused_seconds
                seconds += lookup_seconds(rows, kernel)
                continue
            seconds += self._replicated_seconds(rows) if work.in_one_pass else self._dense_seconds(rows)
            seconds += self._update_seconds(rows.num_numbers, table_optimizers.sparse) if is_sharded else 0.0
        return _MS * seconds

    def group_launches(self, load: TableLoad) -> int:
        """Returns how many operations a rank starts for a group that has a table, whatever number of tables it has."""
        kind, table = self._group_type(load), load.slice.table
        launches, work = kind.launches(load), kind.work(load)
        replicated = sum(part.partition not in load.slice.sharded for part in load.slice.partitions)
        functions = len(table.function_tables())
        return (
            launches.group
            + launches.partition * len(load.slice.partitions)
            + _REPLICATED_LAUNCHES * (0 if work.in_one_pass else replicated)
            + _FUNCTION_LAUNCHES * functions
        )

    def _group_type(self, load: TableLoad) -> type[Group]:
        optimizer = self._optimizers.for_table(load.slice.table).sparse
        return group_type(load.slice, self._device.kind, optimizer)

    def replicated_update_ms(self, num_vector_numbers: int, num_function_numbers: int) -> float:
        """Returns the milliseconds in which torch updates replicated weights, of vectors and of functions."""
        return _MS * (
            self._update_seconds(num_vector_numbers, self._optimizers.sparse)
            + self._update_seconds(num_function_numbers, self._optimizers.dense)
        )

    def _fused_seconds(self, rows: "_Rows", compute_kernel: str) -> float:
        """Returns the seconds of FBGEMM's lookup, which updates the rows that occur within its backward pass."""
        device, updated = self._device, self._updated_bytes(rows)
        beside = rows.num_ids * (LONG_BYTES + _SORT_BYTES) + (rows.num_bags + rows.num_ids) * rows.dim * FLOAT_BYTES
        read = rows.num_ids * rows.row_bytes
        return (
            self._row_seconds(rows)
            + (read + updated + beside) / self._bandwidth(rows.dim)
            + self._missed(compute_kernel) * (read + updated) / device.host_bandwidth
        )

    def _bandwidth(self, num_columns: int) -> float:
        """Returns the bytes a second at which rows are read and written: narrow ones leave threads of a GPU idle."""
        slower = 1.0
        if self._device.kind == "cuda" and num_columns < FULL_BLOCK_EMB_DIM:
            slower = HALF_BLOCK_PENALTY if 2 * num_columns >= FULL_BLOCK_EMB_DIM else QUARTER_BLOCK_PENALTY
        return self._device.lookup_bandwidth / slower

    def _row_seconds(self, rows: "_Rows") -> float:
        """Returns the seconds of rows beside their bytes: of each that occurs, and of each time that it does."""
        return (rows.num_distinct + _REPEATED * rows.num_ids) * self._device.row_seconds

    def _updated_bytes(self, rows: "_Rows") -> float:
        """Returns the bytes of rows that occur, and of their states, read and written."""
        state_bytes = OPTIMIZERS[self._optimizers.sparse].fused_state_bytes(1, rows.dim)
        return 2 * rows.num_distinct * (rows.row_bytes + state_bytes)

    def _missed(self, compute_kernel: str) -> float:
        """Returns the share of rows that are read from the host's memory, and written to it."""
        return {CACHED: 1 - self._cache_ratio}.get(compute_kernel, float(compute_kernel in IN_HOST_MEMORY))

    def _one_pass_seconds(self, rows: "_Rows", compute_kernel: str) -> float:
        """Returns the seconds of a partition in a lookup in one pass, and of the update of its rows."""
        device, updated = self._device, self._updated_bytes(rows)
        # forward and backward an id and its row are read, and backward its gradient is added to a sum
        read = 2 * rows.num_ids * rows.row_bytes
        beside = 2 * rows.num_ids * (LONG_BYTES + rows.dim * FLOAT_BYTES)
        vectors = 2 * rows.num_bags * rows.dim * FLOAT_BYTES
        sorts = rows.num_ids * _SORT_BYTES if device.kind == "cuda" else 0
        return (
            _ONE_PASS_ROWS * self._row_seconds(rows)
            + (read + updated + beside + vectors + sorts) / self._bandwidth(rows.dim)
            + self._missed(compute_kernel) * (read + updated) / device.host_bandwidth
        )

    def _replicated_seconds(self, rows: "_Rows") -> float:
        """Returns the seconds in one pass of a partition that every rank has, and of a gradient of all rows."""
        copied = _DENSE_COPIES * rows.num_numbers * FLOAT_BYTES
        seconds = self._one_pass_seconds(rows, EmbeddingComputeKernel.FUSED.value)
        return seconds + copied / self._device.memory_bandwidth

    def _dense_seconds(self, rows: "_Rows") -> float:
        """Returns the seconds of torch's lookup, and of a gradient of all rows."""
        device = self._device
        looked_up = rows.num_ids * (2 * LONG_BYTES + _SORT_BYTES + 3 * rows.dim * FLOAT_BYTES)
        sums = 2 * rows.num_bags * rows.dim * FLOAT_BYTES
        copied = _DENSE_COPIES * rows.num_numbers * FLOAT_BYTES
        return self._row_seconds(rows) + (looked_up + sums) / device.lookup_bandwidth + copied / device.memory_bandwidth

    def _update_seconds(self, num_numbers: float, optimizer: str) -> float:
        """Returns the seconds of torch's optimizer: it reads gradients, and reads and writes weights and states."""
        states = OPTIMIZERS[optimizer].fused_state_bytes(0, 1) if num_numbers else 0
        return num_numbers * (3 * FLOAT_BYTES + 2 * states) / self._device.memory_bandwidth


@dataclass(frozen=True)
class _Rows:
    """A partition's rows on a rank, and what is looked up of them.

    Attributes:
        part: Columns of the partition that the rank has.
        itemsize: Bytes of a number of the weights.
        num_ids: How many rows are looked up.
        num_bags: In how many sums.
        num_shards: Over how many ranks the rows are divided.
    """

    part: PartitionSlice
    itemsize: int
    num_ids: float
    num_bags: float
    num_shards: int

    @property
    def dim(self) -> int:
        """Numbers of a row."""
        return self.part.num_columns

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's weights."""
        return self.dim * self.itemsize

    @property
    def num_rows(self) -> int:
        """Number of rows on the rank."""
        return -(-self.part.part.num_rows // self.num_shards)

    @property
    def num_numbers(self) -> int:
        """Number of weights on the rank."""
        return self.num_rows * self.dim

    @property
    def num_distinct(self) -> float:
        """How many different rows are looked up, were they uniform."""
        return expected_distinct(self.num_rows, self.num_ids)
