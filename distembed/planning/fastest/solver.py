"""Solves a problem: first guesses, local search, an exact search of small problems, and HiGHS on demand.

First guesses give every table one way, or the largest tables one way and the rest another: a good plan seldom mixes
many ways, since each exchange and each group of lookups in use has to be started. Guesses are sorted by an estimate
that spreads all work evenly over the ranks: most are worse than others before a table is placed.
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
"""Shares of all tables that count as the largest ones."""


def first_guesses(problem: Problem, aim: Aim) -> list[Ints]:
    """Returns options by table, the best guess by the estimate first."""
    tables = np.asarray(problem.class_of, np.int64)
    ways = {(option.kind, option.num_ranges): None for option in problem.options}
    by_way = [np.array([_nearest(problem, own, *way) for own in range(len(problem.classes))], np.int64) for way in ways]
    most_bytes = np.maximum.reduceat(problem.mean_sums[:, 1], problem.first_option[:-1])
    aim = Aim(float(np.mean(aim.capacity)), float(np.mean(aim.host_capacity)), aim.limit_ms)
    most_ms = np.minimum.reduceat(problem.mean_ms, problem.first_option[:-1])
    guesses = [options[tables] for options in by_way]
    for sizes in (most_bytes[tables], most_ms[tables]):
        order = np.argsort(-sizes, kind="stable")
        for share, (large, rest) in itertools.product(_SHARES, itertools.permutations(by_way, 2)):
            options, largest = rest[tables], order[: max(1, round(share * len(tables)))]
            options[largest] = large[tables[largest]]
            guesses.append(options)
    distinct = {options.tobytes(): options for options in guesses}
    return sorted(distinct.values(), key=lambda options: _estimate(problem, aim, options))


def _nearest(problem: Problem, number: int, kind: object, num_ranges: int) -> int:
    """Returns the option of a class that is nearest to a way, else the option with the least work."""
    own = range(int(problem.first_option[number]), int(problem.first_option[number + 1]))
    alike = [option for option in own if problem.options[option].kind == kind]
    if alike:
        return min(alike, key=lambda option: abs(problem.options[option].num_ranges - num_ranges))
    return min(own, key=lambda option: problem.mean_ms[option])


def _estimate(problem: Problem, aim: Aim, options: Ints) -> float:
    """Returns the score of a rank with an even share of all work; the longest shard is a lower limit."""
    sums = problem.mean_sums[options].sum(0)
    exchanges = {exchange for option in options for exchange in problem.options[option].exchanges}
    starts = sum(problem.exchange_start_ms[exchange] for exchange in exchanges)
    starts += np.asarray(problem.group_start_ms) @ np.minimum(sums[3 + 2 * problem.num_phases : -1], 1)
    ms = problem.base_ms + starts + max(problem.mean_ms[options].sum(), problem.longest_ms[options].max())
    return float(aim.scores(ms, sums[1], sums[2]).mean())


_score = attrgetter("score")
_SMALL = 8
"""Most tables of an exact search."""
_GUESSES = 24
"""Number of first guesses that are placed."""
_CONSTRUCTING = 2_000_000
"""Units to place guesses besides the search's units, over the number of tables: few tables are placed fast."""
_IMPROVING = 60
"""Times the usual work to improve a solution that fits in tight memory."""


@dataclass(frozen=True)
class Solution:
    """The result of a search."""

    assignment: Assignment
    milliseconds: float  # of the slowest rank
    lower_bound_ms: float  # that the slowest rank of no assignment that fits goes below
    is_complete: bool  # whether the best is known, within the tolerance; else the search was stopped
    fits: bool = True  # whether no rank has more than its capacity


class Solver:
    """Solves one problem for any capacity; plans may be slower than the best by the share ``tolerance``.

    ``bound_capacity`` has the most bytes of weights and states of a rank in a plan that fits, ``host_capacity`` the
    bytes of its share of host memory besides a device: one number or an array by rank.
    """

    def __init__(
        self, problem: Problem, host_capacity: Floats | float, bound_capacity: Floats | float, tolerance: float
    ) -> None:
        self._problem, self._tolerance = problem, tolerance
        self._host_capacity, self._bound_capacity = host_capacity, bound_capacity
        self._bound = LowerBound(problem, bound_capacity)

    def fastest(self, capacity: Floats | float) -> Solution:
        """Returns the fastest assignment within a capacity, as far as bytes add up."""
        aim = Aim(capacity, self._host_capacity)
        best = self._from_guesses(aim, self._bound.milliseconds(np.inf) * (1 + self._tolerance / 2))
        return self._solution(best.assignment, aim, self._bound.milliseconds(best.score))

    def repaired(self, solution: Solution, capacity: Floats | float) -> Solution:
        """Returns a solution changed to lie within a capacity, as far as bytes add up."""
        aim = Aim(capacity, self._host_capacity)
        best = LocalSearch(self._problem, aim, self._budget()).improve(solution.assignment)
        best = min(best, self._from_all_options(aim), key=_score)
        best = LocalSearch(self._problem, aim, Budget(2_000), seed=1).shake(best, solution.milliseconds)
        return self._solution(best.assignment, aim, solution.lower_bound_ms)

    def emptiest(self, capacity: Floats | float) -> Solution:
        """Returns a solution with few bytes on the fullest rank, at any time."""
        aim = Aim(capacity, self._host_capacity, limit_ms=np.inf)
        best = LocalSearch(self._problem, aim, Budget(2_000), seed=2).shake(self._from_all_options(aim), 0.0)
        return self._solution(best.assignment, replace(aim, limit_ms=None), self._bound.milliseconds(np.inf))

    def improved(self, assignment: Assignment, capacity: Floats | float) -> Solution:
        """Returns the solution to which an assignment within its capacity is improved."""
        aim, total = Aim(capacity, self._host_capacity), self._budget(_IMPROVING)
        best = Found(assignment, float(Loads(self._problem, assignment).scores(aim).max()))
        for seed in range(3):
            best = self._grown(best, aim, 0.0, total, _IMPROVING // 3, seed)
        return self._solution(best.assignment, aim, self._bound.milliseconds(best.score))

    def complete(self, solution: Solution | None, accepts: Callable[[Assignment], bool]) -> Solution | None:
        """Returns the fastest accepted assignment of all, where tables are few enough; else the given solution."""
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
        """Returns the fastest accepted assignment, if any is faster than a time, and whether all were searched."""
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
        """Returns the fastest solution that HiGHS finds within some seconds, else the given one.

        ``excess`` counts an assignment: the bytes that the fullest rank lacks, and capacities at which it would fit.

        Raises:
            UserError: highspy is not installed.
        """
        rejected: list[Floats] = []

        def accepts(assignment: Assignment) -> bool:
            lacking, lower = excess(assignment)
            if lacking > 0:
                rejected.append(lower)
            return lacking <= 0

        deadline, problem, limits = time.monotonic() + seconds, self._problem.with_stored_bytes(), self._bound_capacity
        best, low = solution, 0.0 if solution is None else solution.lower_bound_ms
        while (left := deadline - time.monotonic()) > 0:
            rejected.clear()
            start, aim = None if best is None else best.assignment, Aim(limits, self._host_capacity)
            found, bound = polish.solve(problem, aim, start, left, accepts, self._tolerance)
            if problem is not self._problem:  # every plan that fits has room for its weights and states
                low = max(low, bound)
            if found is not None:
                faster = Solution(found, self._slowest_ms(found), low, False)
                best = faster if best is None or faster.milliseconds < best.milliseconds else best
            if not rejected or np.all(rejected[-1] <= 0):
                break
            capacity = np.minimum(rejected[-1], capacity)
            problem, limits = self._problem, capacity
        if best is None:
            return None
        low = min(low, best.milliseconds)
        return replace(best, lower_bound_ms=low, is_complete=best.is_complete or self._is_near(best.milliseconds, low))

    def emptier(self, solution: Solution, capacity: Floats | float) -> Solution:
        """Returns an assignment within the tolerance of a solution's time, with fewer bytes on the fullest rank."""
        limit_ms = solution.milliseconds * (1 + self._tolerance)
        aim, budget = Aim(capacity, self._host_capacity, limit_ms), Budget(1_000 + self._problem.num_tables)
        found = LocalSearch(self._problem, aim, budget, keeps_options=True).improve(solution.assignment).assignment
        ms = self._slowest_ms(found)
        return replace(solution, assignment=found, milliseconds=ms) if ms <= limit_ms else solution

    def _solution(self, assignment: Assignment, aim: Aim, lower_bound: float) -> Solution:
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

    def _from_guesses(self, aim: Aim, enough: float) -> Found:
        """Returns the best assignment grown from first guesses: fewer at each stage, with more work."""
        # 24 guesses are placed -> the best 7 are improved -> 3 are shaken -> 1 is shaken longest, as in a tournament;
        # `total` is the work left, of which placing takes at most a third
        num_tables, placed = self._problem.num_tables, list[Found]()
        total = Budget(60_000 + 200 * num_tables)
        constructing = Budget(total.units / 3 + _CONSTRUCTING / num_tables)
        for options in first_guesses(self._problem, aim)[:_GUESSES]:
            placed.append(LocalSearch(self._problem, aim, constructing).construct([[own] for own in options.tolist()]))
            if constructing.is_spent or placed[-1].score <= enough:
                break
        total.units -= max(0.0, total.units / 3 - constructing.units)
        # where none has room yet, the estimate tells more than the score
        candidates = [*sorted(placed, key=_score)[:3], *placed[:4]]
        best = sorted({id(found): found for found in candidates}.values(), key=_score)
        for count, times, seed in ((7, 6, None), (3, 10, 0), (1, 20, 1)):
            best = sorted((self._grown(own, aim, enough, total, times, seed) for own in best[:count]), key=_score)
        return best[0]

    def _grown(self, found: Found, aim: Aim, enough: float, total: Budget, times: int, seed: int | None) -> Found:
        """Returns the assignment after improving it, or shaking it by a seed, with a part of the work left."""
        if found.score <= enough or total.is_spent:
            return found
        budget = self._budget(times)
        allowed = budget.units = min(budget.units, total.units)
        if seed is not None:
            places = Budget(budget.units / 2)  # places alone cost less to try than options
            found = LocalSearch(self._problem, aim, places, keeps_options=True, seed=seed).shake(found, enough)
            budget.units -= allowed / 2 - places.units
        search = LocalSearch(self._problem, aim, budget, seed=seed or 0)
        found = search.improve(found.assignment) if seed is None else search.shake(found, enough)
        total.units -= allowed - budget.units
        return found
