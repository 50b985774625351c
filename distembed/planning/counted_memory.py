"""The memory of every rank under an assignment, counted as it is reported."""

import numpy as np

from distembed.planning.buffers import Step
from distembed.planning.fastest.loads import Loads
from distembed.planning.fastest.problem import Assignment, Floats
from distembed.planning.planned_rank import PlannedRank
from distembed.planning.request import PlanRequest
from distembed.planning.table_problem import TableProblem
from distembed.sharding.placement import Placement, place_table


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
