"""The search for a plan: by time while tables are small for the ranks, else by bytes.

TorchRec's search looks for the fastest plan. It is asked first where ranks are few. If its plan fills a rank by more
than half, or ranks are many, tables are divided so that all ranks have about as many bytes
(:mod:`distembed.planning.balance`): with 1,000 tables on 1,024 GPUs TorchRec's leave one with 43 times the mean.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.constants import DEFAULT_PERF_ESTIMATOR
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.estimator import EmbeddingPerfEstimatorFactory
from torchrec.distributed.planner.proposers import GreedyProposer
from torchrec.distributed.planner.types import Partitioner, PlannerError, PlannerErrorType, Proposer
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.errors import UserError
from distembed.names import one_of
from distembed.planning.balance import BalancedPartitioner, Choice, Divisible, choose
from distembed.planning.config import PlanConfig, TablePlanConfig
from distembed.planning.estimator import (
    OncePerSize,
    Reservation,
    StorageEstimator,
    TableOptimizers,
    bytes_of_a_row,
    tables_of,
)
from distembed.planning.storage import function_storage, whole_table_storage
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
    """

    answer: ShardingPlan | Exception
    fullness: float = math.inf
    imbalance: float = math.inf

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
        topology: of the ranks.
        batch_size: rows of a step on one rank.
        config: how tables may be placed.
        optimizers: what trains them.
        reserved_share: of each device's memory, for all but tables.

    Raises:
        UserError: for a table that does not exist, or that cannot be placed in any way that is allowed.
    """

    def __init__(
        self,
        model: nn.Module,
        sharders: list[ModuleSharder[Any]],
        topology: Topology,
        batch_size: int,
        config: PlanConfig,
        optimizers: TableOptimizers,
        reserved_share: float,
    ) -> None:
        self._model, self._sharders, self._topology, self._batch_size = model, sharders, topology, batch_size
        self._config, self._optimizers, self._reserved_share = config, optimizers, reserved_share
        self._tables = tables_of(model)
        one_rank = topology.world_size == 1
        self._by_columns = possible_types(self._tables, config, _BY_COLUMNS)
        self._by_rows_too = self._by_columns if one_rank else possible_types(self._tables, config, _BY_ROWS_TOO)

    def best(self) -> ShardingPlan | Exception:
        """A plan, or why there is none."""
        if self._topology.world_size >= MANY_RANKS:
            found = self.by_bytes(self._by_rows_too)
            return found.answer if found.is_plan or not self._config.host_memory else self.by_time().answer
        by_time = self.by_time()
        if self._topology.world_size == 1 or by_time.fullness <= _ROOMY:
            return by_time.answer
        # where ranks are few, that one has more than others is no reason to divide a table by rows
        by_bytes = self.by_bytes(self._by_columns)
        if not by_bytes.is_plan:
            by_bytes = self.by_bytes(self._by_rows_too)
        return by_time.answer if by_time.is_plan and not by_bytes.is_plan else by_bytes.answer

    def by_time(self) -> Found:
        """By TorchRec's search of what is fastest."""
        constraints = {
            table.name: _constraints(table, self._worth_trying(table), self._min_partition(table))
            for table in self._tables
        }
        return self._plan(constraints, None, None)

    def by_bytes(self, possible: Mapping[str, list[str]]) -> Found:
        """With tables divided until all ranks have about as many bytes.

        Args:
            possible: sharding types of each table.
        """
        world_size = self._topology.world_size
        divisible = {table.name: self._divisible(table, possible[table.name]) for table in self._tables}
        choices = choose(divisible, world_size, _DIVISORS[0])
        best = self._divided(choices)
        for divisor in _DIVISORS[1:]:
            if best.imbalance <= _BALANCED or best.is_hopeless:
                break
            last, choices = choices, choose(divisible, world_size, divisor)
            found = self._divided(choices) if choices != last else best
            best = found if found.imbalance <= best.imbalance else best
        return best

    def _divisible(self, table: CompositionalEmbeddingConfig, possible: list[str]) -> Divisible:
        optimizers = self._optimizers
        whole = whole_table_storage(table, optimizers.sparse, optimizers.dense, optimizers.is_fused)
        total = (whole - function_storage(table, optimizers.dense)).total
        of_rows = sum(part.num_rows for part in table.lookup_tables()) * bytes_of_a_row(optimizers.sparse)
        return Divisible(width(table), total - of_rows, of_rows, possible, self._min_partition(table))

    def _divided(self, choices: Mapping[str, Choice]) -> Found:
        constraints = {
            table.name: _constraints(
                table, [choices[table.name].sharding_type], choices[table.name].columns, _OWN_MEMORY
            )
            for table in self._tables
        }
        partitioner = BalancedPartitioner(self._estimator().table_bytes)
        found = self._plan(constraints, GreedyProposer(), partitioner)
        return Found(found.answer, found.fullness, partitioner.imbalance) if found.is_plan else found

    def _plan(
        self,
        constraints: dict[str, ParameterConstraints],
        proposer: Proposer | None,
        partitioner: Partitioner | None,
    ) -> Found:
        reservation = Reservation(self._reserved_share, self._tables, self._optimizers)
        time = EmbeddingPerfEstimatorFactory.create(
            DEFAULT_PERF_ESTIMATOR, topology=self._topology, constraints=constraints
        )
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
        return Found(plan, reservation.fullness(planner._best_plan or []))

    def _estimator(self) -> StorageEstimator:
        return StorageEstimator(self._topology, self._tables, self._optimizers)

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
            f"plan: table {table.name!r} may only be placed {', '.join(allowed)}, but it cannot be: a "
            "path needs all columns on one rank, a maximum all ids of a bag, and FBGEMM vectors of a multiple of 4 "
            f"numbers. Allow table_wise or data_parallel in plan.tables.{table.name}.sharding_types."
        )
    return possible


def _constraints(
    table: CompositionalEmbeddingConfig,
    sharding_types: list[str],
    min_partition: int | None,
    compute_kernels: list[str] | None = None,
) -> ParameterConstraints:
    return ParameterConstraints(
        sharding_types=sharding_types,
        compute_kernels=compute_kernels,
        min_partition=min_partition,
        pooling_factors=[1.0] * len(table.feature_names),  # ids of a bag
    )
