"""The search for a plan: by time while tables are small for the ranks, else by bytes.

TorchRec's search looks for the fastest plan. It is asked first where ranks are few. If its plan fills a rank by more
than half, or ranks are many, tables are divided so that all ranks have about as many bytes
(:mod:`distembed.planning.balance`): with 1,000 tables on 1,024 GPUs TorchRec's leave one with 43 times the mean.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.proposers import GreedyProposer
from torchrec.distributed.planner.types import Partitioner, PlannerError, PlannerErrorType, Proposer, ShardingOption
from torchrec.distributed.types import ShardingPlan

from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.errors import UserError
from distembed.names import one_of
from distembed.optim.kinds import OPTIMIZERS
from distembed.planning.balance import BalancedPartitioner, Choice, Divisible, choose, why_divided
from distembed.planning.config import PlanConfig, TablePlanConfig
from distembed.planning.costs import PlacementCosts
from distembed.planning.perf_estimator import PlacementPerfEstimator
from distembed.planning.request import PlanRequest
from distembed.planning.reservation import Reservation
from distembed.planning.storage import function_storage, whole_table_storage
from distembed.planning.storage_estimator import StorageEstimator
from distembed.sharding.placement import SHARDING_TYPES, can_be_placed, is_pooled, width

MANY_RANKS = 32
"""Number of ranks from which on all get about as many bytes, whatever their memory."""
_ROOMY = 0.5
"""Share of its memory for tables up to which one of few ranks may have more than others."""
_BALANCED = 0.05
"""Share of their mean by which bytes of ranks may differ from it before tables are divided further."""
_DIVISORS = (1, 2, 4, 8, 16, 32)
"""Divisors of a rank's share of all bytes that limit the widest range of columns, in the order they are tried."""
_TORCHREC_MIN_PARTITION = 128
_OWN_MEMORY = [EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.DENSE.value]


@dataclass(frozen=True)
class SearchResult:
    """Outcome of one search.

    Attributes:
        answer: TorchRec's plan, or the error that says why there is none.
        fullness: Bytes of the fullest rank, as a share of its memory for tables.
        imbalance: Largest difference of a rank's bytes of tables from their mean over ranks, as a share of that mean.
        options: Sharding options that the planner chose, with ranks, storage and perf of their shards.
        why: The reason why each compositional table is placed as it is, by table.
    """

    answer: ShardingPlan | Exception
    fullness: float = math.inf
    imbalance: float = math.inf
    options: Sequence[ShardingOption] = ()
    why: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_plan(self) -> bool:
        """Whether there is a plan."""
        return isinstance(self.answer, ShardingPlan)

    @property
    def is_hopeless(self) -> bool:
        """Whether the memory of all ranks together is too little."""
        error = self.answer
        return isinstance(error, PlannerError) and error.error_type == PlannerErrorType.INSUFFICIENT_STORAGE


class Search:
    """Looks for a plan.

    Args:
        request: Model and cluster to plan for, and the ways in which tables may be placed.
        reserved_bytes: Bytes of each rank's memory, beside the request's reserved share, for all but tables.

    Raises:
        UserError: The config names a table that does not exist, or allows no way for one that does.
    """

    def __init__(self, request: PlanRequest, reserved_bytes: int) -> None:
        cluster = request.cluster
        self._request, self._reserved_bytes = request, reserved_bytes
        self._tables, self._config, self._optimizers = request.tables, request.config, request.table_optimizers
        self._topology = cluster.topology()
        self._batch_size = max(1, request.workload.rows_of_rank(cluster.world_size))
        known = [*self._tables, *request.plain_tables]
        for name in self._config.tables:
            one_of("plan.tables", name, [table.name for table in known])
        self._without_rows = possible_types(self._tables, self._config, with_rows=False)
        self._with_rows = possible_types(self._tables, self._config, with_rows=cluster.world_size > 1)

    def best(self) -> SearchResult:
        """Returns the plan to take, or why there is none."""
        if self._topology.world_size >= MANY_RANKS:
            balanced = self.balanced(self._with_rows)
            return balanced if balanced.is_plan or not self._config.host_memory else self.fastest()
        fastest = self.fastest()
        if self._topology.world_size == 1 or fastest.fullness <= _ROOMY:
            return fastest
        # where ranks are few, that one has more than others is no reason to divide a table by rows
        balanced = self.balanced(self._without_rows)
        if not balanced.is_plan:
            balanced = self.balanced(self._with_rows)
        return fastest if fastest.is_plan and not balanced.is_plan else balanced

    def fastest(self) -> SearchResult:
        """Returns the result of TorchRec's search for the least time."""
        types = {table.name: self._types_worth_trying(table) for table in self._tables}
        constraints = {
            table.name: self._constraints(table, types[table.name], self._min_partition(table))
            for table in self._tables
        }
        result = self._plan(constraints, None, None)
        why = {name: "" if len(tried) == 1 else f"fastest of {', '.join(tried)}" for name, tried in types.items()}
        return replace(result, why=self._complete_reasons(why))

    def balanced(self, types: Mapping[str, list[str]]) -> SearchResult:
        """Returns a plan whose tables are divided until all ranks have about as many bytes, or why there is none.

        Args:
            types: Possible sharding types of each table, by its name.
        """
        world_size = self._topology.world_size
        divisible = {table.name: self._divisible(table, types[table.name]) for table in self._tables}
        choices = choose(divisible, world_size, _DIVISORS[0])
        best, best_choices = self._divided(choices), choices
        for divisor in _DIVISORS[1:]:
            if best.imbalance <= _BALANCED or best.is_hopeless:
                break
            last, choices = choices, choose(divisible, world_size, divisor)
            result = self._divided(choices) if choices != last else best
            if result.imbalance <= best.imbalance:
                best, best_choices = result, choices
        why = why_divided(divisible, best_choices, world_size)
        return replace(best, why=self._complete_reasons(why))

    def _complete_reasons(self, why: Mapping[str, str]) -> dict[str, str]:
        """Adds the reason of those tables that had one sharding type only, and of torch's kernel."""
        complete = {table.name: why[table.name] or self._only_choice(table) for table in self._tables}
        if self._optimizers.is_fused:
            return complete
        kernel = f"dense kernel: FBGEMM has no {self._optimizers.sparse}"
        return {name: f"{reason}; {kernel}" for name, reason in complete.items()}

    def _only_choice(self, table: CompositionalEmbeddingConfig) -> str:
        own = self._config.tables.get(table.name, TablePlanConfig()).sharding_types
        for name, allowed in ((f"plan.tables.{table.name}", own), ("plan", self._config.sharding_types)):
            if allowed:
                return f"of {', '.join(allowed)}, as {name}.sharding_types has it"
        if self._topology.world_size == 1:
            return "there is one rank"
        if not is_pooled(table):
            return "tables of sequences are divided by columns only where plan.sharding_types allows it"
        if not can_be_placed(table, "column_wise"):
            return f"{table.combine.name} needs all columns together"
        return (
            f"{width(table)} columns, and plan.min_partition is {self._min_partition(table) or _TORCHREC_MIN_PARTITION}"
        )

    def _divisible(self, table: CompositionalEmbeddingConfig, types: list[str]) -> Divisible:
        whole = whole_table_storage(table, self._optimizers)
        total = (whole - function_storage(table, self._optimizers)).total
        row_state_bytes = OPTIMIZERS[self._optimizers.sparse].row_state_bytes
        row_bytes = sum(part.num_rows for part in table.lookup_tables()) * row_state_bytes
        return Divisible(width(table), total - row_bytes, row_bytes, types, self._min_partition(table))

    def _divided(self, choices: Mapping[str, Choice]) -> SearchResult:
        constraints = {
            table.name: self._constraints(
                table, [choices[table.name].sharding_type], choices[table.name].columns, _OWN_MEMORY
            )
            for table in self._tables
        }
        partitioner = BalancedPartitioner(self._storage_estimator().table_bytes)
        result = self._plan(constraints, GreedyProposer(), partitioner)
        return replace(result, imbalance=partitioner.imbalance) if result.is_plan else result

    def _plan(
        self,
        constraints: dict[str, ParameterConstraints],
        proposer: Proposer | None,
        partitioner: Partitioner | None,
    ) -> SearchResult:
        request = self._request
        constraints = {**constraints, **self._plain_constraints()}
        reservation = Reservation(request.reserved_share, self._tables, self._optimizers, self._reserved_bytes)
        perf = PlacementPerfEstimator(PlacementCosts(request), request.tables_by_collection)
        planner = EmbeddingShardingPlanner(
            topology=self._topology,
            batch_size=self._batch_size,
            constraints=constraints,
            enumerator=EmbeddingEnumerator(
                self._topology, self._batch_size, constraints, estimator=[perf, self._storage_estimator()]
            ),
            proposer=proposer,
            partitioner=partitioner,
            storage_reservation=reservation,
            stats=[],
        )
        try:
            plan = planner.plan(request.model, list(request.sharders))
        except (PlannerError, RuntimeError) as error:
            return SearchResult(error)
        options = planner._best_plan or []
        return SearchResult(plan, reservation.fullness(options), options=options)

    def _plain_constraints(self) -> dict[str, ParameterConstraints]:
        """Returns what holds for TorchRec's own tables: any way that the config allows and a saved plan may have."""
        may_lie_in_host_memory = self._config.host_memory and self._optimizers.is_fused
        kernels = None if may_lie_in_host_memory else _OWN_MEMORY
        return {
            table.name: self._constraints(
                table, _allowed_types(table, self._config, SHARDING_TYPES), self._min_partition(table), kernels
            )
            for table in self._request.plain_tables
        }

    def _storage_estimator(self) -> StorageEstimator:
        return StorageEstimator(self._topology, self._tables, self._optimizers)

    def _constraints(
        self,
        table: CompositionalEmbeddingConfig,
        sharding_types: list[str],
        min_partition: int | None,
        compute_kernels: list[str] | None = None,
    ) -> ParameterConstraints:
        ids_per_row = self._request.workload.ids_per_row
        return ParameterConstraints(
            sharding_types=sharding_types,
            compute_kernels=compute_kernels,
            min_partition=min_partition,
            pooling_factors=[ids_per_row.get(name, 1.0) for name in table.feature_names],
        )

    def _types_worth_trying(self, table: CompositionalEmbeddingConfig) -> list[str]:
        possible = self._without_rows[table.name]
        own = self._config.tables.get(table.name, TablePlanConfig())
        if own.sharding_types or self._config.sharding_types or len(possible) == 1:
            return possible
        # where all columns are one range, column-wise is table-wise by another name
        is_one_range = width(table) <= (self._min_partition(table) or _TORCHREC_MIN_PARTITION)
        return [sharding_type for sharding_type in possible if not (is_one_range and sharding_type == "column_wise")]

    def _min_partition(self, table: CompositionalEmbeddingConfig) -> int | None:
        own = self._config.tables.get(table.name, TablePlanConfig())
        return own.min_partition or self._config.min_partition


def possible_types(
    tables: Sequence[CompositionalEmbeddingConfig], config: PlanConfig, with_rows: bool
) -> dict[str, list[str]]:
    """Returns the sharding types that each table may have, by its name.

    Args:
        tables: Compositional tables of the model.
        config: Sharding types that are allowed.
        with_rows: Whether tables may be divided by rows where the config says nothing.

    Raises:
        UserError: The config allows no way for a table.
    """
    # ranges of columns have to be equally wide in all tables of a sequence collection, which no search heeds
    return {
        table.name: _allowed_types(
            table, config, ["table_wise"] + ["column_wise"] * is_pooled(table) + ["row_wise"] * with_rows
        )
        for table in tables
    }


def _allowed_types(table: CompositionalEmbeddingConfig, config: PlanConfig, default: Sequence[str]) -> list[str]:
    own = config.tables.get(table.name, TablePlanConfig())
    allowed = own.sharding_types or config.sharding_types or default
    possible = [sharding_type for sharding_type in allowed if can_be_placed(table, sharding_type)]
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
    if not is_pooled(table):
        return "TorchRec has no such sharding of sequences"
    return "a maximum needs all ids of a bag on one rank"


def _remedy(table: CompositionalEmbeddingConfig) -> str:
    return " or ".join(name for name in ("table_wise", "data_parallel") if can_be_placed(table, name))
