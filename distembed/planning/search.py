"""The search for a plan: the fastest of those that fit.

The tables become a problem in numbers (:mod:`distembed.planning.table_problem`), which is solved by the estimate of
time (:mod:`distembed.planning.fastest`). Bytes of shards add up there, while a step's fullest moment is no sum: each
solution is counted as it will be reported (:mod:`distembed.planning.buffers`), and where a rank has too much the search
goes on with as much less capacity.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from distembed.base.errors import InsufficientMemory
from distembed.base.units import format_ranges
from distembed.planning.costs import PlacementCosts
from distembed.planning.estimated_plan import CountedMemory, EstimatedPlan, plan_placements
from distembed.planning.fastest.loads import Aim
from distembed.planning.fastest.problem import Assignment, Floats
from distembed.planning.fastest.solver import Solution, Solver
from distembed.planning.other_placements import explain
from distembed.planning.planned_rank import PlannedRank
from distembed.planning.request import PlanRequest
from distembed.planning.table_problem import TableProblem
from distembed.planning.times import step_times
from distembed.sharding.placement import Placement

_TRIES = 6
"""Capacities that are tried where solutions have too much by the count of a whole step."""


class Search:
    """Looks for a plan; raises an ``InsufficientMemory`` where a step has no room even without tables."""

    def __init__(self, request: PlanRequest) -> None:
        beside, capacity = (
            request.workload.bytes_beside_tables(request.cluster.world_size),
            min(request.plannable_bytes),
        )
        if sum(beside.values()) > capacity:
            items = ", ".join(f"{name} {num_bytes:,}" for name, num_bytes in beside.items() if num_bytes)
            raise InsufficientMemory(
                f"No plan fits: beside tables each rank needs {sum(beside.values()):,} bytes ({items}); it has "
                f"{capacity:,.0f}. Take fewer rows a step (train.batch_size of a config), or larger devices."
            )
        self._request = request
        self._costs = PlacementCosts(request)
        self._tables = TableProblem(request, self._costs)
        self._memory = CountedMemory(request, self._tables)
        tolerance = request.config.time_tolerance
        self._solver = Solver(self._tables.problem, request.host_bytes, self._memory.capacity, tolerance)
        self._excess = np.inf  # bytes that the fullest rank of the next solution lacks
        self._least_excess: Solution  # of all that were counted

    def best(self) -> EstimatedPlan:
        """Returns the plan to take."""
        self.require_room()
        solution = self._fitting()
        fits = solution is not None
        if solution is None:
            solution = self._least_excess
        request, assignment = self._request, solution.assignment
        plan, aim = self._tables.plan(assignment), Aim(self._memory.capacity, request.host_bytes)
        placements = plan_placements(request.model, plan, request.cluster.world_size)
        why, alternatives = explain(request, self._tables, assignment, aim)
        return EstimatedPlan(
            plan=plan,
            placements=placements,
            ranks=self._ranks(placements, self._memory.ranks(assignment)),
            why=why,
            alternatives=alternatives,
            lower_bound_ms=solution.lower_bound_ms,
            is_complete=fits and solution.is_complete,
        )

    def require_room(self) -> None:
        """Raises an ``InsufficientMemory`` where weights and states alone do not fit, however they are placed."""
        request, problem = self._request, self._tables.problem
        world_size, capacity = problem.world_size, np.maximum(self._memory.capacity, 0)
        needed: dict[tuple[int, ...], float] = {}
        for unit, number in enumerate(problem.class_of):
            possible = [own.stored_bytes(world_size, problem.ranks_per_node) for own in problem.classes[number]]
            needed_by_one, ranks = min(largest for _, largest in possible), tuple(problem.ranks_of_class[number])
            needed[ranks] = needed.get(ranks, 0.0) + min(in_all for in_all, _ in possible)
            most = float(capacity[list(ranks or range(world_size))].max())
            if needed_by_one > most:
                names = [f"table {self._tables.tables[own].table.name!r}" for own in self._tables.tables_of[unit]]
                pinned = f"the largest of ranks {format_ranges(ranks)}, to which it is pinned," if ranks else "a rank"
                raise InsufficientMemory(
                    f"The embedding tables do not fit in the memory of {world_size} rank(s): "
                    f"{' with '.join(names)} needs {needed_by_one:,.0f} bytes of one rank at least, with its "
                    f"optimizer, and {pinned} has {most:,.0f} bytes for tables.\n{_remedy(ranks)}"
                )
        for ranks in (*filter(None, needed), ()):
            # what is pinned to some of these ranks has no other place
            least = sum(own for at, own in needed.items() if not ranks or (at and set(at) <= set(ranks)))
            left = capacity[list(ranks or range(world_size))]
            if least > left.sum():
                each = f"{len(left)} x {left[0]:,.0f}" if (left == left[0]).all() else f"{left.sum():,.0f}"
                pinned = f" that are pinned to ranks {format_ranges(ranks)}" if ranks else ""
                raise InsufficientMemory(
                    f"The embedding tables{pinned} do not fit in the memory of {len(left)} rank(s): with their "
                    f"optimizer they take {least:,.0f} bytes, and {each} are left for them of "
                    f"{request.cluster.rank_bytes:,} a rank.\n{_remedy(ranks)}"
                )

    def _fitting(self) -> Solution | None:
        """Returns the fastest solution that was found to fit, or None."""
        first, capacity, fitting = self._solver.fastest(self._memory.capacity), self._memory.capacity, None
        if self._fits(first.assignment):
            fitting = first
        else:
            # of two searches with less and less capacity, one starts from the last solution, one afresh
            ends = [
                self._tightened(first, self._solver.repaired),
                self._tightened(first, lambda _, less: self._solver.fastest(less)),
            ]
            if tight := [own for own in ends if own is not None]:
                solution, capacity = min(tight, key=lambda own: own[0].milliseconds)
                fitting = self._improved(solution, capacity)
        fastest = self._solver.complete(fitting, self._fits)
        if seconds := self._request.config.polish_seconds:
            fastest = self._solver.polished(fastest, capacity, seconds, self._memory.excess)
        return self._emptiest(capacity) if fastest is None else self._emptier(fastest, capacity)

    def _tightened(
        self, solution: Solution, again: Callable[[Solution, Floats], Solution]
    ) -> tuple[Solution, Floats] | None:
        """Returns the first solution that fits with less and less capacity, and its capacity; None if there is none."""
        capacity = self._memory.capacity
        for _ in range(_TRIES):
            excess, lower = self._memory.excess(solution.assignment)
            self._keep(solution, excess)
            if excess <= 0:
                return solution, capacity
            if (lower <= 0).all() or not solution.fits:
                break  # less capacity does not help
            capacity = np.minimum(lower, capacity)
            solution = again(solution, capacity)
        return None

    def _improved(self, solution: Solution, capacity: Floats) -> Solution:
        """Returns the solution that a fitting one in tight memory is improved to, if that fits too; else itself."""
        for _ in range(_TRIES):
            faster = self._solver.improved(solution.assignment, capacity)
            excess, lower = self._memory.excess(faster.assignment)
            if excess <= 0:
                return min(solution, faster, key=lambda own: own.milliseconds)
            if (lower <= 0).all():
                break
            capacity = np.minimum(lower, capacity)
        return solution

    def _emptier(self, fastest: Solution, capacity: Floats) -> Solution:
        """Returns a solution that is nearly as fast, with fewer bytes on the fullest rank, where one is found."""
        emptier = self._solver.emptier(fastest, capacity)
        is_emptier = self._memory.excess(emptier.assignment)[0] <= self._memory.excess(fastest.assignment)[0]
        return emptier if is_emptier else fastest

    def _emptiest(self, capacity: Floats) -> Solution | None:
        """Returns a solution with few bytes on the fullest rank, as fast as it gets from there, if it fits."""
        solution = self._solver.emptiest(capacity)
        excess, _ = self._memory.excess(solution.assignment)
        self._keep(solution, excess)
        return self._improved(solution, capacity) if excess <= 0 else None

    def _keep(self, solution: Solution, excess: float) -> None:
        if excess < self._excess:
            self._excess, self._least_excess = excess, solution

    def _fits(self, assignment: Assignment) -> bool:
        return self._memory.excess(assignment)[0] <= 0

    def _ranks(self, placements: Sequence[Placement], counted: Sequence[PlannedRank]) -> list[PlannedRank]:
        """Returns ranks whose memory was counted with their times, the allocator's share and their capacity."""
        request, cluster = self._request, self._request.cluster
        times = step_times(placements, self._costs, cluster)
        memory, host, plannable = cluster.bytes_by_rank, cluster.host_bytes_by_rank, request.plannable_bytes.tolist()
        return [
            replace(
                own,
                memory={**own.memory, "allocator": memory[rank] - int(plannable[rank])},
                times=times[rank],
                capacity_bytes=memory[rank],
                host_capacity_bytes=host[rank],
            )
            for rank, own in enumerate(counted)
        ]


def _remedy(ranks: Sequence[int]) -> str:
    pins = "Pin tables to more ranks (plan.tables.NAME.ranks). " if ranks else ""
    return pins + (
        "Compress tables further (embedding.default.collisions of a config), make vectors shorter "
        "(embedding.default.embedding_dim), or use more ranks."
    )
