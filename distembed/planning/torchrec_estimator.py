"""Our milliseconds and bytes of a shard as estimates for TorchRec's own planner.

Trade-off: :class:`~distembed.planning.CompositionalShardingPlanner` sees which lookups share a group and counts the
memory of a whole step. The estimator leaves the search to TorchRec, which adds up shards one by one.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Perf,
    Shard,
    SharderDataMap,
    ShardEstimator,
    ShardingOption,
    Storage,
    Topology,
)
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.types import (
    ModuleSharder,
    ShardingType,
)

from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.exchange import CommPrecision, QuantizedCommsConfig
from distembed.errors import UserError
from distembed.names import one_of
from distembed.planning.costs import Layout, PlacementCosts, divided_table
from distembed.planning.fastest.problem import Option
from distembed.planning.request import PlanRequest
from distembed.planning.table_problem import PlannedTable, TableProblem, unit_sharding
from distembed.planning.torchrec_request import cache_load_factor, constrained_workload, planned_cluster, planner_errors
from distembed.planning.workload import Workload
from distembed.sharding import default_sharders
from distembed.sharding.exchange import codecs_registry
from distembed.sharding.groups import reason_not_fused
from distembed.sharding.placement import COMPUTE_KERNELS, place_table
from distembed.sharding.table_slice import width

_DATA_PARALLEL = ShardingType.DATA_PARALLEL.value
_PRECISIONS: dict[float, CommPrecision] = {4: "fp32", 2: "fp16", 1: "int8"}  # by bytes of a number
_REFUSED_MS, _REFUSED_BYTES = 1e12, 2**60
"""Estimates of a layout that sharding refuses, which no plan can hold."""


class CompositionalShardEstimator(ShardEstimator):
    """Estimates milliseconds and bytes of each shard for ``EmbeddingShardingPlanner``.

    It takes the place of both of TorchRec's estimators: ``EmbeddingEnumerator(topology, batch_size, constraints,
    estimator=CompositionalShardEstimator(topology, constraints))``. Composing, replicated partitions and the gradients
    of what is replicated are counted. A layout that sharding would refuse has an estimate that no plan can hold.

    Args:
        topology: Ranks, their memory and bandwidths.
        constraints: The constraints that the planner has, of which ids are read, by table name.
        device: As :class:`CompositionalShardingPlanner` has it.
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
        with planner_errors():
            batch_size = sharding_options[0].batch_size * self._cluster.world_size
            request = PlanRequest(modules, _sharders(sharder_data_map or {}), self._cluster, Workload(batch_size))
            tables = {table.name: (path, table) for path, own in request.tables_by_collection.items() for table in own}
            workload = constrained_workload(
                self._constraints, [table for _, table in tables.values()], batch_size, None
            )
            request = dataclasses.replace(
                request, workload=workload, cache_load_factor=cache_load_factor(self._constraints)
            )
            costs = PlacementCosts(request)
            problem, by_collection = TableProblem(request, costs), dict[str, list[ShardingOption]]()
            for sharding in sharding_options:
                path, table = tables[one_of("table", sharding.name, list(tables))]
                by_collection.setdefault(path, []).append(sharding)
                layout = _layout(sharding, table)
                is_possible = _is_possible(sharding, table, layout, request)
                option = problem.option(PlannedTable(table, path, [layout]), layout) if is_possible else None
                for number, shard in enumerate(sharding.shards):
                    shard.perf, shard.storage = self._of_shard(option, number)
        for path, options in by_collection.items():
            types = {option.sharding_type for option in options if self._is_exchanged(option)}
            self._add_starts(options, {name: costs.exchange_start_ms((path, name)) for name in types})

    def _is_exchanged(self, option: ShardingOption) -> bool:
        return self._cluster.world_size > 1 and option.sharding_type != _DATA_PARALLEL

    def _add_starts(self, options: Sequence[ShardingOption], start_ms: Mapping[str, float]) -> None:
        """Adds the start of an exchange to the shards that need it beside the exchange that most tables take part in.

        A step starts the exchange of each sharding type in use once, however many tables take part, and TorchRec adds
        up shards. So the type by which a collection would be fastest alone is taken as used. Each table of another type
        pays the start of its exchange, as the first table of it would.
        """
        by_table: dict[str, list[ShardingOption]] = {}
        for option in options:
            by_table.setdefault(option.name, []).append(option)

        def milliseconds(used: str) -> float:
            means, largest = 0.0, 0.0
            for own in by_table.values():
                possible = [option for option in own if option.sharding_type in (used, _DATA_PARALLEL)] or own
                shards = min(([_ms(shard) for shard in option.shards] for option in possible), key=sum)
                means, largest = means + sum(shards) / self._cluster.world_size, max(largest, *shards)
            return start_ms.get(used, 0.0) + max(means, largest)

        used = min((*sorted(start_ms), _DATA_PARALLEL), key=milliseconds)
        for option in options:
            if option.sharding_type not in (used, _DATA_PARALLEL):
                for shard in option.shards if self._is_exchanged(option) else ():
                    assert shard.perf is not None
                    shard.perf.fwd_comms += start_ms[option.sharding_type]

    def _of_shard(self, option: Option | None, number: int) -> tuple[Perf, Storage]:
        if option is None:
            refused = Storage(hbm=_REFUSED_BYTES, ddr=_REFUSED_BYTES)
            return Perf(fwd_compute=_REFUSED_MS, fwd_comms=0, bwd_compute=0, bwd_comms=0), refused
        parts = [option.everywhere]
        if option.blocks:
            # each range of columns of a grid has a shard on every rank of a node
            per_block = self._cluster.ranks_per_node if option.blocks[0].fills_node else 1
            parts.append(option.blocks[min(number // per_block, len(option.blocks) - 1)])
        perf = Perf(
            fwd_compute=sum(part.lookup_ms for part in parts),
            fwd_comms=sum(sum(part.own_ms) for part in parts),
            bwd_compute=0,
            bwd_comms=0,
        )
        num_bytes, host_bytes = (round(sum(getattr(part, of) for part in parts)) for of in ("num_bytes", "host_bytes"))
        is_cpu = self._cluster.device.kind == "cpu"
        return perf, Storage(hbm=0 if is_cpu else num_bytes, ddr=num_bytes if is_cpu else host_bytes)


def _sharders(data: SharderDataMap) -> list[ModuleSharder[Any]]:
    """Returns sharders with the settings of those that the planner was given."""
    sharders: list[ModuleSharder[Any]] = []
    for sharder in default_sharders():
        own = data.get(sharder_name(sharder.module_type))
        if own is not None:
            sizes = next(iter(own.qcomm_dtype_sizes.values()), (4, 4))
            comms = QuantizedCommsConfig(*(_PRECISIONS.get(size, "fp32") for size in sizes))
            sharder = type(sharder)(own.fused_params, codecs_registry(comms))
        sharders.append(sharder)
    return sharders


def _ms(shard: Shard) -> float:
    assert shard.perf is not None
    return float(shard.perf.total)


def _layout(sharding: ShardingOption, table: CompositionalEmbeddingConfig) -> Layout:
    """Returns how an option divides a table."""
    columns = dict.fromkeys((own.offset[1], own.offset[1] + own.size[1]) for own in sharding.shards)
    ranges = ((0, width(table)),) if sharding.sharding_type == _DATA_PARALLEL else tuple(columns)
    return Layout(sharding.sharding_type, sharding.compute_kernel, ranges)


def _is_possible(
    sharding: ShardingOption, table: CompositionalEmbeddingConfig, layout: Layout, request: PlanRequest
) -> bool:
    """Returns whether sharding takes a table in a layout."""
    cluster, optimizer = request.cluster, request.table_optimizers.for_table(table).sparse
    if layout.compute_kernel not in COMPUTE_KERNELS:
        return False
    ranks = [number % cluster.world_size for number in range(len(sharding.shards))]
    try:
        place_table(table, unit_sharding(table, layout, ranks, cluster), cluster.world_size)
    except UserError:
        return False
    slices, _ = divided_table(table, layout)
    return table.kernel != "fused" or not any(reason_not_fused(own, cluster.device.kind, optimizer) for own in slices)
