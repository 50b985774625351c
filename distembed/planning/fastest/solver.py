"""The fastest assignment that fits, a lower bound beside it, and whether the search came to its end.

Options are chosen by the relaxation of the bound for a few times above it, tables placed longest first and improved
(:mod:`distembed.planning.fastest.local_search`); then small problems are searched completely
(:mod:`distembed.planning.fastest.exact`), and larger ones shaken until the best is near the bound or the budget spent.
Of assignments that are nearly as fast as the best the one with the emptiest fullest rank is taken.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from distembed.planning.fastest.bound import LowerBound
from distembed.planning.fastest.exact import ExactSearch
from distembed.planning.fastest.loads import Aim, Loads
from distembed.planning.fastest.local_search import Budget, Found, LocalSearch
from distembed.planning.fastest.problem import Assignment, Floats, Problem

_SMALL = 8
"""Tables up to which all assignments are searched."""
_LARGE = 20_000
"""Tables times ranks from which on the search has two beginnings alone."""
_FACTORS = (1.0, 1.03, 1.1, 1.3)
"""Times for which the relaxation chooses options, as multiples of the bound."""


@dataclass(frozen=True)
class Solution:
    """What a search ended with.

    Attributes:
        assignment: Where tables go.
        milliseconds: Time of the slowest rank.
        lower_bound_ms: Milliseconds that the slowest rank of no assignment that fits goes below.
        is_complete: Whether the best is known, within the tolerance; else the search was stopped.
        fits: Whether no rank has more than its capacity.
    """

    assignment: Assignment
    milliseconds: float
    lower_bound_ms: float
    is_complete: bool
    fits: bool = True


class Solver:
    """Solves one problem, for one capacity or several.

    Args:
        problem: The problem.
        host_capacity: Bytes of each rank's share of the machine's memory beside a device, for all or by rank.
        bound_capacity: Bytes that weights and states of a rank do not exceed in a plan that fits, for all or by rank.
        tolerance: Share by which a plan may be slower than the best that is known.
    """

    def __init__(
        self, problem: Problem, host_capacity: Floats | float, bound_capacity: Floats | float, tolerance: float
    ) -> None:
        self._problem, self._host_capacity, self._tolerance = problem, host_capacity, tolerance
        self._bound_capacity = bound_capacity
        self._bound = LowerBound(problem, bound_capacity)

    def fastest(self, capacity: Floats | float) -> Solution:
        """Returns the fastest assignment of which no rank has more bytes, as far as these add up."""
        aim = Aim(capacity, self._host_capacity)
        best = min((self._from_options(aim, options) for options in self._beginnings()), key=lambda it: it.score)
        lower_bound = self._bound.milliseconds(best.score)
        if not self._is_near(best.score, lower_bound):
            best = self._shaken(best, aim, lower_bound)
        if not self._is_near(best.score, lower_bound) and self._problem.num_tables > _SMALL:
            best = min(best, self._undivided(aim, lower_bound), key=lambda found: found.score)
        return self._solution(best.assignment, aim, lower_bound)

    def repaired(self, solution: Solution, capacity: Floats | float) -> Solution:
        """Returns a solution changed so that no rank has more bytes, as far as they add up."""
        aim, budget = Aim(capacity, self._host_capacity), self._budget()
        search = LocalSearch(self._problem, aim, budget)
        best = search.improve(solution.assignment)
        again = self._from_options(aim, [list(self._options_by_bytes(table)) for table in self._tables()])
        best = min(best, again, key=lambda found: found.score)
        best = LocalSearch(self._problem, aim, Budget(2_000), seed=1).shake(best, solution.milliseconds)
        return self._solution(best.assignment, aim, solution.lower_bound_ms)

    def emptiest(self, capacity: Floats | float) -> Assignment:
        """Returns an assignment with few bytes on the fullest rank, whatever its time."""
        aim = Aim(capacity, self._host_capacity, limit_ms=np.inf)
        best = self._from_options(aim, [list(self._options_by_bytes(table)) for table in self._tables()])
        return LocalSearch(self._problem, aim, Budget(2_000), seed=2).shake(best, 0.0).assignment

    def complete(self, solution: Solution | None, accepts: Callable[[Assignment], bool]) -> Solution | None:
        """Returns the fastest of all assignments that are accepted, where they are few enough; else what it was given.

        Args:
            solution: An assignment that is accepted; None where none is known.
            accepts: Tells whether an assignment fits.
        """
        if self._problem.num_tables > _SMALL:
            return solution
        stored = self._problem.with_stored_bytes()
        search = ExactSearch(stored, Aim(self._bound_capacity, self._host_capacity), Budget(15_000), accepts)
        outcome = search.better_than(np.inf if solution is None else solution.milliseconds)
        best = outcome.found
        if best is None:
            if solution is None or not outcome.is_complete:
                return solution
            return replace(solution, lower_bound_ms=solution.milliseconds, is_complete=True)
        low = best.score if outcome.is_complete else self._bound.milliseconds(best.score)
        return Solution(best.assignment, best.score, low, outcome.is_complete or self._is_near(best.score, low))

    def emptier(self, solution: Solution, capacity: Floats | float) -> Solution:
        """Returns an assignment within the tolerance of a solution's time with fewer bytes on the fullest rank."""
        limit_ms = solution.milliseconds * (1 + self._tolerance)
        aim = Aim(capacity, self._host_capacity, limit_ms)
        budget = Budget(1_000 + self._problem.num_tables)
        found = LocalSearch(self._problem, aim, budget, keeps_options=True).improve(solution.assignment)
        ms = float(Loads(self._problem, found.assignment.copy()).milliseconds().max())
        return replace(solution, assignment=found.assignment, milliseconds=ms) if ms <= limit_ms else solution

    def _solution(self, assignment: Assignment, aim: Aim, lower_bound: float) -> Solution:
        loads = Loads(self._problem, assignment.copy())
        ms = float(loads.milliseconds().max())
        fits = aim.fits(loads.num_bytes, loads.host_bytes)
        return Solution(assignment, ms, lower_bound, self._is_near(ms, lower_bound), fits)

    def _is_near(self, milliseconds: float, lower_bound: float) -> bool:
        return milliseconds <= lower_bound * (1 + self._tolerance)

    def _tables(self) -> range:
        return range(self._problem.num_tables)

    def _budget(self) -> Budget:
        return Budget(4_000 + 8 * self._problem.num_tables)

    def _from_options(self, aim: Aim, options: Sequence[Sequence[int]]) -> Found:
        search = LocalSearch(self._problem, aim, self._budget())
        return search.improve(search.construct(options).assignment)

    def _beginnings(self) -> Iterator[list[list[int]]]:
        """Yields options that tables are placed by at first."""
        is_large = self._problem.num_tables * self._problem.world_size > _LARGE
        lowest = self._bound.milliseconds(np.inf)
        for factor in _FACTORS[:2] if is_large else _FACTORS:
            yield [[option] for option in self._bound.cheapest_options(lowest * factor)]
        if not is_large:
            yield [[self._problem.options_of(table).start] for table in self._tables()]
            yield [list(self._problem.options_of(table)) for table in self._tables()]

    def _shaken(self, found: Found, aim: Aim, lower_bound: float) -> Found:
        """Returns a better assignment, if one is found."""
        search = LocalSearch(self._problem, aim, Budget(2_000 + 4 * self._problem.num_tables))
        return search.shake(found, lower_bound * (1 + self._tolerance / 2))

    def _undivided(self, aim: Aim, lower_bound: float) -> Found:
        """Returns an assignment of all tables by their first option, for which all the work is spent on places.

        Arrays of a problem with many options are longer than they would be with these alone, and take more work.
        """
        budget = Budget(12_000 + 24 * self._problem.num_tables)
        search = LocalSearch(self._problem, aim, budget, keeps_options=True)
        first = search.construct([[self._problem.options_of(table).start] for table in self._tables()])
        return search.shake(search.improve(first.assignment), lower_bound * (1 + self._tolerance / 2))

    def _options_by_bytes(self, table: int) -> range:
        return self._problem.options_of(table)
