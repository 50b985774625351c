"""A plan with the memory of each rank and the time of its step, and the count of memory that a search goes by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import nn
from torchrec.distributed.types import ShardingPlan

from distembed.embedding.modules import embedding_modules, table_configs
from distembed.planning.buffers import Step
from distembed.planning.costs import PlacementCosts
from distembed.planning.fastest.loads import Loads
from distembed.planning.fastest.problem import Assignment, Floats
from distembed.planning.other_placements import Alternative
from distembed.planning.planned_rank import PlannedRank
from distembed.planning.request import PlanRequest
from distembed.planning.table_problem import TableProblem
from distembed.planning.times import step_times
from distembed.sharding.placement import Placement, place_table, place_tables


@dataclass(frozen=True)
class EstimatedPlan:
    """The fastest plan that was found to fit; where none was, one with few bytes on the fullest rank."""

    plan: ShardingPlan
    placements: Sequence[Placement]  # of all tables, TorchRec's own as the full tables that they are
    ranks: Sequence[PlannedRank]
    why: Mapping[str, str]  # the reason of each table's place
    alternatives: Mapping[str, Sequence[Alternative]]  # the best other places of each table, the best first
    lower_bound_ms: float  # of the slowest rank's step; no plan that fits goes below it
    is_complete: bool  # whether the search ended by itself; else it was stopped after its last allowed try

    @property
    def fits(self) -> bool:
        """Whether every rank has room."""
        return all(rank.fits for rank in self.ranks)


def plan_placements(model: nn.Module, plan: ShardingPlan, world_size: int) -> list[Placement]:
    """Returns where the parameters of all tables of a model go, collection after collection."""
    return [
        placement
        for path, module in embedding_modules(model).items()
        if path in plan.plan
        for placement in place_tables(table_configs(module), plan.plan[path], world_size, collection=path)
    ]


def estimated_ranks(
    request: PlanRequest, costs: PlacementCosts, placements: Sequence[Placement], ranks: Sequence[PlannedRank]
) -> list[PlannedRank]:
    """Returns ranks whose memory was counted with their times, the allocator's share and their capacity."""
    cluster = request.cluster
    of_rank = zip(
        ranks,
        step_times(placements, costs, cluster),
        cluster.bytes_by_rank,
        cluster.host_bytes_by_rank,
        request.plannable_bytes.tolist(),
        strict=True,
    )
    return [
        replace(
            own,
            memory={**own.memory, "allocator": num_bytes - int(plannable)},
            times=times,
            capacity_bytes=num_bytes,
            host_capacity_bytes=host_bytes,
        )
        for own, times, num_bytes, host_bytes, plannable in of_rank
    ]


class CountedMemory:
    """Counts assignments; after the first, tables that are placed anew alone.

    Args:
        request: Model, cluster and workload.
        tables: The tables of the request.
    """

    def __init__(self, request: PlanRequest, tables: TableProblem) -> None:
        self._request, self._tables = request, tables
        self._counted: Step | None = None
        self._assignment = Assignment.empty(tables.problem.num_tables)

    @property
    def capacity(self) -> Floats:
        """Bytes that are left for tables, beside what stays on a rank whatever the plan, by rank."""
        beside = self._request.workload.bytes_beside_tables(self._request.cluster.world_size)
        resting = ("sse_graphs", "network_weights", "network_optimizer_state")
        return self._request.plannable_bytes - sum(beside[name] for name in resting)

    def ranks(self, assignment: Assignment) -> list[PlannedRank]:
        """Returns the memory of every rank."""
        return self._placed(assignment).ranks()

    def excess(self, assignment: Assignment) -> tuple[float, Floats]:
        """Returns the bytes that the fullest rank lacks, and the capacities at which it would not, by rank.

        Bytes are negative where there is room; those of host memory count likewise. The capacities are for the sums
        of shards' bytes that a search adds up, infinite where there is room.
        """
        request, ranks = self._request, self.ranks(assignment)
        totals: Floats = np.array([rank.total_bytes for rank in ranks], np.float64)
        host = max(np.array([rank.storage.host for rank in ranks]) - request.host_bytes)
        added = Loads(self._tables.problem, assignment.copy()).num_bytes
        excess = totals - request.plannable_bytes
        over = excess > 0
        capacity = request.plannable_bytes - ((totals - added)[over].max() if over.any() else -np.inf)
        return max(float(excess.max()), float(host)), capacity

    def _placed(self, assignment: Assignment) -> Step:
        """Returns the count with all tables where the assignment has them."""
        request, before = self._request, self._assignment
        if self._counted is None:
            placements = [self._placement(assignment, table) for table in range(len(self._tables.tables))]
            self._counted = request.step(placements)
        else:
            for table, unit in enumerate(self._tables.unit_of):
                is_same = before.option[unit] == assignment.option[unit]
                if not is_same or not np.array_equal(before.places[unit], assignment.places[unit]):
                    self._counted.place(self._placement(assignment, table))
        self._assignment = assignment.copy()
        return self._counted

    def _placement(self, assignment: Assignment, table: int) -> Placement:
        planned = self._tables.tables[table]
        unit = self._tables.sharding(assignment, table)
        return place_table(planned.table, unit, self._request.cluster.world_size, planned.collection)
