"""Our milliseconds and bytes of a shard as estimates for TorchRec's own planner.

Trade-off: :class:`~distembed.planning.CompositionalShardingPlanner` knows which lookups share a group and counts the
memory of a whole step. The estimator leaves the search to TorchRec, which adds up shards one by one.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Perf,
    SharderDataMap,
    ShardEstimator,
    ShardingOption,
    Storage,
    Topology,
)
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.types import ModuleSharder, ShardingType

from distembed.base.errors import UserError
from distembed.base.names import one_of
from distembed.embedding.exchange import CommPrecision, QuantizedCommsConfig
from distembed.planning.costs import Layout, PlacementCosts
from distembed.planning.layouts import Layouts
from distembed.planning.table_problem import PlannedTable, TableProblem, unit_sharding
from distembed.planning.torchrec_planner import constrained_request, planned_cluster, planner_errors
from distembed.sharding import default_sharders
from distembed.sharding.exchange import codecs_registry
from distembed.sharding.placement import place_table

_DATA_PARALLEL = ShardingType.DATA_PARALLEL.value
_PRECISIONS: dict[float, CommPrecision] = {4: "fp32", 2: "fp16", 1: "int8"}  # by bytes of a number
_REFUSED_MS, _REFUSED_BYTES = 1e12, 2**60
"""Estimates of a layout that sharding refuses, which no plan can hold."""


class CompositionalShardEstimator(ShardEstimator):
    """Estimates milliseconds and bytes of each shard for ``EmbeddingShardingPlanner``.

    It replaces both of TorchRec's estimators: ``EmbeddingEnumerator(topology, batch_size, constraints,
    estimator=CompositionalShardEstimator(topology, constraints))``. Composing, replicated partitions and their
        gradients
    count too. A layout that sharding would refuse has an estimate that no plan can hold.

    Args:
        topology: Ranks, their memory and bandwidths.
        constraints: The planner's constraints, by table name; only the ids are read.
        device: As in :class:`CompositionalShardingPlanner`.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        device: str | None = None,
    ) -> None:
        self._constraints = dict(constraints or {})
        with planner_errors():
            self._cluster = planned_cluster(topology, device)

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: SharderDataMap | None = None) -> None:
        """Sets the estimates of all shards of some options, which may be of several modules."""
        if not sharding_options:
            return
        modules = nn.ModuleList({id(option.module[1]): option.module[1] for option in sharding_options}.values())
        sharders, batch_size = list(_sharders(sharder_data_map or {})), sharding_options[0].batch_size
        with planner_errors():
            request = constrained_request(modules, sharders, self._cluster, batch_size, self._constraints)
            costs, by_collection = PlacementCosts(request), defaultdict[str, list[ShardingOption]](list)
            problem = TableProblem(request, costs)
            tables = {planned.table.name: planned for planned in problem.tables}
            for sharding in sharding_options:
                planned = tables[one_of("table", sharding.name, tables)]
                by_collection[planned.collection].append(sharding)
                estimates = self._estimates(problem.layouts, costs, planned, sharding)
                for shard, (perf, storage) in zip(sharding.shards, estimates, strict=True):
                    shard.perf, shard.storage = perf, storage
        for path, options in by_collection.items():
            types = {option.sharding_type for option in options} - {_DATA_PARALLEL}
            if self._cluster.world_size > 1:
                self._add_starts(options, {name: costs.exchange_start_ms((path, name)) for name in types})

    def _estimates(
        self, layouts: Layouts, costs: PlacementCosts, planned: PlannedTable, sharding: ShardingOption
    ) -> Iterator[tuple[Perf, Storage]]:
        columns = dict.fromkeys((own.offset[1], own.offset[1] + own.size[1]) for own in sharding.shards)
        layout = Layout(sharding.sharding_type, sharding.compute_kernel, tuple(columns))
        cluster, numbers = self._cluster, range(len(sharding.shards))
        try:
            unit = unit_sharding(planned.table, layout, [number % cluster.world_size for number in numbers], cluster)
            place_table(planned.table, unit, cluster.world_size)
            layouts.in_one_pass(planned.table, [layout])
        except UserError:
            yield from ((Perf(_REFUSED_MS, 0, 0, 0), Storage(_REFUSED_BYTES, _REFUSED_BYTES)) for _ in numbers)
            return
        cost = costs.cost(planned.table, layout, planned.collection)
        for number in numbers:
            at = 0 if layout.lies_on_one_node(cluster) else min(number, len(cost.shards) - 1)
            parts = [cost.everywhere, *cost.shards[at : at + 1]]  # no shard of a table that is on every rank
            replicated_ms, *shard_ms = (part.lookup_ms for part in parts)
            exchange_ms = sum(part.exchange_ms(cluster.world_size - 1) for part in parts)
            num_bytes = round(sum(part.num_bytes for part in parts))
            host_bytes = sum(part.storage.host for part in parts)
            perf = Perf(replicated_ms + cost.all_reduce_ms + sum(shard_ms), exchange_ms, 0, 0)
            yield perf, Storage(0, num_bytes) if cluster.device.kind == "cpu" else Storage(num_bytes, host_bytes)

    def _add_starts(self, options: Sequence[ShardingOption], start_ms: Mapping[str, float]) -> None:
        """Adds the start of an exchange to the shards that need another one than most tables.

        A step starts the exchange of each sharding type in use once, but TorchRec adds up shards. So the type by which
            a
        collection alone would be fastest counts as used, and a table of another type pays the start of its exchange.
        """
        by_table = defaultdict[str, list[ShardingOption]](list)
        for option in options:
            by_table[option.name].append(option)

        def milliseconds(used: str) -> float:
            fastest = []
            for own in by_table.values():
                possible = [option for option in own if option.sharding_type in (used, _DATA_PARALLEL)] or own
                shards = [[float(shard.perf.total) for shard in option.shards if shard.perf] for option in possible]
                fastest.append(min(shards, key=sum))
            means = sum(sum(shards) / self._cluster.world_size for shards in fastest)
            return start_ms.get(used, 0.0) + max(means, *(ms for shards in fastest for ms in shards))

        used = min((*sorted(start_ms), _DATA_PARALLEL), key=milliseconds)
        for option in options:
            if option.sharding_type not in (used, _DATA_PARALLEL):
                for shard in option.shards:
                    assert shard.perf is not None
                    shard.perf.fwd_comms += start_ms[option.sharding_type]


def _sharders(data: SharderDataMap) -> Iterator[ModuleSharder[Any]]:
    """Yields sharders with the settings of those that the planner was given."""
    for sharder in default_sharders():
        own = data.get(sharder_name(sharder.module_type))
        if own is None:
            yield sharder
        else:
            sizes = next(iter(own.qcomm_dtype_sizes.values()), (4, 4))
            comms = QuantizedCommsConfig(*(_PRECISIONS.get(size, "fp32") for size in sizes))
            yield type(sharder)(own.fused_params, codecs_registry(comms))
