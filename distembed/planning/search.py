"""Finds the fastest plan that fits the memory of a cluster and of a training step.

The tables become a problem in numbers (:mod:`distembed.planning.table_problem`). A search minimises the estimated time
(:mod:`distembed.planning.fastest`) and adds up the bytes of shards, but a step's fullest moment is no sum over shards.
So each solution's memory is counted exactly (:mod:`distembed.planning.buffers`), and where a rank has too much, the
search runs again with less capacity.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from distembed.base.errors import InsufficientMemory, UserError
from distembed.base.machine import host_memory_bytes
from distembed.base.ranks import Collectives, Ranks
from distembed.base.units import format_ranges
from distembed.embedding.collections import embedding_modules, table_configs
from distembed.optim.declared import TableOptimizers
from distembed.planning.buffers import Step
from distembed.planning.config import PlanConfig
from distembed.planning.costs import PlacementCosts, step_times
from distembed.planning.devices import Cluster, device_here, find_device
from distembed.planning.fastest.loads import Aim, Loads
from distembed.planning.fastest.problem import Assignment, Floats
from distembed.planning.fastest.solver import Solution, Solver
from distembed.planning.other_placements import Alternative, explain
from distembed.planning.request import PlanRequest, Workload
from distembed.planning.storage import PlannedRank
from distembed.planning.table_problem import TableProblem
from distembed.sharding.placement import Placement, place_table, place_tables

_TRIES = 6
"""Most capacities tried in turn where the exact count of a solution exceeds the memory."""


@dataclass(frozen=True)
class EstimatedPlan:
    """The fastest plan found that fits; where none was found, the counted plan that exceeds the memory least."""

    plan: ShardingPlan
    placements: Sequence[Placement]  # of all tables; tables of TorchRec's own collections as full tables
    ranks: Sequence[PlannedRank]
    why: Mapping[str, str]  # the reason of each table's place, by name
    alternatives: Mapping[str, Sequence[Alternative]]  # the best other places of each table, the best first
    lower_bound_ms: float  # of the slowest rank's step; no plan that fits goes below it
    is_complete: bool  # whether the search ended by itself; else it was stopped after its last allowed try

    @property
    def fits(self) -> bool:
        return all(rank.fits for rank in self.ranks)


def make_plan(
    model: nn.Module,
    sharders: Sequence[ModuleSharder[Any]],
    ranks: Ranks,
    workload: Workload | Callable[[], Workload],
    config: PlanConfig | None = None,
    optimizers: TableOptimizers | None = None,
) -> ShardingPlan:
    """Plans on rank 0 and returns the same plan, or raises the same error, on every rank; all ranks call it.

    Args:
        model: Module that holds the collections, on the meta device.
        sharders: TorchRec's sharders of the collections to place.
        ranks: This rank and all ranks of the cluster.
        workload: Rows, ids and networks of a training step, or a function that returns them, called on rank 0 alone.
        config: How tables may be placed; the default config unless given.
        optimizers: Optimizers of the compositional tables; the declared ones unless given.

    Raises:
        InsufficientMemory: The tables, or the step that trains them, do not fit.
        UserError: The config names an unknown table or allows no way for a table, two tables have one name, or the
            config's device cannot be found.
    """

    def plan_here() -> ShardingPlan:
        own_config = config or PlanConfig()
        cluster = cluster_here(ranks, own_config.device)
        step = workload if isinstance(workload, Workload) else workload()
        return require_fitting_plan(find_plan(PlanRequest(model, sharders, cluster, step, own_config, optimizers)))

    return Collectives().on_first(plan_here)


def cluster_here(ranks: Ranks, device_name: str | None = None) -> Cluster:
    """Returns the cluster of the running ranks, assuming that all machines are like this one, with this one's memory.

    Speeds are the named device's, which has to be of the ranks' kind, or the most similar catalogue device's.
    """
    host, is_cuda = host_memory_bytes(), ranks.device.type == "cuda"
    memory = torch.cuda.get_device_properties(ranks.device).total_memory if is_cuda else host
    # TorchRec plans for equally many ranks on each machine; otherwise each rank counts as a machine of its own
    ranks_per_node = ranks.local_world_size if ranks.world_size % ranks.local_world_size == 0 else 1
    own_memory = memory // (1 if is_cuda else ranks.local_world_size // ranks_per_node)
    device = device_here(ranks.device, own_memory)
    if device_name is not None:
        device_named = find_device(device_name, "plan.device")
        if device_named.kind != device.kind:
            raise UserError(
                f"plan.device is {device_name!r}, which is a {device_named.kind} device, and the ranks are on "
                f"{device.kind}; name one of their kind, or leave it out."
            )
        device = dataclasses.replace(device_named, memory_bytes=own_memory)
    return Cluster(device, ranks.world_size // ranks_per_node, ranks_per_node, host)


def find_plan(request: PlanRequest) -> EstimatedPlan:
    """Plans for any cluster, in this process alone and without the cluster's devices.

    Where no plan is found to fit, the returned plan has ``fits`` False and exceeds the memory least.

    Raises:
        InsufficientMemory: Weights and optimizer states do not fit however they are placed, or a step of the networks
            does not fit even without tables.
        UserError: The config names an unknown table, or allows no way for a table.
    """
    return _Search(request).best()


def some_plan_fits(request: PlanRequest) -> bool:
    """Returns whether :func:`find_plan` finds a plan that fits, mostly without its search; raises ``UserError``."""
    try:
        return _Search(request).fits()
    except InsufficientMemory:
        return False


def require_room(request: PlanRequest) -> None:
    """Raises the errors of :func:`find_plan` where weights and states alone do not fit, without a search."""
    _Search(request).require_room()


def require_fitting_plan(estimated: EstimatedPlan) -> ShardingPlan:
    """Returns the plan if it fits; else raises an ``InsufficientMemory`` that names the fullest rank's items."""
    if estimated.fits:
        return estimated.plan
    fullest = max(estimated.ranks, key=lambda rank: rank.total_bytes)
    by_size = sorted(fullest.memory.items(), key=lambda item: -item[1])
    items = ", ".join([f"{name} {num_bytes:,}" for name, num_bytes in by_size if name != "allocator"][:3])
    excess, host_excess = map(max, zip(*(rank.excess_bytes for rank in estimated.ranks), strict=True))
    lacking = [f"{excess:,} bytes of memory"] * (excess > 0)
    lacking += [f"{host_excess:,} bytes of host memory"] * (host_excess > 0)
    raise InsufficientMemory(
        f"A step does not fit: rank {fullest.rank} lacks {' and '.join(lacking)} (most: {items}; in bytes). Take "
        "fewer rows a step (train.batch_size of a config), compress tables further (embedding.default.collisions), "
        "use more ranks, or keep less free with plan.reserve; `distembed plan` shows each rank."
    )


def plan_placements(model: nn.Module, plan: ShardingPlan, world_size: int) -> list[Placement]:
    """Returns the placement of each table of the model's collections that the plan names."""
    return [
        placement
        for path, module in embedding_modules(model).items()
        if path in plan.plan
        for placement in place_tables(table_configs(module), plan.plan[path], world_size, collection=path)
    ]


class _Search:
    """The search for one request; construction raises ``InsufficientMemory`` if a step has no room without tables."""

    def __init__(self, request: PlanRequest) -> None:
        self._request, world_size = request, request.cluster.world_size
        fullest = int(request.plannable_bytes.argmin())
        managed = int(request.managed_bytes[fullest])
        beside = {**request.workload.bytes_beside_tables(world_size), "managed_ids": managed}
        capacity = request.plannable_bytes[fullest] + managed
        if sum(beside.values()) > capacity:
            items = ", ".join(f"{name} {num_bytes:,}" for name, num_bytes in beside.items() if num_bytes)
            raise InsufficientMemory(
                f"No plan fits: besides tables {f'rank {fullest}' if managed else 'each rank'} needs "
                f"{sum(beside.values()):,} bytes ({items}); it has {capacity:,.0f}. "
                f"{_managed_remedy(request) if managed else ''}Take fewer rows a step (train.batch_size of a config), "
                "or larger devices."
            )
        fullest = int(request.host_bytes.argmin())
        if request.host_bytes[fullest] < 0:
            needed, has = request.managed_host_bytes[fullest], request.cluster.host_bytes_by_rank[fullest]
            raise InsufficientMemory(
                f"No plan fits: the managed ids of rank {fullest} need {needed:,.0f} bytes of host memory; it has "
                f"{has:,}. {_managed_remedy(request)}Use machines with more host memory, or more machines."
            )
        self._costs = PlacementCosts(request)
        self._tables = TableProblem(request, self._costs)
        self._counted = CountedMemory(request, self._tables)
        self._capacity = self._counted.capacity
        tolerance = request.config.time_tolerance
        self._solver = Solver(self._tables.problem, request.host_bytes, self._capacity, tolerance)
        # the counted solution whose fullest rank lacks the fewest bytes, and these bytes
        self._excess = np.inf
        self._least_excess: Solution

    def best(self) -> EstimatedPlan:
        self.require_room()
        fitting, request = self._fitting(), self._request
        solution = self._least_excess if fitting is None else fitting
        plan, aim = self._tables.plan(solution.assignment), Aim(self._capacity, request.host_bytes)
        placements = plan_placements(request.model, plan, request.cluster.world_size)
        why, alternatives = explain(request, self._tables, solution.assignment, aim)
        return EstimatedPlan(
            plan=plan,
            placements=placements,
            ranks=self._timed_ranks(placements, self._counted.ranks(solution.assignment)),
            why=why,
            alternatives=alternatives,
            lower_bound_ms=solution.lower_bound_ms,
            is_complete=fitting is not None and fitting.is_complete,
        )

    def fits(self) -> bool:
        """Returns whether :meth:`best` finds a plan that fits, mostly without its search for the fastest.

        Raises ``InsufficientMemory`` where weights, states and a step's networks alone exceed the memory. A few tables
        are searched completely. For more, the emptiest solution is counted, on which :meth:`best` falls back.
        """
        request = self._request
        bytes_beside_tables = sum(request.workload.bytes_beside_tables(request.cluster.world_size).values())
        self.require_room(request.plannable_bytes - bytes_beside_tables)
        fastest, is_complete = self._solver.best_of_all(self._fits)
        if fastest is not None or is_complete:
            return fastest is not None
        return self._fits(self._solver.emptiest(self._capacity).assignment) or self._fitting() is not None

    def require_room(self, num_bytes: Floats | None = None) -> None:
        """Raises an ``InsufficientMemory`` where weights and optimizer states do not fit, however they are placed.

        Each rank has ``num_bytes`` for them; unless given, all memory except the bytes that a rank keeps between steps.
        Two checks, with each table in its smallest option: one rank has room for each table's largest shard, and the
        tables pinned to a set of ranks, or to subsets of it, fit these ranks together.
        """
        problem, capacity = self._tables.problem, np.maximum(self._capacity if num_bytes is None else num_bytes, 0)
        world_size, needed = problem.world_size, dict[tuple[int, ...], float]()
        for unit, number in enumerate(problem.class_of):
            possible = [option.stored_bytes(world_size, problem.ranks_per_node) for option in problem.classes[number]]
            needed_by_one, ranks = min(largest for _, largest in possible), tuple(problem.ranks_of_class[number])
            needed[ranks] = needed.get(ranks, 0.0) + min(in_all for in_all, _ in possible)
            most = float(capacity[list(ranks or range(world_size))].max())
            if needed_by_one > most:
                names = [
                    f"table {self._tables.tables[member].table.name!r}" for member in self._tables.tables_by_unit[unit]
                ]
                pinned = f"the largest of ranks {format_ranges(ranks)}, to which it is pinned," if ranks else "a rank"
                raise InsufficientMemory(
                    f"The embedding tables do not fit in the memory of {world_size} rank(s): "
                    f"{' with '.join(names)} needs {needed_by_one:,.0f} bytes of one rank at least, with its "
                    f"optimizer, and {pinned} has {most:,.0f} bytes for tables.\n{_remedy(self._request, ranks)}"
                )
        for ranks in (*filter(None, needed), ()):
            # tables pinned to a subset of these ranks have no other place
            within = [pinned for pinned in needed if not ranks or (pinned and set(pinned) <= set(ranks))]
            least = sum(needed[pinned_ranks] for pinned_ranks in within)
            left = capacity[list(ranks or range(world_size))]
            if least > left.sum():
                room = f"{len(left)} x {left[0]:,.0f}" if (left == left[0]).all() else f"{left.sum():,.0f}"
                pinned = f" that are pinned to ranks {format_ranges(ranks)}" if ranks else ""
                raise InsufficientMemory(
                    f"The embedding tables{pinned} do not fit in the memory of {len(left)} rank(s): with their "
                    f"optimizer they take {least:,.0f} bytes, and {room} are left for them of "
                    f"{self._request.cluster.rank_bytes:,} a rank.\n{_remedy(self._request, ranks)}"
                )

    def _fitting(self) -> Solution | None:
        """Returns the fastest solution found whose exact count fits, or None; keeps the one that exceeds it least."""
        first, capacity, fitting = self._solver.fastest(self._capacity), self._capacity, None
        if self._fits(first.assignment):
            fitting = first
        else:
            # a step's exact count exceeds the sum of bytes that the solver limits: lower the capacity until the count
            # fits, once by repairing the last solution and once by a new search each time; the faster end is improved
            ends = [
                self._tightened(first, self._solver.repaired),
                self._tightened(first, lambda _, less: self._solver.fastest(less)),
            ]
            if tight := [end for end in ends if end is not None]:
                solution, capacity = min(tight, key=lambda end: end[0].milliseconds)
                fitting = self._improved(solution, capacity)
        fastest = self._solver.complete(fitting, self._fits)
        if seconds := self._request.config.polish_seconds:
            fastest = self._solver.polished(fastest, capacity, seconds, self._counted.excess)
        if fastest is None:
            return self._emptiest(capacity)
        # a solution nearly as fast with fewer bytes on the fullest rank, if the exact count confirms the fewer bytes
        emptier = self._solver.emptier(fastest, capacity)
        is_emptier = self._counted.excess(emptier.assignment)[0] <= self._counted.excess(fastest.assignment)[0]
        return emptier if is_emptier else fastest

    def _tightened(
        self, solution: Solution, solve_within: Callable[[Solution, Floats], Solution]
    ) -> tuple[Solution, Floats] | None:
        """Counts a solution, and calls ``solve_within`` with less and less capacity until the count fits.

        Returns the first solution that fits and its capacity; None after 6 tries, or where less capacity cannot help.
        """
        capacity = self._capacity
        for _ in range(_TRIES):
            excess, lower_capacity = self._counted.excess(solution.assignment)
            self._keep(solution, excess)
            if excess <= 0:
                return solution, capacity
            if (lower_capacity <= 0).all() or not solution.fits:
                break  # no capacity is left, or the solver could not keep the last one
            capacity = np.minimum(lower_capacity, capacity)
            solution = solve_within(solution, capacity)
        return None

    def _improved(self, solution: Solution, capacity: Floats) -> Solution:
        """Returns a faster solution whose exact count fits, or the given one, which fits at this capacity."""
        for _ in range(_TRIES):
            faster = self._solver.improved(solution.assignment, capacity)
            excess, lower = self._counted.excess(faster.assignment)
            if excess <= 0:
                return min(solution, faster, key=lambda candidate: candidate.milliseconds)
            if (lower <= 0).all():
                break
            capacity = np.minimum(lower, capacity)
        return solution

    def _emptiest(self, capacity: Floats) -> Solution | None:
        """Returns a solution with few bytes on the fullest rank, improved in time, if it fits."""
        solution = self._solver.emptiest(capacity)
        excess, _ = self._counted.excess(solution.assignment)
        self._keep(solution, excess)
        return self._improved(solution, capacity) if excess <= 0 else None

    def _keep(self, solution: Solution, excess: float) -> None:
        """Remembers a counted solution if it lacks fewer bytes than all before."""
        if excess < self._excess:
            self._excess, self._least_excess = excess, solution

    def _fits(self, assignment: Assignment) -> bool:
        return self._counted.excess(assignment)[0] <= 0

    def _timed_ranks(self, placements: Sequence[Placement], counted: Sequence[PlannedRank]) -> list[PlannedRank]:
        """Returns ranks with counted memory, completed by their times, the allocator's share and their capacities."""
        request, cluster = self._request, self._request.cluster
        times = step_times(placements, self._costs, cluster)
        memory, host = cluster.bytes_by_rank, request.host_bytes.tolist()
        managed, plannable = ([*map(int, each)] for each in (request.managed_bytes, request.plannable_bytes))
        return [
            replace(
                counted_rank,
                memory={
                    **counted_rank.memory,
                    "managed_ids": managed[rank],
                    "allocator": memory[rank] - plannable[rank] - managed[rank],
                },
                times=times[rank],
                capacity_bytes=memory[rank],
                host_capacity_bytes=int(host[rank]),
            )
            for rank, counted_rank in enumerate(counted)
        ]


class CountedMemory:
    """Counts the memory of a whole step on each rank under an assignment, exactly."""

    def __init__(self, request: PlanRequest, tables: TableProblem) -> None:
        self._request, self._tables = request, tables
        # bytes by rank that are left for tables after the bytes that no plan changes
        self.capacity: Floats = request.plannable_bytes - sum(request.workload.resting_bytes.values())

    def ranks(self, assignment: Assignment) -> list[PlannedRank]:
        world_size = self._request.cluster.world_size
        placements = [
            place_table(planned.table, self._tables.sharding(assignment, number), world_size, planned.collection)
            for number, planned in enumerate(self._tables.tables)
        ]
        return Step.of(self._request, placements).ranks()

    def excess(self, assignment: Assignment) -> tuple[float, Floats]:
        """Returns the bytes that the fullest rank lacks, and the capacities by rank with which to search again.

        The bytes are the larger lack of device and host memory; negative where all ranks have room. Capacities limit
        the sums of shards' bytes in a search; they are infinite where all devices have room.
        """
        # an overfull rank's exact total exceeds the search's sum; the largest difference is kept free on all ranks
        request, ranks = self._request, self.ranks(assignment)
        totals: Floats = np.array([rank.total_bytes for rank in ranks], np.float64)
        host = max(np.array([rank.storage.host for rank in ranks]) - request.host_bytes)
        added = Loads(self._tables.problem, assignment.copy()).num_bytes
        excess = totals - request.plannable_bytes
        over = excess > 0
        capacity = request.plannable_bytes - ((totals - added)[over].max() if over.any() else -np.inf)
        return max(float(excess.max()), float(host)), capacity


def _managed_remedy(request: PlanRequest) -> str:
    name = request.managed_names[0]
    return f"Lower embedding.tables.{name}.ids.size or ids.admission.candidates (managed ids of table {name!r}). "


def _remedy(request: PlanRequest, ranks: Sequence[int]) -> str:
    managed = _managed_remedy(request) if request.managed_names else ""
    pins = "Pin tables to more ranks (plan.tables.NAME.ranks). " if ranks else ""
    return f"{pins}{managed}" + (
        "Compress tables further (embedding.default.collisions of a config), make vectors shorter "
        "(embedding.default.embedding_dim), or use more ranks."
    )
