"""What a placement of one table costs each rank in time, piece by piece; every estimate of time is a sum of these.

A search adds the pieces up for many plans, :func:`~distembed.planning.times.step_times` for one. Times are milliseconds
of a training step, forward and backward::

    rank = sum of its shards' lookups                      + what every rank does for each table
         + start of each group of lookups that it has      + start of each exchange that any table takes part in
         + for each phase of each exchange: the longer of sending and receiving
         + all-reduces of what is replicated, with their start                  + networks

On CPUs whose ranks share cores a node takes no less than all of its ranks' times over the number of ranks that its
cores run at once (:attr:`~distembed.planning.devices.Device.ranks_at_once`).
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torchrec.distributed.types import ParameterSharding, ShardingType

from distembed.embedding.config import CompositionalEmbeddingConfig, PartitionTable, common_id_dtype
from distembed.embedding.exchange import VectorExchange
from distembed.planning.lookup_time import LookupTimes
from distembed.planning.lookups import ExchangeKey, is_on_every_rank
from distembed.planning.request import PlanRequest
from distembed.planning.transfers import Phase, TableTraffic, Traffic, Transfer, is_divided_within_nodes
from distembed.sharding.groups import TableLoad, group_key, lookup_formula
from distembed.sharding.groups.load import FLOAT_BYTES, LONG_BYTES
from distembed.sharding.placement import BY_ROWS, partition_kernels
from distembed.sharding.table_slice import TableSlice, is_pooled, slice_table

_MS = 1e3
_BY_COLUMNS = (ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value)
_ID_COLLECTIVES = 3
"""TorchRec exchanges how many ids go where, how many each row has, and the ids."""
_EXCHANGE_LAUNCHES = 11
"""Operations around the collectives of an exchange: permuting ids and lengths, copies."""
_ROUTING_LAUNCHES = 8
"""Further operations of an exchange by rows: mapping ids to rows and sorting them by rank, for all features at once."""
_COLUMN_LAUNCHES = 7
"""Further operations of an exchange by columns, which put the ranges of a table's columns side by side."""
_ORDER_COPIES = 3
"""Copies of a rank's vectors: side by side by way of dividing, in the order of features, and of gradients back."""
_PIECE_ROWS = 0.07
"""Share of a row's seconds that each copy to the order of features takes for a range of columns of one vector."""
_EXCHANGE_COPIES = 3
"""Copies of a rank's vectors around an exchange: vectors of all ranks side by side, gradients by rank and divided."""
_CODEC_LAUNCHES = 6
"""Operations of TorchRec's codecs in an exchange: rounding and widening vectors, and their gradients."""
_UPDATE_LAUNCHES = 10
"""Operations of a replicated weight: adding its gradient to the buffer of all, and torch's row-wise Adagrad."""


@dataclass(frozen=True)
class Layout:
    """How a table is divided, wherever its shards lie.

    Attributes:
        sharding_type: TorchRec's name of the way in which the table is divided.
        compute_kernel: TorchRec's name of the kernel that looks rows up.
        columns: First column, and the one behind the last, of each range of columns of the output; one range where
            columns are not divided. Two-level types have a shard on every rank of a node for each.
    """

    sharding_type: str
    compute_kernel: str
    columns: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ShardCost:
    """What a shard costs the rank that has it.

    Attributes:
        lookup_ms: Milliseconds of lookups, composing, their gradients and their update, without starting kernels.
        group: What the shard is looked up together with; a rank starts the kernels of a group once. None where nothing
            is looked up.
        transfers: What is communicated for the shard, by phase.
    """

    lookup_ms: float
    group: Hashable
    transfers: Mapping[Phase, Transfer] = field(default_factory=dict)


@dataclass(frozen=True)
class PlacementCost:
    """What one placement of a table costs.

    Attributes:
        shards: Cost of each shard, range of columns after range, in one rank of a node after the other where rows are
            divided within nodes; none of a table that is on every rank.
        everywhere: Cost to every rank of a table that is on all of them (``row_wise``, ``data_parallel``), and of what
            is replicated beside shards.
        all_reduce_ms: Milliseconds in which the gradients of replicated weights are averaged.
        exchange: The exchange that the table takes part in; None where nothing is exchanged.
        sent_bytes: Bytes that all ranks together send in a step for the table.
    """

    shards: Sequence[ShardCost]
    everywhere: ShardCost | None = None
    all_reduce_ms: float = 0.0
    exchange: ExchangeKey | None = None
    sent_bytes: float = 0.0


class PlacementCosts:
    """Costs of placements on one cluster, for one workload; tables that are alike are computed once.

    Args:
        request: Model, cluster and workload.
    """

    def __init__(self, request: PlanRequest) -> None:
        cluster, workload = request.cluster, request.workload
        self._cluster, self._workload = cluster, workload
        self._traffic = Traffic(cluster)
        self._lookups = LookupTimes(cluster.device, request.table_optimizers, workload.bf16, request.cache_ratio)
        self._exchanges = request.exchanges
        self._id_bytes = {
            path: common_id_dtype(collection.tables()).itemsize for path, collection in request.collections.items()
        }
        self._group_starts: dict[Hashable, float] = {None: 0.0}
        self._classes: dict[str, Hashable] = {}
        self._known: dict[Hashable, PlacementCost] = {}

    @cached_property
    def networks_ms(self) -> float:
        """Milliseconds of the networks' forward and backward passes, the same on every rank."""
        network, device = self._workload.network, self._cluster.device
        if network is None:
            return 0.0
        computing = network.flops / device.reached_flops(self._workload.bf16)
        moving = 4 * network.peak / device.memory_bandwidth
        return _MS * max(computing, moving)

    @property
    def networks_all_reduce_ms(self) -> float:
        """Milliseconds in which the gradients of the networks are averaged."""
        network = self._workload.network
        return 0.0 if network is None else self._traffic.all_reduce_ms(network.gradients)

    @property
    def all_reduce_start_ms(self) -> float:
        """Milliseconds that starting to average gradients takes, once a step."""
        device = self._cluster.device
        return 0.0 if self._cluster.world_size == 1 else _MS * device.collective_seconds

    def group_start_ms(self, group: Hashable) -> float:
        """Returns the milliseconds that a rank takes to start the kernels of a group, once a step.

        Args:
            group: Group of a shard whose cost has been asked for.
        """
        return self._group_starts[group]

    def exchange_start_ms(self, exchange: ExchangeKey) -> float:
        """Returns the milliseconds that every rank takes to start an exchange, once a step.

        Args:
            exchange: An exchange that any table takes part in.
        """
        device = self._cluster.device
        levels = 2 if is_divided_within_nodes(exchange[1]) else 1
        collectives = _ID_COLLECTIVES + 2 * levels
        launches = _EXCHANGE_LAUNCHES + _ROUTING_LAUNCHES * (exchange[1] in BY_ROWS)
        launches += _COLUMN_LAUNCHES * (exchange[1] in _BY_COLUMNS)
        launches += _CODEC_LAUNCHES * levels * self._exchange_of(exchange[0]).comms.is_used
        return _MS * (collectives * device.collective_seconds + launches * device.launch_seconds)

    def table_class(self, table: CompositionalEmbeddingConfig, collection: str) -> Hashable:
        """Returns what tables have in common that cost the same in every layout."""
        if table.name not in self._classes:
            features = table.feature_names
            self._classes[table.name] = (
                collection,
                type(table),
                lookup_formula(table),
                tuple(table.scheme.num_rows),
                table.num_embeddings,
                len(features),
                sum(self._workload.ids_per_row.get(name, 1.0) for name in features),
                any(self._workload.has_bags(name) for name in features),
                self._workload.weight_bytes(features),
            )
        return self._classes[table.name]

    def cost(self, table: CompositionalEmbeddingConfig, layout: Layout, collection: str) -> PlacementCost:
        """Returns what a table costs if it is divided in some way.

        Args:
            table: The table.
            layout: The way.
            collection: Path of the table's collection within the model.
        """
        key = self.table_class(table, collection), layout
        if key not in self._known:
            self._known[key] = self._cost(table, layout, collection)
        return self._known[key]

    def _cost(self, table: CompositionalEmbeddingConfig, layout: Layout, collection: str) -> PlacementCost:
        exchange = collection, layout.sharding_type
        slices, replicated = divided_table(table, layout)
        traffic = self._table_traffic(table, collection)
        replicated_bytes = sum(
            part.num_parameters * (FLOAT_BYTES if part.is_function else table.bytes_per_number) for part in replicated
        )
        sent_bytes = self._traffic.all_reduce_bytes(replicated_bytes)
        shards: list[ShardCost] = []
        by_shape: dict[Hashable, ShardCost] = {}
        for own in slices:
            if own.shape not in by_shape:
                by_shape[own.shape] = self._shard(own, layout, exchange, traffic)
            shards += [by_shape[own.shape]] * self.num_row_shards(layout.sharding_type)
            sent_bytes += self._traffic.sent_bytes(traffic, layout.sharding_type, own.num_columns)
        # of the vectors of a rank's own rows, whoever has looked them up
        num_columns, is_exchanged = sum(own.num_columns for own in slices), self._is_exchanged(layout.sharding_type)
        common_ms = self._update_ms(replicated) + self._ordering_ms(traffic, num_columns, len(slices))
        if is_exchanged:
            common_ms += self._rounding_ms(traffic, num_columns)
            common_ms += self._copying_ms(traffic, num_columns, _EXCHANGE_COPIES)
        everywhere = ShardCost(common_ms, None) if common_ms else None
        if is_on_every_rank(layout.sharding_type):
            everywhere, shards = replace(shards[0], lookup_ms=shards[0].lookup_ms + common_ms), []
        return PlacementCost(
            shards,
            everywhere,
            self._traffic.all_reduce_ms(replicated_bytes),
            exchange if is_exchanged else None,
            sent_bytes,
        )

    def _is_exchanged(self, sharding_type: str) -> bool:
        """Returns whether vectors of tables that are divided so are sent to other ranks."""
        return self._cluster.world_size > 1 and sharding_type != ShardingType.DATA_PARALLEL.value

    def _exchange_of(self, collection: str) -> VectorExchange:
        return self._exchanges.get(collection, VectorExchange())

    def _rounding_ms(self, traffic: TableTraffic, num_columns: float) -> float:
        """Returns the milliseconds in which codecs round and widen the vectors and gradients of a rank's batch."""
        return _MS * traffic.rounding_bytes(round(num_columns)) / self._cluster.device.memory_bandwidth

    def _copying_ms(self, traffic: TableTraffic, num_columns: float, copies: int) -> float:
        """Returns the milliseconds in which the vectors of a rank's batch, or their gradients, are copied."""
        copied_bytes = copies * 2 * FLOAT_BYTES * traffic.num_vectors * num_columns
        return _MS * copied_bytes / self._cluster.device.memory_bandwidth

    def _ordering_ms(self, traffic: TableTraffic, num_columns: float, num_ranges: int) -> float:
        """Returns the milliseconds in which vectors get into the order of features, and their gradients back."""
        pieces = 2 * traffic.num_vectors * num_ranges
        in_pieces = _MS * _PIECE_ROWS * pieces * self._cluster.device.row_seconds
        return in_pieces + self._copying_ms(traffic, num_columns, _ORDER_COPIES)

    def _update_ms(self, replicated: Sequence[PartitionTable]) -> float:
        """Returns the milliseconds that every rank takes to update the parameters that are on all ranks."""
        launches = _UPDATE_LAUNCHES * len(replicated)
        return _MS * launches * self._cluster.device.launch_seconds + self._lookups.replicated_update_ms(
            sum(part.num_parameters for part in replicated if not part.is_function),
            sum(part.num_parameters for part in replicated if part.is_function),
        )

    def _shard(self, own: TableSlice, layout: Layout, exchange: ExchangeKey, traffic: TableTraffic) -> ShardCost:
        """Returns the cost of a rank's shard."""
        load = self._load(own, layout.sharding_type, traffic)
        group = exchange, group_key(own), load.is_multi_hot
        device, num_shards = self._cluster.device, self.num_row_shards(layout.sharding_type)
        self._group_starts[group] = _MS * self._lookups.group_launches(load) * device.launch_seconds
        lookup_ms = self._lookups.milliseconds(load, num_shards)
        if self._is_exchanged(layout.sharding_type):
            shares = num_shards if not traffic.is_pooled else 1  # each shard has a sum of every bag
            lookup_ms += self._cluster.world_size / shares * self._rounding_ms(traffic, own.num_columns)
        return ShardCost(lookup_ms, group, self._traffic.transfers(traffic, exchange, own.num_columns))

    def _load(self, own: TableSlice, sharding_type: str, traffic: TableTraffic) -> TableLoad:
        """Returns what a rank looks up of a table in a step."""
        features, num_shards = own.table.feature_names, self.num_row_shards(sharding_type)
        num_batches = 1 if sharding_type == ShardingType.DATA_PARALLEL.value else self._cluster.world_size
        return TableLoad(
            own,
            len(features),
            num_ids=num_batches * traffic.num_ids / num_shards,
            num_bags=num_batches * traffic.num_bags,
            possible_ids=-(-own.table.num_embeddings // num_shards),
            is_multi_hot=any(self._workload.has_bags(name) for name in features),
            finds_distinct=self._cluster.device.kind == "cpu",
        )

    def _table_traffic(self, table: CompositionalEmbeddingConfig, collection: str) -> TableTraffic:
        """Returns what a rank's batch has of a table."""
        num_rows = self._workload.rows_of_rank(self._cluster.world_size)
        num_ids = num_rows * sum(self._workload.ids_per_row.get(name, 1.0) for name in table.feature_names)
        num_bags = num_rows * len(table.feature_names)
        itemsize, exchange = self._id_bytes.get(collection, LONG_BYTES), self._exchange_of(collection)
        itemsize += self._workload.weight_bytes(table.feature_names)
        return TableTraffic(num_ids, num_bags, itemsize, is_pooled(table), exchange)

    def num_row_shards(self, sharding_type: str) -> int:
        """Returns over how many ranks the rows of a table's largest partition are divided."""
        if sharding_type == ShardingType.ROW_WISE.value:
            return self._cluster.world_size
        return self._cluster.ranks_per_node if is_divided_within_nodes(sharding_type) else 1


def divided_table(table: CompositionalEmbeddingConfig, layout: Layout) -> tuple[list[TableSlice], list[PartitionTable]]:
    """Returns a table's ranges of columns, each with the kernels of what is sharded, and what is replicated."""
    parts = table.partition_tables()
    sharded = sharded_partitions(parts, layout.sharding_type)
    kernels = partition_kernels(table, layout.compute_kernel)
    own_kernels = [kernels[part.name] if j in sharded else None for j, part in enumerate(parts)]
    slices = [slice_table(table, parts, columns, own_kernels) for columns in layout.columns]
    return slices, [part for j, part in enumerate(parts) if j not in sharded]


def sharded_partitions(parts: Sequence[PartitionTable], sharding_type: str) -> frozenset[int]:
    """Returns the numbers of a table's partitions whose weights are sharded; those of others are on every rank."""
    if sharding_type == ShardingType.DATA_PARALLEL.value:
        return frozenset()
    lookups = [j for j, part in enumerate(parts) if not part.is_function]
    if sharding_type == ShardingType.ROW_WISE.value or is_divided_within_nodes(sharding_type):
        return frozenset([max(lookups, key=lambda j: parts[j].num_parameters)])
    return frozenset(lookups)


def layout(unit: ParameterSharding, num_columns: int) -> tuple[Layout, list[int]]:
    """Returns how a plan divides a table, and the rank of each shard, in the order of :class:`PlacementCost`.

    Args:
        unit: The plan's answer for the table as a whole.
        num_columns: Number of columns of the table's output.
    """
    if is_on_every_rank(unit.sharding_type):
        return Layout(unit.sharding_type, unit.compute_kernel, ((0, num_columns),)), []
    spec: Any = unit.sharding_spec
    columns = [(shard.shard_offsets[1], shard.shard_offsets[1] + shard.shard_sizes[1]) for shard in spec.shards]
    ranks = [shard.placement.rank() for shard in spec.shards]
    return Layout(unit.sharding_type, unit.compute_kernel, tuple(dict.fromkeys(columns))), ranks
