"""Cost of each placement of a table to each rank, in time and memory, piece by piece; estimates are sums of pieces.

A search adds up the pieces of many plans, :func:`step_times` the pieces of a finished plan. Times are milliseconds of a
training step, forward and backward::

    rank = sum of its shards' lookups                     + work of every rank for each table
        + start of each group of lookups that it has      + start of each exchange that any table takes part in
        + for each phase of each exchange: the longer of sending and receiving
        + all-reduces of replicated weights, with their start
        + networks

On CPUs whose ranks share cores, a node takes at least the sum of its ranks' times over the number of ranks that its
cores run at once (:attr:`~distembed.planning.devices.Device.ranks_at_once`).

Bytes of a shard are its weights, states and gradients, exact, and a guess of its buffers. The memory of a whole plan is
counted in the end (:mod:`distembed.planning.buffers`).
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torchrec.distributed.types import ParameterSharding, ShardingType

from distembed.embedding.config import CompositionalEmbeddingConfig, PartitionTable, common_id_dtype
from distembed.optim.table_storage import TableStorage, replicated_storage
from distembed.planning.devices import Cluster
from distembed.planning.networks import NetworkEstimate
from distembed.planning.request import PlanRequest
from distembed.planning.storage import StepTime, slice_storage
from distembed.planning.times import (
    ExchangeKey,
    LookupTimes,
    Phase,
    TableTraffic,
    Traffic,
    Transfer,
    column_shards,
    is_exchanged,
    is_on_every_rank,
)
from distembed.sharding.groups import TableLoad, group_key, lookup_formula
from distembed.sharding.groups.load import FLOAT_BYTES, LONG_BYTES
from distembed.sharding.placement import BY_ROWS, WITHIN_NODES, Placement, partition_kernels
from distembed.sharding.table_slice import TableSlice, is_pooled, slice_table, width

_MS = 1e3
_DATA_PARALLEL = ShardingType.DATA_PARALLEL.value
_BY_COLUMNS = (ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value)
_ID_COLLECTIVES = 3
"""Collectives of TorchRec's ids: the sizes of messages, the lengths, and the ids."""
_EXCHANGE_LAUNCHES = 11
"""Operations around the collectives of an exchange: permuting ids and lengths, copies."""
_ROUTING_LAUNCHES = 8
"""Further operations of an exchange by rows: mapping ids to rows and sorting them by rank."""
_COLUMN_LAUNCHES = 7
"""Further operations of an exchange by columns: joining the ranges of a table's columns."""
_COPIES = 3
"""Copies of a rank's vectors: joined by sharding type, in the order of features, and gradients back.

An exchange takes as many: vectors of all ranks joined, gradients sorted by rank, and divided.
"""
_PIECE_ROWS = 0.07
"""Share of a row's seconds of each copy to the order of features, per vector's range of columns."""
_CODEC_LAUNCHES = 6
"""Operations of TorchRec's codecs in an exchange: rounding and widening vectors, and gradients."""
_VECTOR_COPIES = 3
"""Copies of a shard's composed vectors at the fullest moment: composed, sent, and gradients."""
_ID_COPIES = 3


@dataclass(frozen=True)
class Layout:
    """How a table is divided into shards, apart from the ranks that hold them."""

    sharding_type: str
    compute_kernel: str
    # first column and last column + 1 of each range of the output's columns, all of one width; one range where columns
    # are not divided. Two-level types have a shard on every rank of a node for each range
    columns: tuple[tuple[int, int], ...]

    def lies_on_one_node(self, cluster: Cluster) -> bool:
        """Returns whether all ranges of columns must go to the same node, and there is more than one node."""
        is_on_node = self.sharding_type == ShardingType.TABLE_COLUMN_WISE.value and cluster.nodes > 1
        return is_on_node and len(self.columns) > 1


@dataclass(frozen=True)
class ShardCost:
    """Cost of a shard to the rank that has it."""

    lookup_ms: float  # of lookups, composing, their gradients and their update, without starting kernels
    group: Hashable  # lookups of one group share kernels, which a rank starts once a step; None for no lookup
    transfers: Mapping[Phase, Transfer]  # by phase
    storage: TableStorage  # of the shard; shards of equal rows all count as the first, which has the most
    buffer_bytes: float  # a guess of the buffers of its lookups

    @property
    def num_bytes(self) -> float:
        """Bytes on the device: weights, states, gradients and buffers."""
        return self.storage.total + self.buffer_bytes

    def exchange_ms(self, num_others: int) -> float:
        """Returns the sum over phases of the owner's milliseconds, or of all ``num_others`` ranks' if it has none."""
        return sum((transfer.owner_ms or num_others * transfer.other_ms for transfer in self.transfers.values()), 0.0)


@dataclass(frozen=True)
class PlacementCost:
    """Cost of one placement of a table."""

    # cost of each shard, sorted by range of columns and then, where rows are divided within nodes, by rank of the node;
    # empty for a table on every rank
    shards: Sequence[ShardCost]
    # cost to every rank: all of a table on every rank; of a sharded table, its replicated partitions, and the copies of
    # vectors for the rank's own rows
    everywhere: ShardCost
    all_reduce_ms: float  # in which the gradients of replicated weights are averaged
    exchange: ExchangeKey | None  # the exchange that the table takes part in; None where nothing is exchanged
    sent_bytes: float  # bytes that all ranks together send in a step for the table


class PlacementCosts:
    """Costs of placements on one cluster, for one workload; cached by :meth:`table_class` and layout."""

    def __init__(self, request: PlanRequest) -> None:
        cluster, workload = request.cluster, request.workload
        self._cluster, self._workload, self._exchanges = cluster, workload, request.exchanges
        self._network = workload.network or NetworkEstimate()
        self._optimizers, self._cache_ratio = request.table_optimizers, request.cache_ratio
        self._traffic = Traffic(cluster)
        # on links that take a millisecond for each byte, the milliseconds of senders are the bytes that they send
        links = replace(cluster.device, kind="cuda", local_bandwidth=_MS, node_bandwidth=_MS, reduce_bandwidth=math.inf)
        self._sent = Traffic(replace(cluster, device=links))
        self._lookups = LookupTimes(cluster.device, self._optimizers, workload.bf16, self._cache_ratio)
        self._id_bytes = {
            path: common_id_dtype(collection.tables()).itemsize for path, collection in request.collections.items()
        }
        self._group_starts: dict[Hashable, float] = {None: 0.0}
        self._classes: dict[str, Hashable] = {}
        self._cost_by_key: dict[Hashable, PlacementCost] = {}

    @cached_property
    def networks_ms(self) -> float:
        """Milliseconds of the networks' forward and backward passes, equal on all ranks."""
        computing = self._network.flops / self._cluster.device.reached_flops(self._workload.bf16)
        moving = 4 * self._network.peak / self._cluster.device.memory_bandwidth
        return _MS * max(computing, moving)

    @property
    def networks_all_reduce_ms(self) -> float:
        return self._traffic.all_reduce_ms(self._network.gradients)

    @property
    def all_reduce_start_ms(self) -> float:
        """Milliseconds in which averaging gradients starts, once a step."""
        return 0.0 if self._cluster.world_size == 1 else _MS * self._cluster.device.collective_seconds

    def group_start_ms(self, group: Hashable) -> float:
        """Returns the milliseconds in which a rank starts a group's kernels; :meth:`cost` has to name it before."""
        return self._group_starts[group]

    def exchange_start_ms(self, exchange: ExchangeKey) -> float:
        """Returns the milliseconds in which every rank starts an exchange, once a step."""
        device, (collection, sharding_type) = self._cluster.device, exchange
        levels = 2 if sharding_type in WITHIN_NODES else 1
        collectives = _ID_COLLECTIVES + 2 * levels
        launches = _EXCHANGE_LAUNCHES + _ROUTING_LAUNCHES * (sharding_type in BY_ROWS)
        launches += _COLUMN_LAUNCHES * (sharding_type in _BY_COLUMNS)
        launches += _CODEC_LAUNCHES * levels * self._exchanges[collection].comms.is_used
        return _MS * (collectives * device.collective_seconds + launches * device.launch_seconds)

    def table_class(self, table: CompositionalEmbeddingConfig, collection: str) -> Hashable:
        """Returns a key that is equal for tables with equal costs in every layout."""
        if table.name not in self._classes:
            features = table.feature_names
            self._classes[table.name] = (
                collection,
                type(table),
                lookup_formula(table),
                tuple(table.scheme.num_rows),
                table.num_embeddings,
                len(features),
                self._workload.mean_ids(features),
                any(self._workload.has_bags(name) for name in features),
                self._workload.weight_bytes(features),
                table.dense_gradient,
                table.all_scored,
            )
        return self._classes[table.name]

    def cost(self, table: CompositionalEmbeddingConfig, layout: Layout, collection: str) -> PlacementCost:
        """Returns the cost of a table in a layout; the collection is its path within the model."""
        key = self.table_class(table, collection), layout
        if key not in self._cost_by_key:
            self._cost_by_key[key] = self._cost(table, layout, collection)
        return self._cost_by_key[key]

    def _cost(self, table: CompositionalEmbeddingConfig, layout: Layout, collection: str) -> PlacementCost:
        # slices of equal shape have equal costs, and so have the row shards of one slice
        exchange, device = (collection, layout.sharding_type), self._cluster.device
        slices, replicated = divided_table(table, layout)
        traffic = self._table_traffic(table, collection)
        storage = replicated_storage(table, replicated, self._optimizers)
        sent_bytes = self._cluster.world_size * self._sent.all_reduce_ms(storage.weights)
        shards: list[ShardCost] = []
        by_shape: dict[Hashable, ShardCost] = {}
        for table_slice in slices:
            if table_slice.shape not in by_shape:
                by_shape[table_slice.shape] = self._shard(table_slice, exchange, traffic, is_grid=len(slices) > 1)
            num_shards = self._num_row_shards(layout.sharding_type)
            shards += [by_shape[table_slice.shape]] * num_shards
            sent = self._sent.transfers(traffic, exchange, table_slice.num_columns, num_shards)
            sent_bytes += num_shards * sum(transfer.owner_ms for transfer in sent.values())
        is_sent = is_exchanged(layout.sharding_type, self._cluster.world_size)
        # every rank copies the vectors of its own rows and their gradients, whichever rank looked them up
        num_columns = sum(table_slice.num_columns for table_slice in slices)
        num_pieces = 2 * traffic.num_vectors * len(slices)
        copied_bytes = _COPIES * 2 * FLOAT_BYTES * traffic.num_vectors * num_columns
        copying_ms = _MS * copied_bytes / device.memory_bandwidth
        ordering_ms = _MS * _PIECE_ROWS * num_pieces * device.row_seconds + copying_ms
        common_ms = self._lookups.replicated_update_ms(replicated) + ordering_ms
        if is_sent:
            common_ms = common_ms + self._rounding_ms(traffic, num_columns) + copying_ms
        own_rows = self._workload.rows_of_rank(self._cluster.world_size)
        everywhere = ShardCost(common_ms, None, {}, storage, self._buffer_bytes(table, num_columns, own_rows, 1))
        if is_on_every_rank(layout.sharding_type):
            lookup_ms, stored = shards[0].lookup_ms + common_ms, storage + shards[0].storage
            everywhere, shards = replace(shards[0], lookup_ms=lookup_ms, storage=stored), []
        all_reduce_ms = self._traffic.all_reduce_ms(storage.weights)
        return PlacementCost(shards, everywhere, all_reduce_ms, exchange if is_sent else None, sent_bytes)

    def _num_row_shards(self, sharding_type: str) -> int:
        """Returns the number of ranks over which a sharding type divides rows; 1 where it divides none."""
        if sharding_type == ShardingType.ROW_WISE.value:
            return self._cluster.world_size
        return self._cluster.ranks_per_node if sharding_type in WITHIN_NODES else 1

    def _rounding_ms(self, traffic: TableTraffic, num_columns: int) -> float:
        """Returns the milliseconds in which codecs round and widen vectors and gradients."""
        return _MS * traffic.rounding_bytes(num_columns) / self._cluster.device.memory_bandwidth

    def _shard(self, table_slice: TableSlice, exchange: ExchangeKey, traffic: TableTraffic, is_grid: bool) -> ShardCost:
        """Returns the cost of one row shard of a slice, and records the start of its group in ``_group_starts``."""
        # ids spread evenly over the shards that have rows: a small table divided over many ranks leaves some without
        sharding_type, world_size, features = exchange[1], self._cluster.world_size, table_slice.table.feature_names
        num_shards = self._num_row_shards(sharding_type)
        num_batches = 1 if sharding_type == _DATA_PARALLEL else world_size
        divided = [part for part in table_slice.partitions if part.kernel]
        with_rows = min([_num_with_rows(part.part.num_rows, num_shards) for part in divided], default=num_shards)
        load = TableLoad(
            table_slice,
            len(features),
            num_ids=num_batches * traffic.num_ids / with_rows,
            num_bags=num_batches * traffic.num_bags,
            possible_ids=[-(-table_slice.table.ids_of(name).num_ids // num_shards) for name in features],
            is_multi_hot=any(self._workload.has_bags(name) for name in features),
            finds_distinct=self._cluster.device.kind == "cpu",
            num_row_blocks=num_shards,
        )
        group = exchange, group_key(table_slice), load.is_multi_hot
        lookup_ms, launches = self._lookups.lookup(load)
        self._group_starts[group] = _MS * launches * self._cluster.device.launch_seconds
        if is_exchanged(sharding_type, world_size):
            shares = num_shards if not traffic.is_pooled else 1  # each shard has a sum of every bag
            lookup_ms += world_size / shares * self._rounding_ms(traffic, table_slice.num_columns)
        num_rows = self._workload.rows_of_rank(world_size) if num_batches == 1 else self._workload.batch_size
        return ShardCost(
            lookup_ms,
            group,
            self._traffic.transfers(traffic, exchange, table_slice.num_columns, with_rows),
            slice_storage(table_slice, num_shards, self._optimizers, self._cache_ratio, is_grid),
            self._buffer_bytes(table_slice.table, table_slice.num_columns, num_rows, num_shards),
        )

    def _buffer_bytes(
        self, table: CompositionalEmbeddingConfig, num_columns: int, num_rows: int, num_shards: int
    ) -> float:
        """Returns a guess of a rank's buffer bytes to look up some columns for ``num_rows`` rows of a batch."""
        num_ids = num_rows * self._workload.mean_ids(table.feature_names) / num_shards
        num_vectors = num_rows * len(table.feature_names) if is_pooled(table) else num_ids
        return num_vectors * num_columns * FLOAT_BYTES * _VECTOR_COPIES + num_ids * LONG_BYTES * _ID_COPIES

    def _table_traffic(self, table: CompositionalEmbeddingConfig, collection: str) -> TableTraffic:
        itemsize = self._id_bytes.get(collection, LONG_BYTES) + self._workload.weight_bytes(table.feature_names)
        return TableTraffic.of(table, self._workload, self._cluster.world_size, itemsize, self._exchanges[collection])


def _num_with_rows(num_rows: int, num_shards: int) -> int:
    """Returns how many shards have rows, where each takes ceil(num_rows / num_shards) until no row is left."""
    return -(-num_rows // -(-num_rows // num_shards))


def divided_table(table: CompositionalEmbeddingConfig, layout: Layout) -> tuple[list[TableSlice], list[PartitionTable]]:
    """Returns a slice of the table for each range of columns, and the partitions that every rank holds.

    Sharded partitions of a slice have a kernel, replicated ones None. By rows only the largest partition is sharded.
    """
    parts, sharded = table.partition_tables(), table.lookup_tables()
    if layout.sharding_type == _DATA_PARALLEL:
        sharded = []
    elif layout.sharding_type in BY_ROWS:
        sharded = [max(sharded, key=lambda part: part.num_parameters)]
    names, kernels = {part.name for part in sharded}, partition_kernels(table, layout.compute_kernel)
    part_kernels = [kernels[part.name] if part.name in names else None for part in parts]
    slices = [slice_table(table, columns, part_kernels) for columns in layout.columns]
    return slices, [part for part in parts if part.name not in names]


def layout(unit: ParameterSharding, num_columns: int) -> tuple[Layout, list[int]]:
    """Returns the layout of a placed table, and the rank of each shard; no ranks of a table on every rank."""
    columns, ranks = [(0, num_columns)], list[int]()
    if not is_on_every_rank(unit.sharding_type):
        shards = column_shards(unit)
        columns, ranks = [(start, stop) for start, stop, _ in shards], [rank for *_, rank in shards]
    return Layout(unit.sharding_type, unit.compute_kernel, tuple(dict.fromkeys(columns))), ranks


def step_times(placements: Iterable[Placement], costs: PlacementCosts, cluster: Cluster) -> list[StepTime]:
    """Returns the times of every rank under the placements of all tables; TorchRec's own tables count as full."""
    common, ranks = _Shards(), [_Shards() for _ in range(cluster.world_size)]
    all_reduce_ms, others_ms = costs.networks_all_reduce_ms, defaultdict[Phase, float](float)
    exchanges: dict[ExchangeKey, None] = {}  # in order, so that sums are equal in every run
    for placed in placements:
        own_layout, rank_of_shard = layout(placed.unit, width(placed.table))
        cost = costs.cost(placed.table, own_layout, placed.collection)
        all_reduce_ms += cost.all_reduce_ms
        if cost.exchange is not None:
            exchanges[cost.exchange] = None
        common.add(cost.everywhere)
        for rank, shard in zip(rank_of_shard, cost.shards, strict=True):
            ranks[rank].add(shard)
            for phase, transfer in shard.transfers.items():
                others_ms[phase] += transfer.other_ms
    exchange_starts_ms = sum(costs.exchange_start_ms(exchange) for exchange in exchanges)
    times = []
    for rank_shards in ranks:
        starts_ms = sum(costs.group_start_ms(group) for group in rank_shards.groups | common.groups)
        exchange_ms = 0.0
        # of each phase the longer: the rank's own shards, or all other ranks' shards (others has all ranks' work)
        for phase in others_ms | common.owner_ms:
            own_ms = rank_shards.owner_ms[phase] + common.owner_ms[phase]
            exchange_ms += max(own_ms, others_ms[phase] - rank_shards.other_ms[phase])
        starts_ms = starts_ms + exchange_starts_ms + costs.all_reduce_start_ms
        lookup_ms = rank_shards.lookup_ms + common.lookup_ms
        times.append(StepTime(lookup_ms, exchange_ms, costs.networks_ms, all_reduce_ms, starts_ms))
    return _sharing_cores(times, cluster)


class _Shards:
    """Sums over the shards of one rank: lookups, distinct groups, and transfers by phase."""

    def __init__(self) -> None:
        self.lookup_ms = 0.0
        self.groups: dict[Hashable, None] = {}
        self.owner_ms = defaultdict[Phase, float](float)
        self.other_ms = defaultdict[Phase, float](float)

    def add(self, shard: ShardCost) -> None:
        self.lookup_ms += shard.lookup_ms
        self.groups[shard.group] = None
        for phase, transfer in shard.transfers.items():
            self.owner_ms[phase] += transfer.owner_ms
            self.other_ms[phase] += transfer.other_ms


def _sharing_cores(times: Sequence[StepTime], cluster: Cluster) -> list[StepTime]:
    """Returns the times with waiting added where a node's cores run only some of its ranks at once.

    Each rank of the node then takes at least the sum of its ranks' times over the number of ranks that run at once.
    """
    shared: list[StepTime] = []
    size = cluster.ranks_per_node
    for first_rank in range(0, len(times), size):
        node_times = times[first_rank : first_rank + size]
        least_ms = sum(time.total for time in node_times) / cluster.ranks_at_once
        waits = cluster.ranks_at_once < size and least_ms > max(time.total for time in node_times)
        shared += [replace(time, waiting=least_ms - time.total) for time in node_times] if waits else node_times
    return shared
