"""The search of ``distembed plan`` as TorchRec's planner.

It reads the arguments of ``EmbeddingShardingPlanner``: a ``Topology``, the batch size of one rank,
``ParameterConstraints`` and a storage reservation. A setting that cannot be honoured is refused by name.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import distributed as dist
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    StorageReservation,
    Topology,
)
from torchrec.distributed.types import (
    ModuleSharder,
    ShardingPlan,
    ShardingPlanner,
)

from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.tables import CompositionalTables
from distembed.errors import UserError
from distembed.names import one_of
from distembed.planning.cluster import Cluster
from distembed.planning.config import PlanConfig, TablePlanConfig
from distembed.planning.estimated_plan import EstimatedPlan
from distembed.planning.networks import NetworkEstimate
from distembed.planning.plan import find_plan, step_does_not_fit
from distembed.planning.request import PlanRequest
from distembed.planning.torchrec_request import cache_load_factor, constrained_workload, planned_cluster, planner_errors
from distembed.planning.workload import Workload
from distembed.ranks import Collectives
from distembed.sharding import default_sharders
from distembed.sharding.placement import COMPUTE_KERNELS, IN_HOST_MEMORY, SHARDING_TYPES, WITHIN_NODES
from distembed.sharding.table_slice import is_pooled

_PASSED_ON = ("cache_params", "enforce_hbm", "stochastic_rounding", "bounds_check_mode")
"""Constraints that sharded modules read from the plan."""
_READ = (*_PASSED_ON, "sharding_types", "compute_kernels", "min_partition", "pooling_factors", "is_weighted")


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
        with planner_errors():
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
        cluster = planned_cluster(topology, self._device)
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
        workload = constrained_workload(self._constraints, tables, self._batch_size * cluster.world_size, network)
        return dataclasses.replace(
            request, workload=workload, config=config, cache_load_factor=cache_load_factor(self._constraints)
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
