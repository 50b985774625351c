"""How long a rank looks a table up, composes, and updates what it looked up: bytes over bandwidths.

Of each partition a lookup reads n rows of d numbers and writes m sums, and the backward pass reads n gradients, sorts
the n rows, and reads and writes each of the rows that occur with its states. Weights that are the same on every rank
are looked up by torch, whose gradients are those of all rows, and so is the update. Rows of fewer than 128 numbers are
read more slowly on GPUs, as TorchRec's planner has it. What composing moves is said by the group
(:mod:`distembed.sharding.groups`).
"""

from collections.abc import Sequence
from typing import NamedTuple

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.constants import FULL_BLOCK_EMB_DIM, HALF_BLOCK_PENALTY, QUARTER_BLOCK_PENALTY

from distembed.embedding.config import PartitionTable
from distembed.optim.declared import TableOptimizers
from distembed.optim.kinds import OPTIMIZERS
from distembed.planning.devices import Device
from distembed.planning.storage import CACHED
from distembed.sharding.groups import TableLoad, group_type
from distembed.sharding.groups.load import FLOAT_BYTES, LONG_BYTES, expected_distinct
from distembed.sharding.placement import IN_HOST_MEMORY

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
_UPDATE_LAUNCHES = 10
"""Operations of a replicated weight: adding its gradient to the buffer of all, and torch's row-wise Adagrad."""


class _Rows(NamedTuple):
    """A partition's rows on a rank, and what is looked up of them."""

    num_rows: int  # on the rank
    dim: int  # numbers of a row
    row_bytes: int
    num_ids: float  # how many rows are looked up
    num_bags: float  # in how many sums

    @property
    def num_numbers(self) -> int:
        return self.num_rows * self.dim

    @property
    def num_distinct(self) -> float:
        """How many different rows are looked up, were they uniform."""
        return expected_distinct(self.num_rows, self.num_ids)


class LookupTimes:
    """Times of lookups on one device; with ``bf16`` the functions of paths compute in bf16."""

    def __init__(self, device: Device, optimizers: TableOptimizers, bf16: bool, cache_ratio: float) -> None:
        self._device, self._optimizers, self._cache_ratio = device, optimizers, cache_ratio
        self._flops = device.reached_flops(bf16)

    def lookup(self, load: TableLoad, num_shards: int) -> tuple[float, int]:
        """Returns the milliseconds of a table's lookups on a rank, and how many operations its group starts.

        The milliseconds are those of both passes and of the update, where the rows of the sharded partition are divided
        over so many ranks. The operations are as many however many tables the group has.
        """
        own, table, optimizer = load.slice, load.slice.table, self._optimizers.for_table(load.slice.table).sparse
        kind = group_type(own, self._device.kind, optimizer)
        work, started = kind.work(load), kind.launches(load)
        seconds = work.moved_bytes / self._device.memory_bandwidth + work.operations / self._flops
        launches = started.group + _FUNCTION_LAUNCHES * len(table.function_tables())
        for part, lookups in zip(own.partitions, work.lookups, strict=True):
            kernel = part.kernel
            num_rows = -(-part.part.num_rows // (num_shards if kernel else 1))
            rows = _Rows(num_rows, part.num_columns, part.num_columns * table.bytes_per_number, *lookups)
            launches += started.partition
            if kernel and kernel != EmbeddingComputeKernel.DENSE.value:
                seconds += self._fbgemm_seconds(rows, kernel, work.in_one_pass)
                continue
            seconds += self._torch_seconds(rows, work.in_one_pass)
            if kernel:
                seconds += self._update_seconds(rows.num_numbers, optimizer)
            elif not work.in_one_pass:
                launches += _REPLICATED_LAUNCHES
        return _MS * seconds, launches

    def replicated_update_ms(self, parts: Sequence[PartitionTable]) -> float:
        """Returns the milliseconds in which torch updates partitions and functions that are on every rank."""
        vectors, functions = (
            sum(part.num_parameters for part in parts if part.is_function == is_function)
            for is_function in (False, True)
        )
        return _MS * (_UPDATE_LAUNCHES * len(parts)) * self._device.launch_seconds + _MS * (
            self._update_seconds(vectors, self._optimizers.sparse)
            + self._update_seconds(functions, self._optimizers.dense)
        )

    def _fbgemm_seconds(self, rows: _Rows, compute_kernel: str, in_one_pass: bool) -> float:
        """Returns the seconds of a lookup by FBGEMM or in one pass, whose backward pass updates the rows that occur."""
        device, slower = self._device, 1.0
        if device.kind == "cuda" and rows.dim < FULL_BLOCK_EMB_DIM:  # narrow rows leave threads of a GPU idle
            slower = HALF_BLOCK_PENALTY if 2 * rows.dim >= FULL_BLOCK_EMB_DIM else QUARTER_BLOCK_PENALTY
        state_bytes = OPTIMIZERS[self._optimizers.sparse].fused_state_bytes(1, rows.dim)
        updated = 2 * rows.num_distinct * (rows.row_bytes + state_bytes)
        if in_one_pass:
            # forward and backward an id and its row are read, and backward its gradient is added to a sum
            share, read = _ONE_PASS_ROWS, 2 * rows.num_ids * rows.row_bytes
            moved = read + updated + 2 * rows.num_ids * (LONG_BYTES + rows.dim * FLOAT_BYTES)
            moved += 2 * rows.num_bags * rows.dim * FLOAT_BYTES
            moved += rows.num_ids * _SORT_BYTES if device.kind == "cuda" else 0
        else:
            share, read = 1.0, rows.num_ids * rows.row_bytes
            vectors = (rows.num_bags + rows.num_ids) * rows.dim * FLOAT_BYTES
            moved = read + updated + (rows.num_ids * (LONG_BYTES + _SORT_BYTES) + vectors)
        # share of the rows that are read from the host's memory, and written to it
        missed = 1 - self._cache_ratio if compute_kernel == CACHED else float(compute_kernel in IN_HOST_MEMORY)
        return (
            share * self._row_seconds(rows)
            + moved / (device.lookup_bandwidth / slower)
            + missed * (read + updated) / device.host_bandwidth
        )

    def _torch_seconds(self, rows: _Rows, in_one_pass: bool) -> float:
        """Returns the seconds of torch's lookup, or of one in one pass, and of a gradient of all rows."""
        if in_one_pass:
            seconds = self._fbgemm_seconds(rows, EmbeddingComputeKernel.FUSED.value, in_one_pass)
        else:
            looked_up = rows.num_ids * (2 * LONG_BYTES + _SORT_BYTES + 3 * rows.dim * FLOAT_BYTES)
            sums = 2 * rows.num_bags * rows.dim * FLOAT_BYTES
            seconds = self._row_seconds(rows) + (looked_up + sums) / self._device.lookup_bandwidth
        return seconds + _DENSE_COPIES * rows.num_numbers * FLOAT_BYTES / self._device.memory_bandwidth

    def _row_seconds(self, rows: _Rows) -> float:
        """Returns the seconds of rows beside their bytes: of each that occurs, and of each time that it does."""
        return (rows.num_distinct + _REPEATED * rows.num_ids) * self._device.row_seconds

    def _update_seconds(self, num_numbers: float, optimizer: str) -> float:
        """Returns the seconds of torch's optimizer: it reads gradients, and reads and writes weights and states."""
        states = OPTIMIZERS[optimizer].fused_state_bytes(0, 1) if num_numbers else 0
        return num_numbers * (3 * FLOAT_BYTES + 2 * states) / self._device.memory_bandwidth
