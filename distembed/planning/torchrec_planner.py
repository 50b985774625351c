"""The search as TorchRec's planner, and its costs as estimates for TorchRec's own planner.

Both read the arguments of ``EmbeddingShardingPlanner``: a ``Topology``, the batch size of one rank and
``ParameterConstraints``; the planner a storage reservation too. A setting that cannot be honoured is refused by name.

Trade-off: :class:`CompositionalShardingPlanner` sees what lookups share and counts the memory of a whole step.
:class:`CompositionalShardEstimator` leaves the search to TorchRec, which adds up shards one by one.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import distributed as dist
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Perf,
    PlannerError,
    PlannerErrorType,
    Shard,
    SharderDataMap,
    ShardEstimator,
    ShardingOption,
    Storage,
    StorageReservation,
    Topology,
)
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.types import (
    ModuleSharder,
    ShardingPlan,
    ShardingPlanner,
    ShardingType,
)

from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.exchange import CommPrecision, QuantizedCommsConfig
from distembed.embedding.tables import CompositionalTables
from distembed.errors import InsufficientMemory, UserError
from distembed.names import one_of
from distembed.planning.cluster import Cluster
from distembed.planning.config import PlanConfig, TablePlanConfig
from distembed.planning.costs import Layout, PlacementCosts, divided_table
from distembed.planning.devices import DEVICES, find_device
from distembed.planning.estimated_plan import EstimatedPlan
from distembed.planning.fastest.problem import Option
from distembed.planning.networks import NetworkEstimate
from distembed.planning.plan import find_plan, step_does_not_fit
from distembed.planning.request import PlanRequest
from distembed.planning.table_problem import PlannedTable, TableProblem, unit_sharding
from distembed.planning.workload import Workload
from distembed.ranks import Collectives
from distembed.sharding import default_sharders
from distembed.sharding.exchange import codecs_registry
from distembed.sharding.groups import reason_not_fused
from distembed.sharding.placement import COMPUTE_KERNELS, IN_HOST_MEMORY, SHARDING_TYPES, WITHIN_NODES, place_table
from distembed.sharding.table_slice import is_pooled, width

_PASSED_ON = ("cache_params", "enforce_hbm", "stochastic_rounding", "bounds_check_mode")
"""Constraints that sharded modules read from the plan."""
_READ = (*_PASSED_ON, "sharding_types", "compute_kernels", "min_partition", "pooling_factors", "is_weighted")
_DATA_PARALLEL = ShardingType.DATA_PARALLEL.value
_PRECISIONS: dict[float, CommPrecision] = {4: "fp32", 2: "fp16", 1: "int8"}  # by bytes of a number
_REFUSED_MS, _REFUSED_BYTES = 1e12, 2**60
"""Estimates of a layout that sharding refuses, which no plan can hold."""


class CompositionalShardingPlanner(ShardingPlanner):
    """Plans as ``distembed plan`` does, wherever TorchRec takes a planner or its plan.

    Args:
        topology: Ranks, their memory, which may differ from rank to rank, and bandwidths; the multipliers of TorchRec's
            own estimates are not read.
        batch_size: Rows of a step on one rank, as TorchRec's planner takes them.
        constraints: Ways in which a table may be placed, and its ids, by table name.
        storage_reservation: What is kept free of each rank's memory; unless given, 15% of it.
        ranks: Ranks that a table is pinned to, by table name.
        together: Groups of tables, by name, that lie on the same ranks in as many shards.
        device: Device of the catalogue, or device file, that ranks compute like, bandwidths included. Unless given,
            the catalogue's with the memory nearest to theirs, with the topology's bandwidths.

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
        self._topology, self._batch_size, self._device = topology, batch_size or BATCH_SIZE, device
        self._constraints, self._storage_reservation = dict(constraints or {}), storage_reservation
        self._ranks, self._together = dict(ranks or {}), [list(group) for group in together]
        self.estimated: EstimatedPlan | None = None

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[Any]]) -> ShardingPlan:
        """Returns the fastest plan that was found to fit.

        Raises:
            PlannerError: No plan fits, or a setting cannot be honoured; the message has the remedy.
        """
        with _as_planner_errors():
            request = self._request(module, sharders)
            self.estimated = find_plan(request)
            if not self.estimated.fits:
                raise step_does_not_fit(self.estimated)
            for tables in self.estimated.plan.plan.values():
                for name, sharding in tables.items():
                    for field in _PASSED_ON if name in self._constraints else ():
                        setattr(sharding, field, getattr(self._constraints[name], field))
        return self.estimated.plan

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[Any]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Plans on rank 0 and returns the same plan, or raises the same error, on every rank; all ranks call it."""
        return Collectives(pg).on_first(lambda: self.plan(module, default_sharders() if sharders is None else sharders))

    def _request(self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]]) -> PlanRequest:
        topology, network, reserve = self._topology, None, PlanConfig().reserve
        if self._storage_reservation is not None:
            # what is reserved has room for the networks too
            topology = self._storage_reservation.reserve(
                topology, self._batch_size, module, list(sharders), self._constraints
            )
            network, reserve = NetworkEstimate(), 0.0
        cluster = _cluster(topology, self._device)
        request = PlanRequest(module, sharders, cluster, Workload(self._batch_size * topology.world_size))
        if unknown := request.exchanges.keys() - request.tables_by_collection.keys():
            kinds = {path: type(module.get_submodule(path)).__name__ for path in sorted(unknown)}
            raise UserError(
                f"the planner does not know {', '.join(f'{kind} {path!r}' for path, kind in kinds.items())}: it places "
                "EmbeddingBagCollection, EmbeddingCollection and the compositional ones. Leave out its sharder."
            )
        tables = [table for own in request.tables_by_collection.values() for table in own]
        for argument, names in (("constraints", self._constraints), ("ranks", self._ranks)):
            for name in names:
                one_of(argument, name, [table.name for table in tables])
        sharder_of = {sharder.module_type: sharder for sharder in sharders}
        config = PlanConfig(
            reserve=reserve,
            together=self._together,
            tables={
                table.name: self._table_config(table, sharder_of[type(module.get_submodule(path))], cluster)
                for path, own in request.tables_by_collection.items()
                for table in own
            },
        )
        workload = _workload(self._constraints, tables, self._batch_size * cluster.world_size, network)
        return dataclasses.replace(
            request, workload=workload, config=config, cache_load_factor=_load_factor(self._constraints)
        )

    def _table_config(
        self, table: CompositionalEmbeddingConfig, sharder: ModuleSharder[Any], cluster: Cluster
    ) -> TablePlanConfig:
        """Returns the ways in which a table may be placed, as its constraints and its sharder have it."""
        own, kind = self._constraints.get(table.name, ParameterConstraints()), cluster.device.kind
        _refuse_unread(table, own, self._batch_size, kind)
        possible = [name for name in sharder.sharding_types(kind) if name in SHARDING_TYPES]
        usual = ["table_wise"] if cluster.world_size == 1 else ["table_wise", "row_wise", "data_parallel"]
        if is_pooled(table) and cluster.world_size > 1:
            usual += ["column_wise", *(WITHIN_NODES if min(cluster.nodes, cluster.ranks_per_node) > 1 else ())]
        types = None
        if own.sharding_types or not {*usual} <= {*possible}:
            types = _common(table, "sharding_types", own.sharding_types or usual, possible)
        by_sharder = {kernel for name in possible for kernel in sharder.compute_kernels(name, kind)}
        kernels = [name for name in COMPUTE_KERNELS if name in by_sharder | {EmbeddingComputeKernel.DENSE.value}]
        if own.compute_kernels:
            kernels = _common(table, "compute_kernels", own.compute_kernels, kernels)
        elif not issubclass(sharder.module_type, CompositionalTables):
            # TorchRec's sharders allow host memory unasked
            kernels = [name for name in kernels if name not in IN_HOST_MEMORY]
        ranks = self._ranks.get(table.name)
        return TablePlanConfig(
            types,  # type: ignore[arg-type]
            own.min_partition,
            None if ranks is None else list(ranks),
            kernels,
        )


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
        with _as_planner_errors():
            self._cluster = _cluster(topology, device)

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: SharderDataMap | None = None) -> None:
        """Sets the estimates of all shards of some options, which may be of several modules."""
        if not sharding_options:
            return
        modules = nn.ModuleList({id(option.module[1]): option.module[1] for option in sharding_options}.values())
        with _as_planner_errors():
            batch_size = sharding_options[0].batch_size * self._cluster.world_size
            request = PlanRequest(modules, _sharders(sharder_data_map or {}), self._cluster, Workload(batch_size))
            tables = {table.name: (path, table) for path, own in request.tables_by_collection.items() for table in own}
            workload = _workload(self._constraints, [table for _, table in tables.values()], batch_size, None)
            request = dataclasses.replace(request, workload=workload, cache_load_factor=_load_factor(self._constraints))
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


@contextmanager
def _as_planner_errors() -> Iterator[None]:
    """Raises TorchRec's ``PlannerError`` with our message."""
    try:
        yield
    except InsufficientMemory as error:
        raise PlannerError(str(error), PlannerErrorType.INSUFFICIENT_STORAGE) from error
    except UserError as error:
        raise PlannerError(str(error), PlannerErrorType.INPUT_VALIDATION) from error


def _cluster(topology: Topology, device_name: str | None) -> Cluster:
    """Returns the cluster of a topology; bandwidths are bytes a millisecond there, and a second here."""
    kind, world_size, ranks_per_node = topology.compute_device, topology.world_size, topology.local_world_size
    if kind not in ("cpu", "cuda"):
        raise UserError(f"Topology has compute_device={kind!r}; compositional tables are on cpu or cuda.")
    if world_size % ranks_per_node or topology.intra_group_size != ranks_per_node:
        raise UserError(
            f"Topology has {world_size} ranks, local_world_size={ranks_per_node} and a fast network among "
            f"{topology.intra_group_size} ranks; nodes need as many ranks each, and pod_size is to be left out."
        )
    hbm, ddr = ([max(0, getattr(own.storage, name)) for own in topology.devices] for name in ("hbm", "ddr"))
    of_rank = ddr if kind == "cpu" else hbm
    memory_bytes = max(of_rank) * (ranks_per_node if kind == "cpu" else 1)
    if device_name is not None:
        device = dataclasses.replace(find_device(device_name, "device"), memory_bytes=memory_bytes)
        if device.kind != kind:
            raise UserError(f"device={device_name!r} is a {device.kind} device, and the topology's are {kind}.")
    else:
        alike = [own for own in DEVICES.values() if own.kind == kind]
        device = min(alike, key=lambda own: abs(own.memory_bytes - memory_bytes))
        bandwidth = 1e3 * (topology.ddr_mem_bw if kind == "cpu" else topology.hbm_mem_bw)
        faster = bandwidth / device.memory_bandwidth
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
    return Cluster(
        device,
        world_size // ranks_per_node,
        ranks_per_node,
        memory_by_rank=tuple(of_rank),
        host_memory_by_rank=() if kind == "cpu" else tuple(ddr),
    )


def _workload(
    constraints: Mapping[str, ParameterConstraints],
    tables: Sequence[CompositionalEmbeddingConfig],
    batch_size: int,
    network: NetworkEstimate | None,
) -> Workload:
    """Returns the rows of a step on all ranks and their ids, as constraints have them."""
    ids_per_row, weighted = dict[str, float](), set[str]()
    for table in tables:
        own, features = constraints.get(table.name, ParameterConstraints()), list(table.feature_names)
        factors = own.pooling_factors * len(features) if len(own.pooling_factors) == 1 else own.pooling_factors
        if len(factors) != len(features):
            raise UserError(
                f"ParameterConstraints of table {table.name!r}: pooling_factors has {len(factors)} numbers, and the "
                f"table has {len(features)} features; give a number for each."
            )
        ids_per_row |= dict(zip(features, factors, strict=True))
        weighted |= {*features} if own.is_weighted else set()
    return Workload(batch_size, ids_per_row, network=network, weighted=frozenset(weighted))


def _load_factor(constraints: Mapping[str, ParameterConstraints]) -> float | None:
    """Returns the share of rows that caches of tables in host memory hold; None where no constraint says it."""
    factors = {own.cache_params.load_factor for own in constraints.values() if own.cache_params is not None} - {None}
    if len(factors) > 1:
        raise UserError(
            f"ParameterConstraints have cache_params with load_factor {sorted(factors)}; give all tables one."
        )
    return next(iter(factors), None)


def _refuse_unread(
    table: CompositionalEmbeddingConfig, own: ParameterConstraints, batch_size: int, device_kind: str
) -> None:
    """Refuses a constraint that is not honoured, by name.

    Raises:
        UserError: There is one.
    """
    usual: dict[str, Callable[[Any], bool]] = {
        "num_poolings": lambda numbers: all(number == 1 for number in numbers),
        "batch_sizes": lambda sizes: all(size == batch_size for size in sizes),
        "feature_names": lambda names: names == list(table.feature_names),
        "device_group": lambda name: name == device_kind,
    }
    default = ParameterConstraints()
    for field in dataclasses.fields(own):
        value = getattr(own, field.name)
        is_default = value is None or value == getattr(default, field.name)
        if field.name in _READ or is_default or usual.get(field.name, lambda _: False)(value):
            continue
        remedy = (
            "set it in the sharder's fused_params, for all tables" if field.name == "output_dtype" else "leave it out"
        )
        raise UserError(
            f"ParameterConstraints of table {table.name!r}: {field.name}={value!r} cannot be honoured; {remedy}, or "
            "plan with EmbeddingShardingPlanner."
        )


def _common(
    table: CompositionalEmbeddingConfig, field: str, wanted: Sequence[str], possible: Sequence[str]
) -> list[str]:
    """Returns the names of a constraint that the table's sharder allows.

    Raises:
        UserError: There is none.
    """
    common = [name for name in dict.fromkeys(wanted) if name in possible]
    if not common:
        raise UserError(
            f"ParameterConstraints of table {table.name!r}: {field}={list(wanted)} has none of its sharder's "
            f"{', '.join(possible)}; allow one of them."
        )
    return common


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
