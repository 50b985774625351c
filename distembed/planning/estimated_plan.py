"""A plan with the memory of each rank and the time of its step, and the count of memory that a search goes by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn
from torchrec.distributed.types import ShardingPlan

from distembed.embedding.modules import embedding_modules, table_configs
from distembed.planning.buffers import Step
from distembed.planning.fastest.loads import Loads
from distembed.planning.fastest.problem import Assignment, Floats
from distembed.planning.other_placements import Alternative
from distembed.planning.planned_rank import PlannedRank
from distembed.planning.request import PlanRequest
from distembed.planning.table_problem import TableProblem
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


class CountedMemory:
    """Counts the memory of assignments; after the first, of the tables alone that are placed anew."""

    def __init__(self, request: PlanRequest, tables: TableProblem) -> None:
        self._request, self._tables, self._world_size = request, tables, request.cluster.world_size
        self._counted: Step | None = None
        self._assignment = Assignment.empty(tables.problem.num_tables)

    @property
    def capacity(self) -> Floats:
        """Bytes that are left for tables, beside what stays on a rank whatever the plan, by rank."""
        beside = self._request.workload.bytes_beside_tables(self._world_size)
        resting = ("sse_graphs", "network_weights", "network_optimizer_state")
        return self._request.plannable_bytes - sum(beside[name] for name in resting)

    def ranks(self, assignment: Assignment) -> list[PlannedRank]:
        """Returns the memory of every rank."""
        before, self._assignment = self._assignment, assignment.copy()
        placements = [
            place_table(planned.table, self._tables.sharding(assignment, table), self._world_size, planned.collection)
            for table, (planned, unit) in enumerate(zip(self._tables.tables, self._tables.unit_of, strict=True))
            if before.option[unit] != assignment.option[unit]
            or not np.array_equal(before.places[unit], assignment.places[unit])
        ]
        if self._counted is None:
            self._counted = self._request.step(placements)
        else:
            for placement in placements:
                self._counted.place(placement)
        return self._counted.ranks()

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
