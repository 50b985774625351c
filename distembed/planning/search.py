"""The search for a plan: by time while tables are small for the ranks, else by bytes.

TorchRec's search looks for the fastest plan. It is asked first where ranks are few. If its plan fills a rank by more
than half, or ranks are many, tables are divided so that all ranks have about as many bytes
(:mod:`distembed.planning.balance`): with 1,000 tables on 1,024 GPUs TorchRec's leave one with 43 times the mean.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.constants import DEFAULT_PERF_ESTIMATOR
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.estimator import EmbeddingPerfEstimatorFactory
from torchrec.distributed.planner.proposers import GreedyProposer
from torchrec.distributed.planner.types import Partitioner, PlannerError, PlannerErrorType, Proposer, ShardingOption
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.errors import UserError
from distembed.names import one_of
from distembed.optim.declared import TableOptimizers
from distembed.optim.kinds import OPTIMIZERS
from distembed.planning.balance import BalancedPartitioner, Choice, Divisible, choose, why_divided
from distembed.planning.cluster import Cluster
from distembed.planning.config import PlanConfig, TablePlanConfig
from distembed.planning.estimator import OncePerSize, Reservation, StorageEstimator, tables_of
from distembed.planning.storage import function_storage, whole_table_storage
from distembed.planning.times import ComposedPerfEstimator
from distembed.planning.workload import Workload
from distembed.sharding.placement import can_be_placed, width

MANY_RANKS = 32
"""Ranks of which all get about as many bytes, whatever their memory."""
_ROOMY = 0.5
"""Share of its memory for tables up to which one of few ranks may have more than others."""
_BALANCED = 0.05
"""Share of their mean by which bytes of ranks may differ from it before tables are divided further."""
_DIVISORS = (1, 2, 4, 8, 16, 32)
"""Of a rank's share, to the widest ranges of columns."""
_TORCHREC_MIN_PARTITION = 128
_BY_COLUMNS = ("table_wise", "column_wise")
_BY_ROWS_TOO = (*_BY_COLUMNS, "row_wise")
_OWN_MEMORY = [EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.DENSE.value]


@dataclass(frozen=True)
class Found:
    """What came of one search.

    Attributes:
        answer: a plan, or why there is none.
        fullness: of the fullest rank, as a share of its memory for tables.
        imbalance: by what share of their mean some rank's tables' bytes differ from it, at most.
        options: what the planner chose, with ranks, memory and times.
        why: each table is placed so.
    """

    answer: ShardingPlan | Exception
    fullness: float = math.inf
    imbalance: float = math.inf
    options: Sequence[ShardingOption] = ()
    why: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_plan(self) -> bool:
        """Whether there is one."""
        return isinstance(self.answer, ShardingPlan)

    @property
    def is_hopeless(self) -> bool:
        """Whether all memory together is too little."""
        error = self.answer
        return isinstance(error, PlannerError) and error.error_type == PlannerErrorType.INSUFFICIENT_STORAGE


class Search:
    """Looks for a plan.

    Args:
        model: holds the tables, on the meta device.
        sharders: of the modules to place.
        cluster: to plan for.
        workload: what a step brings along.
        config: how tables may be placed.
        optimizers: what trains them.
        reserved_share: of each device's memory, that is kept free.
        reserved_bytes: of each device's memory beside that, for all but tables.

    Raises:
        UserError: for a table that does not exist, or that cannot be placed in any way that is allowed.
    """

    def __init__(
        self,
        model: nn.Module,
        sharders: list[ModuleSharder[Any]],
        cluster: Cluster,
        workload: Workload,
        config: PlanConfig,
        optimizers: TableOptimizers,
        reserved_share: float,
        reserved_bytes: int,
    ) -> None:
        self._model, self._sharders, self._cluster, self._workload = model, sharders, cluster, workload
        self._config, self._optimizers = config, optimizers
        self._reserved_share, self._reserved_bytes = reserved_share, reserved_bytes
        self._topology, self._batch_size = cluster.topology(), max(1, workload.rows_of_rank(cluster.world_size))
        self._tables = tables_of(model)
        one_rank = cluster.world_size == 1
        self._by_columns = possible_types(self._tables, config, _BY_COLUMNS)
        self._by_rows_too = self._by_columns if one_rank else possible_types(self._tables, config, _BY_ROWS_TOO)

    def best(self) -> Found:
        """A plan, or why there is none."""
        if self._topology.world_size >= MANY_RANKS:
            found = self.by_bytes(self._by_rows_too)
            return found if found.is_plan or not self._config.host_memory else self.by_time()
        by_time = self.by_time()
        if self._topology.world_size == 1 or by_time.fullness <= _ROOMY:
            return by_time
        # where ranks are few, that one has more than others is no reason to divide a table by rows
        by_bytes = self.by_bytes(self._by_columns)
        if not by_bytes.is_plan:
            by_bytes = self.by_bytes(self._by_rows_too)
        return by_time if by_time.is_plan and not by_bytes.is_plan else by_bytes

    def by_time(self) -> Found:
        """By TorchRec's search of what is fastest."""
        worth_trying = {table.name: self._worth_trying(table) for table in self._tables}
        constraints = {
            table.name: self._constraints(table, worth_trying[table.name], self._min_partition(table))
            for table in self._tables
        }
        found = self._plan(constraints, None, None)
        why = {
            name: "" if len(kinds) == 1 else f"fastest of {', '.join(kinds)}" for name, kinds in worth_trying.items()
        }
        return replace(found, why=self._why(why))

    def by_bytes(self, possible: Mapping[str, list[str]]) -> Found:
        """With tables divided until all ranks have about as many bytes.

        Args:
            possible: sharding types of each table.
        """
        world_size = self._topology.world_size
        divisible = {table.name: self._divisible(table, possible[table.name]) for table in self._tables}
        choices = choose(divisible, world_size, _DIVISORS[0])
        best, placed = self._divided(choices), choices
        for divisor in _DIVISORS[1:]:
            if best.imbalance <= _BALANCED or best.is_hopeless:
                break
            last, choices = choices, choose(divisible, world_size, divisor)
            found = self._divided(choices) if choices != last else best
            if found.imbalance <= best.imbalance:
                best, placed = found, choices
        why = why_divided(divisible, placed, world_size)
        return replace(best, why=self._why(why))

    def _why(self, found: Mapping[str, str]) -> dict[str, str]:
        """With the reason of those tables for which there was nothing to choose, and of torch's kernel."""
        why = {table.name: found[table.name] or self._only_choice(table) for table in self._tables}
        if self._optimizers.is_fused:
            return why
        trained = f"dense kernel: FBGEMM has no {self._optimizers.sparse}"
        return {name: f"{reason}; {trained}" for name, reason in why.items()}

    def _only_choice(self, table: CompositionalEmbeddingConfig) -> str:
        own = self._config.tables.get(table.name, TablePlanConfig()).sharding_types
        for name, allowed in ((f"plan.tables.{table.name}", own), ("plan", self._config.sharding_types)):
            if allowed:
                return f"of {', '.join(allowed)}, as {name}.sharding_types has it"
        if self._topology.world_size == 1:
            return "there is one rank"
        if not can_be_placed(table, "column_wise"):
            return f"{table.combine.name} needs all columns together"
        return (
            f"{width(table)} columns, and plan.min_partition is {self._min_partition(table) or _TORCHREC_MIN_PARTITION}"
        )

    def _divisible(self, table: CompositionalEmbeddingConfig, possible: list[str]) -> Divisible:
        optimizers = self._optimizers
        whole = whole_table_storage(table, optimizers.sparse, optimizers.dense, optimizers.is_fused)
        total = (whole - function_storage(table, optimizers.dense)).total
        of_rows = sum(part.num_rows for part in table.lookup_tables()) * OPTIMIZERS[optimizers.sparse].row_state_bytes
        return Divisible(width(table), total - of_rows, of_rows, possible, self._min_partition(table))

    def _divided(self, choices: Mapping[str, Choice]) -> Found:
        constraints = {
            table.name: self._constraints(
                table, [choices[table.name].sharding_type], choices[table.name].columns, _OWN_MEMORY
            )
            for table in self._tables
        }
        partitioner = BalancedPartitioner(self._estimator().table_bytes)
        found = self._plan(constraints, GreedyProposer(), partitioner)
        return replace(found, imbalance=partitioner.imbalance) if found.is_plan else found

    def _plan(
        self,
        constraints: dict[str, ParameterConstraints],
        proposer: Proposer | None,
        partitioner: Partitioner | None,
    ) -> Found:
        reservation = Reservation(self._reserved_share, self._tables, self._optimizers, self._reserved_bytes)
        plain = EmbeddingPerfEstimatorFactory.create(
            DEFAULT_PERF_ESTIMATOR, topology=self._topology, constraints=constraints
        )
        world_size, device = self._cluster.world_size, self._cluster.device
        time = ComposedPerfEstimator(plain, self._tables, world_size, device, self._workload.bf16)
        planner = EmbeddingShardingPlanner(
            topology=self._topology,
            batch_size=self._batch_size,
            constraints=constraints,
            enumerator=EmbeddingEnumerator(
                self._topology, self._batch_size, constraints, estimator=[OncePerSize(time), self._estimator()]
            ),
            proposer=proposer,
            partitioner=partitioner,
            storage_reservation=reservation,
            stats=[],
        )
        try:
            plan = planner.plan(self._model, self._sharders)
        except (PlannerError, RuntimeError) as error:
            return Found(error)
        options = planner._best_plan or []
        return Found(plan, reservation.fullness(options), options=options)

    def _estimator(self) -> StorageEstimator:
        return StorageEstimator(self._topology, self._tables, self._optimizers)

    def _constraints(
        self,
        table: CompositionalEmbeddingConfig,
        sharding_types: list[str],
        min_partition: int | None,
        compute_kernels: list[str] | None = None,
    ) -> ParameterConstraints:
        return ParameterConstraints(
            sharding_types=sharding_types,
            compute_kernels=compute_kernels,
            min_partition=min_partition,
            pooling_factors=[self._workload.ids_per_row.get(name, 1.0) for name in table.feature_names],
        )

    def _worth_trying(self, table: CompositionalEmbeddingConfig) -> list[str]:
        possible = self._by_columns[table.name]
        own = self._config.tables.get(table.name, TablePlanConfig())
        if own.sharding_types or self._config.sharding_types or len(possible) == 1:
            return possible
        # where all columns are one range, column-wise is table-wise by another name
        is_one_range = width(table) <= (self._min_partition(table) or _TORCHREC_MIN_PARTITION)
        return [kind for kind in possible if not (is_one_range and kind == "column_wise")]

    def _min_partition(self, table: CompositionalEmbeddingConfig) -> int | None:
        own = self._config.tables.get(table.name, TablePlanConfig())
        return own.min_partition or self._config.min_partition


def possible_types(
    tables: Sequence[CompositionalEmbeddingConfig], config: PlanConfig, default: Sequence[str]
) -> dict[str, list[str]]:
    """Sharding types that each table may have.

    Raises:
        UserError: for a table that does not exist, or that cannot be placed in any way that is allowed.
    """
    for name in config.tables:
        one_of("plan.tables", name, [table.name for table in tables])
    return {table.name: _possible_types_of(table, config, default) for table in tables}


def _possible_types_of(table: CompositionalEmbeddingConfig, config: PlanConfig, default: Sequence[str]) -> list[str]:
    own = config.tables.get(table.name, TablePlanConfig())
    allowed = own.sharding_types or config.sharding_types or default
    possible = [kind for kind in allowed if can_be_placed(table, kind)]
    if not possible:
        raise UserError(
            f"plan: table {table.name!r} may only be placed {', '.join(allowed)}, but it cannot be: "
            f"{_hindrance(table)}. Allow {_remedy(table)} in plan.tables.{table.name}.sharding_types."
        )
    return possible


def _hindrance(table: CompositionalEmbeddingConfig) -> str:
    if any(part.dim % 4 for part in table.lookup_tables()):
        return "FBGEMM has vectors of a multiple of 4 numbers only"
    if not can_be_placed(table, "column_wise"):
        return f"{table.combine.name} needs all columns on one rank"
    return "a maximum needs all ids of a bag on one rank"


def _remedy(table: CompositionalEmbeddingConfig) -> str:
    return " or ".join(kind for kind in ("table_wise", "data_parallel") if can_be_placed(table, kind))
