"""Time of one table on a rank in a step: sending its ids and vectors, and looking it up.

**Sending.** Bytes within a node and between nodes have separate bandwidths; their times are added. B is the rows of a
step on all ranks, b on one; W ranks lie on N nodes of L::

    by columns      each rank sends its ids to the owner of the columns, who sends their vectors back
    row_wise        each rank sends every other its share of the ids, and gets back partial sums of its b rows
    two levels      each rank sends its ids to the L ranks of a node that have their rows; these reduce their sums of
                    all B rows among them, B / L for each, and send them to the other nodes
    data_parallel   only gradients of the weights, which are averaged

A GPU sends while it receives: a phase takes the longer of the two. A CPU's ranks copy all messages with their own
cores: a phase takes half of both, since the bandwidth is measured on ranks that send as much as they receive.

Gradients take the reverse way. A ring averages P bytes of gradients within nodes, then between them: each rank sends
``2 P (L - 1) / L`` and ``2 P (N - 1) / (N L)``.

**Looking up** is bytes over bandwidths. Of each partition a lookup reads n rows of d numbers and writes m sums. The
backward pass reads n gradients, sorts the n rows, and reads and writes each distinct row with its optimizer states.
Replicated weights are looked up by torch, whose gradients and updates cover all rows. GPUs read rows of fewer than 128
numbers more slowly, by the factors of TorchRec's planner. :mod:`distembed.sharding.groups` counts the bytes of
composing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.constants import FULL_BLOCK_EMB_DIM, HALF_BLOCK_PENALTY, QUARTER_BLOCK_PENALTY
from torchrec.distributed.types import ParameterSharding, ShardingType

from distembed.embedding.config import CompositionalEmbeddingConfig, PartitionTable
from distembed.embedding.settings import VectorExchange
from distembed.kernels.triton_tables import ids_of_slice
from distembed.optim.declared import TableOptimizers
from distembed.optim.kinds import OPTIMIZERS
from distembed.planning.devices import Cluster, Device
from distembed.planning.request import Workload
from distembed.planning.storage import CACHED
from distembed.sharding.groups import TableLoad, group_type
from distembed.sharding.groups.load import FLOAT_BYTES, LONG_BYTES, expected_distinct
from distembed.sharding.placement import IN_HOST_MEMORY, WITHIN_NODES, Placement
from distembed.sharding.table_slice import is_pooled

_MS = 1e3
LENGTH_BYTES = 4

ExchangeKey = tuple[str, str]
"""Collection path and sharding type: tables with equal keys are sent together."""
Phase = tuple[ExchangeKey, str]
"""An exchange and its part: ``ids``, ``sums`` within a node, or ``vectors``, with their gradients.

On CPUs, a rank's work for other ranks' shards adds to its work for its own shards. It therefore has phases of its own:
``ids of others`` and ``vectors of others``.
"""


def exchange_key(placement: Placement) -> ExchangeKey:
    """Returns the collection path and sharding type of a placed table; tables with equal keys are sent together."""
    return placement.collection, placement.unit.sharding_type


def is_on_every_rank(sharding_type: str) -> bool:
    """Returns whether every rank holds an equal part of a table of this type: all of it, or a block of its rows."""
    return sharding_type in (ShardingType.DATA_PARALLEL.value, ShardingType.ROW_WISE.value)


def is_exchanged(sharding_type: str, world_size: int) -> bool:
    """Returns whether ids and vectors of tables of a sharding type are sent to other ranks."""
    return world_size > 1 and sharding_type != ShardingType.DATA_PARALLEL.value


def column_shards(unit: ParameterSharding) -> list[tuple[int, int, int]]:
    """Returns first column, last column + 1, and rank of each shard of a table; row blocks repeat their columns."""
    spec: Any = unit.sharding_spec
    return [
        (shard.shard_offsets[1], shard.shard_offsets[1] + shard.shard_sizes[1], shard.placement.rank())
        for shard in spec.shards
    ]


class Transfer(NamedTuple):
    """Milliseconds of communication for one shard in one phase.

    A rank's phase takes the longer of its work for its own shards and its work for shards of other ranks::

        max(sum of own shards' owner_ms, sum of all shards' other_ms - sum of own shards' other_ms)
    """

    owner_ms: float  # milliseconds of the rank that has the shard, to or from all others
    other_ms: float = 0.0  # milliseconds of each other rank, to or from the owner; the mean over possible owners


@dataclass(frozen=True)
class TableTraffic:
    """Ids and vectors of one table in a rank's batch."""

    num_ids: float
    num_bags: int
    itemsize: int  # bytes of an id
    is_pooled: bool  # whether a bag has one vector; in sequences each id has one
    exchange: VectorExchange  # precision in which vectors and gradients are sent

    @classmethod
    def of(
        cls,
        table: CompositionalEmbeddingConfig,
        workload: Workload,
        world_size: int,
        itemsize: int,
        exchange: VectorExchange,
    ) -> "TableTraffic":
        """Returns a table's traffic in the batch of each of ``world_size`` ranks."""
        num_rows, features = workload.rows_of_rank(world_size), table.feature_names
        num_ids = num_rows * workload.mean_ids(features)
        return cls(num_ids, num_rows * len(features), itemsize, is_pooled(table), exchange)

    def id_bytes(self, num_ranks: int) -> float:
        """Returns the bytes of ids and lengths that one of ``num_ranks`` gets, if the ids are divided among them."""
        return self.num_ids * self.itemsize / num_ranks + self.num_bags * LENGTH_BYTES

    def vector_bytes(self, num_columns: int) -> float:
        """Returns the bytes that the batch's vectors and their gradients have while they are sent."""
        numbers = self.num_vectors * num_columns
        return self.exchange.vector_bytes(numbers) + self.exchange.gradient_bytes(numbers)

    @property
    def num_vectors(self) -> float:
        return self.num_bags if self.is_pooled else self.num_ids

    def rounding_bytes(self, num_columns: int) -> float:
        """Returns the bytes that codecs read and write on one side, sender or receiver; 0 without codecs.

        Each of vectors and gradients is read as float32 and written rounded, or the reverse.
        """
        if not self.exchange.comms.is_used:
            return 0.0
        return 2 * self.num_vectors * num_columns * FLOAT_BYTES + self.vector_bytes(num_columns)


class Traffic:
    """Times of sending on one cluster, from its bandwidths; each rank sends directly to all others."""

    def __init__(self, cluster: Cluster) -> None:
        device, world_size, ranks_per_node = cluster.device, cluster.world_size, cluster.ranks_per_node
        self._nodes, self._ranks_per_node, self._world_size = cluster.nodes, ranks_per_node, world_size
        self._local, self._node = _MS / device.local_bandwidth, _MS / device.node_bandwidth
        self._reduced = _MS / device.reduce_bandwidth
        self._sends_while_receiving = device.kind != "cpu"
        # milliseconds of a byte to all other ranks, and to one of them, on average
        self._to_all = (ranks_per_node - 1) * self._local + (world_size - ranks_per_node) * self._node
        self._to_any = self._to_all / max(1, world_size - 1)

    def all_reduce_ms(self, num_bytes: float) -> float:
        """Returns the milliseconds to average gradients over all ranks, by the module's formula of two rings."""
        within = (self._ranks_per_node - 1) / self._ranks_per_node * self._local
        between = (self._nodes - 1) / (self._nodes * self._ranks_per_node) * self._node
        return 2 * num_bytes * (within + between)

    def transfers(
        self, table: TableTraffic, exchange: ExchangeKey, num_columns: int, num_with_rows: int
    ) -> Mapping[Phase, Transfer]:
        """Returns the transfers, by phase, for one shard: columns of a table, or a share of their rows.

        ``num_with_rows`` is the number of shards among which the ids are divided. Empty where nothing is sent.
        """
        sharding_type, ranks_per_node = exchange[1], self._ranks_per_node
        if not is_exchanged(sharding_type, self._world_size):
            return {}
        ids, vectors = (exchange, "ids"), (exchange, "vectors")
        vector_bytes = table.vector_bytes(num_columns)
        if sharding_type == ShardingType.ROW_WISE.value:
            vector_bytes /= 1 if table.is_pooled else self._world_size
            id_bytes = table.id_bytes(num_with_rows)
            # sums are scattered, and their gradients gathered
            added = (self._world_size - 1) * self._reduced if table.is_pooled else 0.0
            return {ids: Transfer(id_bytes * self._to_all), vectors: Transfer(vector_bytes * (self._to_all + added))}
        id_bytes = table.id_bytes(num_with_rows)
        sent_ids = self._phases(ids, id_bytes * self._to_all, id_bytes * self._to_any)
        if sharding_type not in WITHIN_NODES:
            return sent_ids | self._phases(vectors, vector_bytes * self._to_all, vector_bytes * self._to_any)
        # a node's ranks reduce-scatter the sums of all ranks' rows; then each sends its part to the other nodes
        summed = (ranks_per_node - 1) / ranks_per_node * self._world_size * vector_bytes
        between = vector_bytes * self._node
        return {
            **sent_ids,
            (exchange, "sums"): Transfer(summed * (self._local + self._reduced)),
            **self._phases(vectors, (self._nodes - 1) * between, between / ranks_per_node),
        }

    def _phases(self, phase: Phase, owner_ms: float, other_ms: float) -> dict[Phase, Transfer]:
        """Returns one phase where ranks send while they receive; else two phases, which add up, of half the time."""
        if self._sends_while_receiving:
            return {phase: Transfer(owner_ms, other_ms)}
        exchange, name = phase
        return {phase: Transfer(owner_ms / 2), (exchange, f"{name} of others"): Transfer(0.0, other_ms / 2)}


_SORT_TRAFFIC_BYTES = 64
"""Bytes that a backward pass reads and writes per id to sort the ids by row."""
_REPEATED = 0.15
"""Share of a row's seconds that each lookup of it takes; its update takes the seconds once."""
_ONE_PASS_ROWS = 0.25
"""Share of FBGEMM's seconds of a row that a row takes in one pass."""
_DENSE_COPIES = 3
"""Numbers moved per weight that torch trains: its gradient is zeroed, read, and written to a bucket."""
_REPLICATED_LAUNCHES = 11
"""Further operations of a partition that torch looks up: stacking, sums and their gradients."""
_FUNCTION_LAUNCHES = 60
"""Operations of the functions of one partition of a path."""
_UPDATE_LAUNCHES = 10
"""Operations of a replicated weight: copying its gradient into a bucket, and torch's row-wise Adagrad."""


class _Rows(NamedTuple):
    """The lookups of one partition on one rank in a step."""

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
        """Expected number of distinct rows, were the ids uniform."""
        return expected_distinct(self.num_rows, self.num_ids)


class LookupTimes:
    """Times of lookups on one device; with ``bf16`` the functions of paths compute in bf16."""

    def __init__(self, device: Device, optimizers: TableOptimizers, bf16: bool, cache_ratio: float) -> None:
        self._device, self._optimizers, self._cache_ratio = device, optimizers, cache_ratio
        self._flops = device.reached_flops(bf16)

    def lookup(self, load: TableLoad) -> tuple[float, int]:
        """Returns the milliseconds of a table's lookups on a rank, and the number of operations its group starts.

        The milliseconds cover the forward and backward passes and the update. Rows of sharded partitions are divided
        over ``load.num_row_blocks`` ranks. The number of operations does not depend on the number of tables of a group.
        """
        table_slice, table = load.slice, load.slice.table
        optimizer = self._optimizers.for_table(table).sparse
        kind = group_type(table_slice, self._device.kind, optimizer)
        work, started = kind.work(load), kind.launches(load)
        seconds = work.moved_bytes / self._device.memory_bandwidth + work.operations / self._flops
        launches = started.group + _FUNCTION_LAUNCHES * len(table.function_tables())
        for part, lookups in zip(table_slice.partitions, work.lookups, strict=True):
            kernel = part.kernel
            num_rows = -(-part.part.num_rows // (load.num_row_blocks if kernel else 1))
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
        """Returns the milliseconds in which torch updates partitions and functions on every rank."""
        vectors, functions = (
            sum(part.num_parameters for part in parts if part.is_function == is_function)
            for is_function in (False, True)
        )
        return _MS * (_UPDATE_LAUNCHES * len(parts)) * self._device.launch_seconds + _MS * (
            self._update_seconds(vectors, self._optimizers.sparse)
            + self._update_seconds(functions, self._optimizers.dense)
        )

    def _fbgemm_seconds(self, rows: _Rows, compute_kernel: str, in_one_pass: bool) -> float:
        """Returns the seconds of a lookup, its gradients and its update, by FBGEMM or by the one-pass kernel."""
        device, slower = self._device, 1.0
        if device.kind == "cuda" and rows.dim < FULL_BLOCK_EMB_DIM:  # narrow rows leave threads of a GPU idle
            slower = HALF_BLOCK_PENALTY if 2 * rows.dim >= FULL_BLOCK_EMB_DIM else QUARTER_BLOCK_PENALTY
        state_bytes = OPTIMIZERS[self._optimizers.sparse].fused_state_bytes(1, rows.dim)
        updated = 2 * rows.num_distinct * (rows.row_bytes + state_bytes)
        if in_one_pass:
            # forward and backward an id and its row are read, and backward its gradient is added to a sum
            row_share, read = _ONE_PASS_ROWS, 2 * rows.num_ids * rows.row_bytes
            moved = read + updated + 2 * rows.num_ids * (LONG_BYTES + rows.dim * FLOAT_BYTES)
            moved += 2 * rows.num_bags * rows.dim * FLOAT_BYTES
            if device.kind == "cuda" and ids_of_slice(rows.num_rows, rows.dim) is None:
                moved += (
                    rows.num_ids * _SORT_TRAFFIC_BYTES
                )  # gradients of few rows are summed in slices, without a sort
        else:
            row_share, read = 1.0, rows.num_ids * rows.row_bytes
            vectors = (rows.num_bags + rows.num_ids) * rows.dim * FLOAT_BYTES
            moved = read + updated + (rows.num_ids * (LONG_BYTES + _SORT_TRAFFIC_BYTES) + vectors)
        # share of the rows that are read from the host's memory, and written to it
        missed = 1 - self._cache_ratio if compute_kernel == CACHED else float(compute_kernel in IN_HOST_MEMORY)
        return (
            row_share * self._row_seconds(rows)
            + moved / (device.lookup_bandwidth / slower)
            + missed * (read + updated) / device.host_bandwidth
        )

    def _torch_seconds(self, rows: _Rows, in_one_pass: bool) -> float:
        """Returns the seconds of a lookup by torch or in one pass, and of making the gradient of all rows."""
        if in_one_pass:
            seconds = self._fbgemm_seconds(rows, EmbeddingComputeKernel.FUSED.value, in_one_pass)
        else:
            looked_up = rows.num_ids * (2 * LONG_BYTES + _SORT_TRAFFIC_BYTES + 3 * rows.dim * FLOAT_BYTES)
            sums = 2 * rows.num_bags * rows.dim * FLOAT_BYTES
            seconds = self._row_seconds(rows) + (looked_up + sums) / self._device.lookup_bandwidth
        return seconds + _DENSE_COPIES * rows.num_numbers * FLOAT_BYTES / self._device.memory_bandwidth

    def _row_seconds(self, rows: _Rows) -> float:
        """Returns the seconds per distinct row and per lookup, apart from the time of moving bytes."""
        return (rows.num_distinct + _REPEATED * rows.num_ids) * self._device.row_seconds

    def _update_seconds(self, num_numbers: float, optimizer: str) -> float:
        """Returns the seconds of torch's optimizer: reads gradients, reads and writes weights and states."""
        states = OPTIMIZERS[optimizer].fused_state_bytes(0, 1) if num_numbers else 0
        return num_numbers * (3 * FLOAT_BYTES + 2 * states) / self._device.memory_bandwidth
