"""Solves a problem: first guesses, local search, an exact search of small problems, and HiGHS on demand.

A *way* is a sharding type, a compute kernel and a number of column ranges. First guesses give every table one way, or
the largest tables one way and the rest another: a good plan seldom mixes many ways, since each exchange and each group
of lookups in use has to be started. Guesses are sorted by an estimate that spreads all work evenly over the ranks, so
that only the most promising ones are placed.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from distembed.planning.fastest import polish
from distembed.planning.fastest.bound import LowerBound
from distembed.planning.fastest.exact import ExactSearch
from distembed.planning.fastest.loads import Aim, Loads
from distembed.planning.fastest.local_search import Budget, Found, LocalSearch
from distembed.planning.fastest.problem import Assignment, Floats, Ints, Problem

_SHARES = (0.1, 0.25, 0.5, 0.75)
"""Shares of all tables that a first guess treats as large."""


def first_guesses(problem: Problem, aim: Aim) -> list[Ints]:
    """Returns distinct guesses, the best estimate first; each is an array with an option for each table."""
    # by_way[i][c] is class c's option for way i; sizes: the bytes in the largest option, the work in the cheapest
    tables = np.asarray(problem.class_of, np.int64)
    shapes = {(option.kind, option.num_ranges): None for option in problem.options}
    classes = range(len(problem.classes))
    by_way = [np.array([_nearest(problem, number, *way) for number in classes], np.int64) for way in shapes]
    most_bytes = np.maximum.reduceat(problem.mean_sums[:, 1], problem.first_option[:-1])
    aim = Aim(float(np.mean(aim.capacity)), float(np.mean(aim.host_capacity)), aim.limit_ms)
    most_ms = np.minimum.reduceat(problem.mean_ms, problem.first_option[:-1])
    guesses = [options[tables] for options in by_way]
    for sizes in (most_bytes[tables], most_ms[tables]):
        order = np.argsort(-sizes, kind="stable")
        for large_share, (large, small) in itertools.product(_SHARES, itertools.permutations(by_way, 2)):
            options, largest = small[tables], order[: max(1, round(large_share * len(tables)))]
            options[largest] = large[tables[largest]]
            guesses.append(options)
    distinct = {options.tobytes(): options for options in guesses}
    return sorted(distinct.values(), key=lambda options: _estimate(problem, aim, options))


def _nearest(problem: Problem, number: int, kind: object, num_ranges: int) -> int:
    """Returns the class's option of ``kind`` with the nearest number of ranges; without one, its cheapest option."""
    options = range(int(problem.first_option[number]), int(problem.first_option[number + 1]))
    alike = [option for option in options if problem.options[option].kind == kind]
    if alike:
        return min(alike, key=lambda option: abs(problem.options[option].num_ranges - num_ranges))
    return min(options, key=lambda option: problem.mean_ms[option])


def _estimate(problem: Problem, aim: Aim, options: Ints) -> float:
    """Returns the score of a rank with an even share of the work of ``options`` (by table), before tables are placed.

    The rank has at least the longest shard. It starts each exchange in use; a group counts by its shards per rank, once
    at most.
    """
    sums = problem.mean_sums[options].sum(0)
    exchanges = {exchange for option in options for exchange in problem.options[option].exchanges}
    starts = sum(problem.exchange_start_ms[exchange] for exchange in exchanges)
    starts += np.asarray(problem.group_start_ms) @ np.minimum(sums[3 + 2 * problem.num_phases : -1], 1)
    ms = problem.base_ms + starts + max(problem.mean_ms[options].sum(), problem.longest_ms[options].max())
    return float(aim.scores(ms, sums[1], sums[2]).mean())


_score = attrgetter("score")
_SMALL = 8
"""Most tables for which all assignments are searched."""
_GUESSES = 24
"""Number of first guesses that are placed."""
_CONSTRUCTING = 2_000_000
"""Units to place guesses on top of a third of the search's units, divided by the number of tables."""
_SEARCHING = 6_000
"""Units to search all assignments of a few tables before their assignments are shaken, which takes 35,000 units."""
_IMPROVING = 60
"""Factor of the budget to improve a solution that fits in tight memory; the usual factor is 6."""


@dataclass(frozen=True)
class Solution:
    """The result of a search."""

    assignment: Assignment
    milliseconds: float  # of the slowest rank
    lower_bound_ms: float  # the slowest rank of every assignment that fits takes at least these milliseconds
    is_complete: bool  # whether the time is proven to be the best, within the tolerance; else the search was stopped
    fits: bool = True  # whether the sums of shards' bytes are within every rank's capacity


class Solver:
    """Solves one problem for any capacity; a plan counts as the best within the share ``tolerance`` of its time.

    A *capacity* limits the sum of a rank's shards' bytes, which only approximates a step's memory: the caller counts
    each solution exactly and tries again with less capacity. ``bound_capacity`` is a rank's most bytes of weights and
    optimizer state in any plan that fits, ``host_capacity`` its share of host memory apart from the device. Each is one
    number, or an array by rank.
    """

    def __init__(
        self, problem: Problem, host_capacity: Floats | float, bound_capacity: Floats | float, tolerance: float
    ) -> None:
        self._problem, self._tolerance = problem, tolerance
        self._host_capacity, self._bound_capacity = host_capacity, bound_capacity
        self._bound = LowerBound(problem, bound_capacity)

    def fastest(self, capacity: Floats | float) -> Solution:
        """Returns the fastest assignment found within a capacity; ``fits`` is False where none was found."""
        aim = Aim(capacity, self._host_capacity)
        best = self._from_guesses(aim, self._bound.milliseconds(np.inf) * (1 + self._tolerance / 2))
        return self._solution(best.assignment, aim, self._bound.milliseconds(best.score))

    def repaired(self, solution: Solution, capacity: Floats | float) -> Solution:
        """Returns a solution within a smaller capacity, near the given one or built anew, whichever is faster."""
        aim = Aim(capacity, self._host_capacity)
        best = LocalSearch(self._problem, aim, self._budget()).improve(solution.assignment)
        best = min(best, self._from_all_options(aim), key=_score)
        best = LocalSearch(self._problem, aim, Budget(2_000), seed=1).shake(best, solution.milliseconds)
        return self._solution(best.assignment, aim, solution.lower_bound_ms)

    def emptiest(self, capacity: Floats | float) -> Solution:
        """Returns a solution with few bytes on the fullest rank, however slow; may exceed the capacity."""
        aim = Aim(capacity, self._host_capacity, limit_ms=np.inf)
        best = LocalSearch(self._problem, aim, Budget(2_000), seed=2).shake(self._from_all_options(aim), 0.0)
        return self._solution(best.assignment, replace(aim, limit_ms=None), self._bound.milliseconds(np.inf))

    def improved(self, assignment: Assignment, capacity: Floats | float) -> Solution:
        """Returns a solution at least as fast as an assignment within its capacity, found by random changes to it."""
        aim, total = Aim(capacity, self._host_capacity), self._budget(_IMPROVING)
        best = Found(assignment, float(Loads(self._problem, assignment).scores(aim).max()))
        for seed in range(3):
            best = self._improved(best, aim, 0.0, total, _IMPROVING // 3, seed)
        return self._solution(best.assignment, aim, self._bound.milliseconds(best.score))

    def complete(self, solution: Solution | None, accepts: Callable[[Assignment], bool]) -> Solution | None:
        """Returns the fastest accepted assignment by exhaustive search of a few tables; else the given solution.

        Where the search ends and finds nothing faster, the given solution is returned as complete.
        """
        best, is_complete = self.best_of_all(accepts, np.inf if solution is None else solution.milliseconds)
        if best is not None:
            low = best.score if is_complete else self._bound.milliseconds(best.score)
            return Solution(best.assignment, best.score, low, self._is_near(best.score, low))
        if solution is None or not is_complete:
            return solution
        return replace(solution, lower_bound_ms=solution.milliseconds, is_complete=True)

    def best_of_all(
        self, accepts: Callable[[Assignment], bool], faster_than: float = np.inf
    ) -> tuple[Found | None, bool]:
        """Returns the best accepted assignment below ``faster_than`` ms, or None, and whether all were searched.

        Nothing is searched for more than 8 tables. Bytes count weights and optimizer state, the part of memory that is
        exact as a sum; ``accepts`` counts the whole step.
        """
        if self._problem.num_tables > _SMALL:
            return None, False
        aim = Aim(self._bound_capacity, self._host_capacity)
        return ExactSearch(self._problem.with_stored_bytes(), aim, Budget(60_000), accepts).better_than(faster_than)

    def polished(
        self,
        solution: Solution | None,
        capacity: Floats | float,
        seconds: float,
        excess: Callable[[Assignment], tuple[float, Floats]],
    ) -> Solution | None:
        """Returns the fastest solution that HiGHS finds within ``seconds``, or the given one if it finds none faster.

        ``excess`` counts an assignment exactly: it returns the bytes that the fullest rank lacks (at most 0 where all
        fit), and the capacities by rank with which the sums of bytes would have refused the assignment.

        Raises:
            UserError: highspy is not installed.
        """
        rejected: list[Floats] = []

        def accepts(assignment: Assignment) -> bool:
            lacking, lower = excess(assignment)
            if lacking > 0:
                rejected.append(lower)
            return lacking <= 0

        # first with the bytes of weights and states alone: every plan that fits is a solution of this program, so its
        # bound holds. HiGHS stops at an assignment that `accepts` rejects; then all bytes count, with less capacity
        deadline, problem, limits = time.monotonic() + seconds, self._problem.with_stored_bytes(), self._bound_capacity
        best, bound_ms = solution, 0.0 if solution is None else solution.lower_bound_ms
        while (seconds_left := deadline - time.monotonic()) > 0:
            rejected.clear()
            start, aim = None if best is None else best.assignment, Aim(limits, self._host_capacity)
            polished, bound = polish.solve(problem, aim, start, seconds_left, accepts, self._tolerance)
            if problem is not self._problem:  # a bound of the first program
                bound_ms = max(bound_ms, bound)
            if polished is not None:
                faster = Solution(polished, self._slowest_ms(polished), bound_ms, False)
                best = faster if best is None or faster.milliseconds < best.milliseconds else best
            if not rejected or np.all(rejected[-1] <= 0):
                break
            capacity = np.minimum(rejected[-1], capacity)
            problem, limits = self._problem, capacity
        if best is None:
            return None
        bound_ms = min(bound_ms, best.milliseconds)
        return replace(
            best,
            lower_bound_ms=bound_ms,
            is_complete=best.is_complete or self._is_near(best.milliseconds, bound_ms),
        )

    def emptier(self, solution: Solution, capacity: Floats | float) -> Solution:
        """Returns a solution with fewer bytes on the fullest rank, slower by the tolerance at most; or the given one.

        Shards move, and tables stay divided as they are.
        """
        limit_ms = solution.milliseconds * (1 + self._tolerance)
        aim, budget = Aim(capacity, self._host_capacity, limit_ms), Budget(1_000 + self._problem.num_tables)
        moved = LocalSearch(self._problem, aim, budget, keeps_options=True).improve(solution.assignment).assignment
        ms = self._slowest_ms(moved)
        return replace(solution, assignment=moved, milliseconds=ms) if ms <= limit_ms else solution

    def _solution(self, assignment: Assignment, aim: Aim, lower_bound: float) -> Solution:
        """Returns the solution with its time and fit computed from the assignment, without a search's rounding."""
        loads, ms = Loads(self._problem, assignment), self._slowest_ms(assignment)
        fits = aim.fits(loads.num_bytes, loads.host_bytes)
        return Solution(assignment, ms, lower_bound, self._is_near(ms, lower_bound), fits)

    def _slowest_ms(self, assignment: Assignment) -> float:
        return float(Loads(self._problem, assignment).milliseconds().max())

    def _is_near(self, milliseconds: float, lower_bound: float) -> bool:
        return milliseconds <= lower_bound * (1 + self._tolerance)

    def _budget(self, times: int = 6) -> Budget:
        return Budget(times * (700 + 1.5 * self._problem.num_tables))

    def _from_all_options(self, aim: Aim) -> Found:
        search, tables = LocalSearch(self._problem, aim, self._budget()), range(self._problem.num_tables)
        return search.improve(search.construct([self._problem.options_of(table) for table in tables]).assignment)

    def _from_guesses(self, aim: Aim, enough_score: float) -> Found:
        """Returns the best assignment found from first guesses; stops once a score is at most ``enough_score``."""
        # 24 guesses are placed -> the best 7 are improved -> 3 are shaken -> 1 is shaken longest, as in a tournament;
        # placing takes at most a third of the work
        num_tables, placed = self._problem.num_tables, list[Found]()
        work_left = Budget(60_000 + 200 * num_tables)
        constructing = Budget(work_left.units / 3 + _CONSTRUCTING / num_tables)
        for options in first_guesses(self._problem, aim)[:_GUESSES]:
            search = LocalSearch(self._problem, aim, constructing)
            placed.append(search.construct([[option] for option in options.tolist()]))
            if constructing.is_spent or placed[-1].score <= enough_score:
                break
        work_left.units -= max(0.0, work_left.units / 3 - constructing.units)
        # the best by score and the first by estimate: where no guess has room yet, scores say how full, not how fast
        candidates = [*sorted(placed, key=_score)[:3], *placed[:4]]
        best = sorted({id(found): found for found in candidates}.values(), key=_score)
        for num_kept, times, seed in ((7, 6, None), (3, 10, 0), (1, 20, 1)):
            if seed == 0 and num_tables <= _SMALL and best[0].score > enough_score:
                # of few tables all assignments are searched in less work than shakes take, after which none can help
                better, is_complete = ExactSearch(self._problem, aim, Budget(_SEARCHING)).better_than(best[0].score)
                best = [better or best[0], *best[1:]]
                if is_complete:
                    break
            improved = [self._improved(found, aim, enough_score, work_left, times, seed) for found in best[:num_kept]]
            best = sorted(improved, key=_score)
        return best[0]

    def _improved(
        self, found: Found, aim: Aim, enough_score: float, work_left: Budget, times: int, seed: int | None
    ) -> Found:
        """Returns the assignment after improving it (no seed) or shaking it with random changes drawn from a seed.

        Does nothing where the score is at most ``enough_score``. Subtracts the work from ``work_left``; ``times``
        limits it.
        """
        if found.score <= enough_score or work_left.is_spent:
            return found
        budget = self._budget(times)
        allowed = budget.units = min(budget.units, work_left.units)
        if seed is not None:
            moving = Budget(budget.units / 2)  # places alone cost less to try than options
            found = LocalSearch(self._problem, aim, moving, keeps_options=True, seed=seed).shake(found, enough_score)
            budget.units -= allowed / 2 - moving.units
        search = LocalSearch(self._problem, aim, budget, seed=seed or 0)
        found = search.improve(found.assignment) if seed is None else search.shake(found, enough_score)
        work_left.units -= allowed - budget.units
        return found
