"""Every assignment of a small problem, except for assignments that cannot improve on the best found so far.

Branch and bound. Tables are placed one by one, the longest first, in each way that differs: one rank stands for all
ranks with equal loads. A partial assignment is dropped when its lower bound reaches the best score. The bound is the
larger of the largest score so far and the mean time of all ranks after the remaining tables.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from distembed.planning.fastest.loads import Aim, Loads
from distembed.planning.fastest.local_search import Budget, Found
from distembed.planning.fastest.problem import Assignment, Floats, Ints, Problem

_EQUAL = 9
"""Decimals to which the loads of two ranks have to agree for one rank to stand for both."""


class ExactSearch:
    """Searches all assignments for the one with the least largest score under ``aim``, until the budget is spent.

    ``accepts`` is a check of the caller, for example an exact count of memory. It is called with each complete
    assignment that is better than all accepted before; the search ignores assignments for which it returns False.
    """

    def __init__(
        self, problem: Problem, aim: Aim, budget: Budget, accepts: Callable[[Assignment], bool] = lambda _: True
    ) -> None:
        self._problem, self._aim, self._budget, self._accepts = problem, aim, budget, accepts
        least_ms = [problem.mean_ms[problem.options_of(table)].min() for table in range(problem.num_tables)]
        # equal tables follow each other, since their order does not matter; _left_ms[d] is the least time of the tables
        # from depth d on
        self._order = sorted(range(problem.num_tables), key=lambda table: (-least_ms[table], problem.class_of[table]))
        self._left_ms = np.cumsum([0.0, *[least_ms[table] for table in self._order[::-1]]])[::-1]
        self._best: Found | None = None
        # a row by rank: two ranks may stand for each other where capacities and allowed options are equal
        limits = [np.broadcast_to(capacity, problem.world_size) for capacity in (aim.capacity, aim.host_capacity)]
        self._rank_limits: Floats = np.stack([*limits, *np.unique(problem.allowed, axis=0)], 1).astype(np.float64)

    def better_than(self, score: float) -> tuple[Found | None, bool]:
        """Returns the best accepted assignment if its largest score is below ``score``, and whether all were tried."""
        self._score = score
        is_complete = self._place_from(Loads(self._problem, Assignment.empty(self._problem.num_tables)), 0)
        return self._best, is_complete

    def _place_from(self, loads: Loads, depth: int) -> bool:
        """Tries all ways to place the tables from ``depth`` on, and keeps the best; False if the budget ends."""
        if depth == len(self._order):
            exact = Loads(self._problem, loads.assignment)  # without the rounding of repeated sums and differences
            score = float(exact.scores(self._aim).max())
            if score < self._score and self._accepts(loads.assignment):
                self._best, self._score = Found(loads.assignment.copy(), score), score
            return True
        table, is_complete = self._order[depth], True
        for option, places, _ in self._placements(loads, table):
            if self._budget.is_spent:
                return False
            loads.put(table, option, places)
            if self._least_score(loads, float(self._left_ms[depth + 1])) < self._score * (1 - 1e-9):
                is_complete = self._place_from(loads, depth + 1)
            loads.take(table)
            if not is_complete:
                return False
        return not self._budget.is_spent

    def _least_score(self, loads: Loads, left_ms: float) -> float:
        """Returns a lower bound of the largest score, where the remaining tables add ``left_ms`` to the mean rank."""
        self._budget.spend(1, self._problem.world_size)
        # largest score >= largest so far, and >= (mean of own milliseconds + left_ms) / speed, since the slowest rank
        # is at least the mean. Own milliseconds leave out work for other ranks' shards: a later table may hide in it
        speed = min(1.0, self._problem.ranks_at_once / self._problem.ranks_per_node)
        return max(float(loads.scores(self._aim).max()), (float(loads.own_milliseconds().mean()) + left_ms) / speed)

    def _placements(self, loads: Loads, table: int) -> list[tuple[int, Ints, float]]:
        """Returns option, places and lower bound of each distinct way to place a table, the least bound first.

        Ways whose bound reaches the best score are left out; the list is empty where the budget ends.
        """
        placements = []
        for option in self._problem.options_of(table):
            for places in self._places(loads, option):
                if self._budget.is_spent:  # many nodes have very many ways
                    return []
                loads.put(table, option, places)
                least_score = self._least_score(loads, 0.0)
                if least_score < self._score:
                    placements.append((option, places, least_score))
                loads.take(table)
        return sorted(placements, key=lambda placement: placement[2])

    def _places(self, loads: Loads, option: int) -> Iterator[Ints]:
        """Yields places for an option's blocks, one choice for all choices that give equal loads.

        Places are interchangeable where their ranks have equal loads and limits, and lie on one node if the problem
        depends on nodes: by shared cores, or by blocks that fill one.
        """
        problem, blocks, size = self._problem, self._problem.option_blocks[option], self._problem.ranks_per_node
        ranks_of_place = size if len(blocks) and problem.blocks.fills_node[blocks[0]] else 1
        has_nodes = ranks_of_place == 1 and (problem.ranks_at_once < size or problem.blocks.fills_node.any())
        loads_of_place = np.concatenate([loads.signature(_EQUAL), self._rank_limits], axis=1)
        allowed = problem.allowed[option].reshape(-1, ranks_of_place).all(1)
        kinds: dict[tuple[int, bytes], list[int]] = {}
        for place, row in enumerate(loads_of_place.reshape(len(allowed), -1)):
            if allowed[place]:
                kinds.setdefault((place // size if has_nodes else 0, row.tobytes()), []).append(place)
        for places in _choices(blocks.tolist(), list(kinds.values())):
            yield np.array(places, np.int64)


def _choices(blocks: Sequence[int], kinds: Sequence[Sequence[int]], first: int = 0) -> Iterator[list[int]]:
    """Yields a place for each block, all different, without choices that differ by swapping equal blocks or places.

    ``kinds`` groups the free places: places of one kind are interchangeable, so the first stands for all. Equal blocks
    are adjacent in ``blocks`` and take kinds in ascending order, so the first block takes ``first`` or a later kind.
    Blocks a a b with places 1 2 of one kind and 3 of another yield 1 2 3 and 1 3 2, of six orders.
    """
    if not blocks:
        yield []
        return
    for number, kind in enumerate(kinds[first:], first):
        if kind:
            kinds_left = [*kinds[:number], kind[1:], *kinds[number + 1 :]]
            # a block like this one goes to the same kind or a later one
            is_alike = len(blocks) > 1 and blocks[1] == blocks[0]
            for places in _choices(blocks[1:], kinds_left, number if is_alike else 0):
                yield [kind[0], *places]
