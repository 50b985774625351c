"""The search of ``distembed plan`` as TorchRec's planner, and our estimates for TorchRec's own planner.

It reads the arguments of ``EmbeddingShardingPlanner``: a ``Topology``, the batch size of one rank,
``ParameterConstraints`` and a storage reservation. A setting that cannot be honoured is refused by name.

:class:`CompositionalShardingPlanner` knows which lookups share a group and counts the memory of a whole step.
:class:`CompositionalShardEstimator` leaves the search to TorchRec, which adds up shards one by one.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError
from torch import distributed as dist
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Perf,
    PlannerError,
    PlannerErrorType,
    SharderDataMap,
    ShardEstimator,
    ShardingOption,
    Storage,
    StorageReservation,
    Topology,
)
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.types import ModuleSharder, ShardingPlan, ShardingPlanner, ShardingType

from distembed.base.errors import InsufficientMemory, UserError
from distembed.base.names import one_of
from distembed.base.ranks import Collectives
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.settings import CommPrecision, QuantizedCommsConfig
from distembed.embedding.tables import CompositionalTables
from distembed.planning.config import PlanConfig, TablePlanConfig
from distembed.planning.costs import Layout, PlacementCosts
from distembed.planning.devices import DEVICES, Cluster, find_device
from distembed.planning.layouts import Layouts
from distembed.planning.networks import NetworkEstimate
from distembed.planning.request import PlanRequest, Workload
from distembed.planning.search import EstimatedPlan, find_plan, require_fitting_plan
from distembed.planning.table_problem import PlannedTable, TableProblem, unit_sharding
from distembed.sharding import default_sharders
from distembed.sharding.placement import COMPUTE_KERNELS, IN_HOST_MEMORY, SHARDING_TYPES, WITHIN_NODES, place_table
from distembed.sharding.sharder import codecs_registry
from distembed.sharding.table_slice import is_pooled


@contextmanager
def planner_errors() -> Iterator[None]:
    """Turns errors of memory, of input and of validation within the block into TorchRec's ``PlannerError``."""
    try:
        yield
    except (InsufficientMemory, UserError) as error:
        is_memory, types = isinstance(error, InsufficientMemory), PlannerErrorType
        raise PlannerError(str(error), types.INSUFFICIENT_STORAGE if is_memory else types.INPUT_VALIDATION) from error
    except ValidationError as error:
        mistakes = "; ".join(
            f"{'.'.join(map(str, mistake['loc']))} is {mistake['input']!r}: {mistake['msg']}"
            for mistake in error.errors()
        )
        raise PlannerError(f"A constraint is impossible: {mistakes}.", PlannerErrorType.INPUT_VALIDATION) from error


def planned_cluster(topology: Topology, device_name: str | None) -> Cluster:
    """Returns a topology's cluster; refuses nodes of different sizes and devices that do not match (``UserError``).

    Speeds are the named device's; else the nearest catalogue device's, with the topology's bandwidths (bytes per ms).
    """
    kind, world_size, ranks_per_node = topology.compute_device, topology.world_size, topology.local_world_size
    if kind not in ("cpu", "cuda"):
        raise UserError(f"Topology has compute_device={kind!r}; compositional tables are on cpu or cuda.")
    if world_size % ranks_per_node or topology.intra_group_size != ranks_per_node:
        raise UserError(
            f"Topology has {world_size} ranks, local_world_size={ranks_per_node} and a fast network among "
            f"{topology.intra_group_size} ranks; nodes need as many ranks each, and pod_size is to be left out."
        )
    is_cpu = kind == "cpu"
    hbm, ddr = (tuple(max(0, getattr(rank.storage, name)) for rank in topology.devices) for name in ("hbm", "ddr"))
    memory = ddr if is_cpu else hbm
    memory_bytes = max(memory) * (ranks_per_node if is_cpu else 1)
    if device_name is not None:
        device = dataclasses.replace(find_device(device_name, "device"), memory_bytes=memory_bytes)
        if device.kind != kind:
            raise UserError(f"device={device_name!r} is a {device.kind} device, and the topology's are {kind}.")
    else:
        alike = [known for known in DEVICES.values() if known.kind == kind]
        device = min(alike, key=lambda known: abs(known.memory_bytes - memory_bytes))
        bandwidth = 1e3 * (topology.ddr_mem_bw if is_cpu else topology.hbm_mem_bw)
        faster = bandwidth / device.memory_bandwidth  # also scales the bandwidths that a topology does not give
        device = dataclasses.replace(
            device,
            memory_bytes=memory_bytes,
            memory_bandwidth=bandwidth,
            lookup_bandwidth=faster * device.lookup_bandwidth,
            reduce_bandwidth=faster * device.reduce_bandwidth,
            host_bandwidth=1e3 * topology.hbm_to_ddr_mem_bw,
            local_bandwidth=1e3 * topology.intra_host_bw,
            node_bandwidth=1e3 * topology.inter_host_bw,
        )
    nodes = world_size // ranks_per_node
    return Cluster(device, nodes, ranks_per_node, memory_by_rank=memory, host_memory_by_rank=() if is_cpu else ddr)


def constrained_request(
    model: nn.Module,
    sharders: Sequence[ModuleSharder[Any]],
    cluster: Cluster,
    batch_size: int,
    constraints: Mapping[str, ParameterConstraints],
) -> PlanRequest:
    """Returns a request for ``batch_size`` rows a rank; ids per row, weights and cache ratio are the constraints'.

    Refuses pooling factors that do not match a table's features, and different cache ratios (``UserError``).
    """
    if batch_size < 1:
        raise UserError(f"batch_size is {batch_size}; give the rows of one rank's batch, 1 or more.")
    request = PlanRequest(model, sharders, cluster, Workload(batch_size * cluster.world_size))
    if not request.tables_by_collection:
        raise UserError("No sharder takes a collection of the model; add the sharders that default_sharders() returns.")
    ids_per_row, weighted = dict[str, float](), set[str]()
    for table in (table for tables in request.tables_by_collection.values() for table in tables):
        constraint, features = constraints.get(table.name, ParameterConstraints()), table.feature_names
        factors = constraint.pooling_factors
        factors = factors * len(features) if len(factors) == 1 else factors
        if len(factors) != len(features):
            raise UserError(
                f"ParameterConstraints of table {table.name!r}: pooling_factors has {len(factors)} numbers, and the "
                f"table has {len(features)} features; give a number for each."
            )
        if not all(0 <= factor < math.inf for factor in factors):
            raise UserError(
                f"ParameterConstraints of table {table.name!r}: pooling_factors is {constraint.pooling_factors}; give "
                "numbers of ids, 0 or more."
            )
        ids_per_row |= dict(zip(features, factors, strict=True))
        weighted |= {*features} if constraint.is_weighted else set()
    caches = [limits.cache_params for limits in constraints.values()]
    ratios = {cache.load_factor for cache in caches if cache is not None} - {None}
    if len(ratios) > 1:
        raise UserError(
            f"ParameterConstraints have cache_params with load_factor {sorted(ratios)}; give all tables one."
        )
    workload = dataclasses.replace(request.workload, ids_per_row=ids_per_row, weighted=frozenset(weighted))
    return dataclasses.replace(request, workload=workload, cache_load_factor=next(iter(ratios), None))


_PASSED_ON = ("cache_params", "enforce_hbm", "stochastic_rounding", "bounds_check_mode")
"""Constraints that the planner copies into the plan, where sharded modules read them."""
_READ = (*_PASSED_ON, "sharding_types", "compute_kernels", "min_partition", "pooling_factors", "is_weighted")


class CompositionalShardingPlanner(ShardingPlanner):
    """Plans as ``distembed plan`` does, wherever TorchRec takes a planner or its plan.

    Args:
        topology: Ranks, their memory, which may differ by rank, and bandwidths; multipliers of TorchRec's own estimates
            are not read.
        batch_size: Rows of a step on one rank, as in TorchRec's planner.
        constraints: How tables may be placed, and their ids, by table name.
        storage_reservation: Memory of each rank that is kept free; 15% unless given.
        ranks: Ranks that a table is pinned to, by table name.
        together: Groups of table names; the tables of a group lie on the same ranks, in equally many shards.
        device: Catalogue device or device file that gives speeds and bandwidths. Unless given, the catalogue device
            with the nearest memory, with the topology's bandwidths.

    Attributes:
        estimated: The last plan with each rank's memory and time, and the reasons for it; None before the first.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        storage_reservation: StorageReservation | None = None,
        ranks: Mapping[str, Sequence[int]] | None = None,
        together: Sequence[Sequence[str]] = (),
        device: str | None = None,
    ) -> None:
        self._topology, self._device = topology, device
        self._batch_size = BATCH_SIZE if batch_size is None else batch_size
        self._constraints, self._storage_reservation = dict(constraints or {}), storage_reservation
        self._ranks, self._together = dict(ranks or {}), [list(group) for group in together]
        self.estimated: EstimatedPlan | None = None

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[Any]]) -> ShardingPlan:
        """Returns the fastest plan that was found to fit.

        Raises:
            PlannerError: No plan fits, or a setting cannot be honoured; the message has the remedy.
        """
        with planner_errors():
            self.estimated = find_plan(self._request(module, sharders))
            plan = require_fitting_plan(self.estimated)
        for tables in plan.plan.values():
            for name in tables.keys() & self._constraints.keys():
                for field in _PASSED_ON:
                    setattr(tables[name], field, getattr(self._constraints[name], field))
        return plan

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[Any]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Plans on rank 0 and returns its plan, or raises its error, on every rank; all ranks call it."""
        return Collectives(pg).on_first(lambda: self.plan(module, default_sharders() if sharders is None else sharders))

    def _request(self, module: nn.Module, sharders: list[ModuleSharder[Any]]) -> PlanRequest:
        topology, network, reserve = self._topology, None, PlanConfig().reserve
        if self._storage_reservation is not None:
            # the reservation's topology has less memory: networks and free memory are subtracted already
            reserved_topology = self._storage_reservation.reserve(
                topology, self._batch_size, module, sharders, self._constraints
            )
            topology, network, reserve = reserved_topology, NetworkEstimate(), 0.0
        cluster = planned_cluster(topology, self._device)
        request = constrained_request(module, sharders, cluster, self._batch_size, self._constraints)
        if unknown := request.exchanges.keys() - request.tables_by_collection.keys():
            kinds = [f"{type(module.get_submodule(path)).__name__} {path!r}" for path in sorted(unknown)]
            raise UserError(
                f"the planner does not know {', '.join(kinds)}: it places EmbeddingBagCollection, EmbeddingCollection "
                "and the compositional ones. Leave out its sharder."
            )
        tables = {
            table.name: (path, table)
            for path, reserved_topology in request.tables_by_collection.items()
            for table in reserved_topology
        }
        for argument, names in (("constraints", self._constraints), ("ranks", self._ranks)):
            for name in names:
                one_of(argument, name, tables)
        sharder_of = {sharder.module_type: sharder for sharder in sharders}
        configs = {
            name: self._table_config(table, sharder_of[type(module.get_submodule(path))], cluster)
            for name, (path, table) in tables.items()
        }
        return dataclasses.replace(
            request,
            config=PlanConfig(reserve=reserve, together=self._together, tables=configs),
            workload=dataclasses.replace(request.workload, network=network),
        )

    def _table_config(
        self, table: CompositionalEmbeddingConfig, sharder: ModuleSharder[Any], cluster: Cluster
    ) -> TablePlanConfig:
        """Returns a table's settings: its constraints, limited to the types and kernels that its sharder allows."""
        constraint, device_kind = self._constraints.get(table.name, ParameterConstraints()), cluster.device.kind
        _refuse_unread(table, constraint, self._batch_size, device_kind)
        possible = [name for name in sharder.sharding_types(device_kind) if name in SHARDING_TYPES]
        default_types = ["table_wise"] if cluster.world_size == 1 else ["table_wise", "row_wise", "data_parallel"]
        if is_pooled(table) and cluster.world_size > 1:
            default_types += ["column_wise", *(WITHIN_NODES if min(cluster.nodes, cluster.ranks_per_node) > 1 else ())]
        types: Any = None
        if constraint.sharding_types or not {*default_types} <= {*possible}:
            types = _common(table.name, "sharding_types", constraint.sharding_types or default_types, possible)
        by_sharder = {kernel for name in possible for kernel in sharder.compute_kernels(name, device_kind)}
        kernels: Any = [name for name in COMPUTE_KERNELS if name in by_sharder | {EmbeddingComputeKernel.DENSE.value}]
        if constraint.compute_kernels:
            kernels = _common(table.name, "compute_kernels", constraint.compute_kernels, kernels)
        elif not issubclass(sharder.module_type, CompositionalTables):
            # TorchRec's sharders always allow host memory; here a constraint has to name it
            kernels = [name for name in kernels if name not in IN_HOST_MEMORY]
        ranks = list(self._ranks[table.name]) if table.name in self._ranks else None
        return TablePlanConfig(types, constraint.min_partition, ranks, kernels)


def _refuse_unread(
    table: CompositionalEmbeddingConfig, constraint: ParameterConstraints, batch_size: int, device_kind: str
) -> None:
    """Raises a ``UserError`` for a constraint that this planner does not read, unless its value changes nothing."""
    default = vars(ParameterConstraints())
    changes_nothing = {
        "num_poolings": set(constraint.num_poolings or ()) <= {1},
        "batch_sizes": set(constraint.batch_sizes or ()) <= {batch_size},
        "feature_names": constraint.feature_names == list(table.feature_names),
        "device_group": constraint.device_group == device_kind,
    }
    for field, value in vars(constraint).items():
        if field not in _READ and value not in (None, default[field]) and not changes_nothing.get(field):
            is_output = field == "output_dtype"
            remedy = "set it in the sharder's fused_params, for all tables" if is_output else "leave it out"
            raise UserError(
                f"ParameterConstraints of table {table.name!r}: {field}={value!r} cannot be honoured; {remedy}, or "
                "plan with EmbeddingShardingPlanner."
            )


def _common(name: str, field: str, constrained: Sequence[str], possible: Sequence[str]) -> list[str]:
    """Returns the values of a table's constraint that its sharder allows, or raises a ``UserError``."""
    if common := [value for value in dict.fromkeys(constrained) if value in possible]:
        return common
    raise UserError(
        f"ParameterConstraints of table {name!r}: {field}={list(constrained)} has none of its sharder's "
        f"{', '.join(possible)}; allow one of them."
    )


_DATA_PARALLEL = ShardingType.DATA_PARALLEL.value
_PRECISIONS: dict[float, CommPrecision] = {4: "fp32", 2: "fp16", 1: "int8"}  # by bytes of a number
_REFUSED_MS, _REFUSED_BYTES = 1e12, 2**60
"""Estimates of a layout that sharding refuses, which no plan can hold."""


class CompositionalShardEstimator(ShardEstimator):
    """Estimates milliseconds and bytes of each shard for ``EmbeddingShardingPlanner``.

    It replaces both of TorchRec's estimators: ``EmbeddingEnumerator(topology, batch_size, constraints,
    estimator=CompositionalShardEstimator(topology, constraints))``. Composing, replicated partitions and their
    gradients count too. A layout that sharding would refuse has an estimate that no plan can hold.

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
        """Sets ``perf`` and ``storage`` of every shard of the options, which may belong to several modules."""
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
        """Yields time and bytes of each shard; huge ones where sharding refuses the layout."""
        columns = dict.fromkeys((shard.offset[1], shard.offset[1] + shard.size[1]) for shard in sharding.shards)
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
            cost_index = 0 if layout.lies_on_one_node(cluster) else min(number, len(cost.shards) - 1)
            shard_costs = [
                cost.everywhere,
                *cost.shards[cost_index : cost_index + 1],
            ]  # no shard of a table that is on every rank
            replicated_ms, *shard_ms = (shard_cost.lookup_ms for shard_cost in shard_costs)
            exchange_ms = sum(shard_cost.exchange_ms(cluster.world_size - 1) for shard_cost in shard_costs)
            num_bytes = round(sum(shard_cost.num_bytes for shard_cost in shard_costs))
            host_bytes = sum(shard_cost.storage.host for shard_cost in shard_costs)
            perf = Perf(replicated_ms + cost.all_reduce_ms + sum(shard_ms), exchange_ms, 0, 0)
            yield perf, Storage(0, num_bytes) if cluster.device.kind == "cpu" else Storage(num_bytes, host_bytes)

    def _add_starts(self, options: Sequence[ShardingOption], start_ms: Mapping[str, float]) -> None:
        """Adds the start of its exchange to each shard whose sharding type is not the collection's fastest type.

        A step starts each type's exchange once for all tables, but TorchRec sums shards. So the exchange of the type by
        which the collection alone would be fastest counts as started, and shards of other types pay for theirs.
        """
        by_table = defaultdict[str, list[ShardingOption]](list)
        for option in options:
            by_table[option.name].append(option)

        def milliseconds(used: str) -> float:
            fastest = []
            for options_of_table in by_table.values():
                started = [option for option in options_of_table if option.sharding_type in (used, _DATA_PARALLEL)]
                possible = started or options_of_table
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
    """Yields the default sharders, each with the settings of the planner's sharder for its module, if there is one."""
    for sharder in default_sharders():
        settings = data.get(sharder_name(sharder.module_type))
        if settings is None:
            yield sharder
        else:
            sizes = next(iter(settings.qcomm_dtype_sizes.values()), (4, 4))
            comms = QuantizedCommsConfig(*(_PRECISIONS.get(size, "fp32") for size in sizes))
            yield type(sharder)(settings.fused_params, codecs_registry(comms))
