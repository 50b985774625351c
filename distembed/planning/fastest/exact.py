"""Every assignment of a small problem, but those that cannot be better than the best found so far.

Tables are placed one after the other, the largest first, in each way that differs: of ranks with equal loads one stands
for all. What is placed so far says how long ranks take at least, and all tables together how long they take on average.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from distembed.planning.fastest.loads import Aim, Loads
from distembed.planning.fastest.local_search import Budget, Found
from distembed.planning.fastest.problem import Assignment, Floats, Ints, Problem

_EQUAL = 9
"""Decimals by which loads of ranks are compared."""


@dataclass(frozen=True)
class Outcome:
    """What an exact search ended with.

    Attributes:
        found: The best assignment; None where none is better than what was known.
        is_complete: Whether all assignments were tried or cannot be better.
    """

    found: Found | None
    is_complete: bool


class ExactSearch:
    """Tries all assignments.

    Args:
        problem: The problem.
        aim: What is made small.
        budget: Work that is allowed.
        accepts: Tells whether an assignment may be taken; asked only of those that are better than all before.
    """

    def __init__(
        self, problem: Problem, aim: Aim, budget: Budget, accepts: Callable[[Assignment], bool] = lambda _: True
    ) -> None:
        self._problem, self._aim, self._budget, self._accepts = problem, aim, budget, accepts
        self._least_ms = [problem.mean_ms[problem.options_of(table)].min() for table in range(problem.num_tables)]
        # one after the other: tables that are alike stay together, of which the order does not matter
        self._order = sorted(
            range(problem.num_tables), key=lambda table: (-self._least_ms[table], problem.class_of[table])
        )
        self._left_ms = np.cumsum([0.0, *[self._least_ms[table] for table in self._order[::-1]]])[::-1]
        self._best: Found | None = None
        self._rank_limits = self._limits_by_rank()

    def better_than(self, score: float) -> Outcome:
        """Returns the best assignment whose largest score is less than another."""
        self._score = score
        loads = Loads(self._problem, Assignment.empty(self._problem.num_tables))
        is_complete = self._place(loads, 0)
        return Outcome(self._best, is_complete)

    def _place(self, loads: Loads, depth: int) -> bool:
        """Tries all ways to place the remaining tables; returns whether it came to the end."""
        if depth == len(self._order):
            self._take(loads)
            return True
        table = self._order[depth]
        for option, places, _ in self._ways(loads, table, depth):
            if self._budget.is_spent:
                return False
            if not self._can_be_better(loads, table, option, places, depth):
                continue
            loads.put(table, option, places)
            is_complete = self._place(loads, depth + 1)
            loads.take(table)
            if not is_complete:
                return False
        return not self._budget.is_spent

    def _take(self, loads: Loads) -> None:
        exact = Loads(self._problem, loads.assignment.copy())
        score = float(exact.scores(self._aim).max())
        if score < self._score and self._accepts(loads.assignment):
            self._best, self._score = Found(loads.assignment.copy(), score), score

    def _can_be_better(self, loads: Loads, table: int, option: int, places: Ints, depth: int) -> bool:
        loads.put(table, option, places)
        scores = self._least_scores(loads, float(self._left_ms[depth + 1]))
        loads.take(table)
        return bool(scores < self._score * (1 - 1e-9))

    def _least_scores(self, loads: Loads, left_ms: float) -> float:
        problem, largest = self._problem, float(loads.scores(self._aim).max())
        self._budget.spend(1, problem.world_size)
        if self._aim.limit_ms is not None:
            return largest
        # what a node's ranks take together, its cores take at least; waiting for what others exchange is none of it,
        # since tables that are still to come may be exchanged meanwhile
        speed = min(1.0, problem.ranks_at_once / problem.ranks_per_node)
        return max(largest, (float(loads.own_milliseconds().mean()) + left_ms) / speed)

    def _ways(self, loads: Loads, table: int, depth: int) -> list[tuple[int, Ints, float]]:
        """Returns options and places of a table, the best first; of ranks alike with one that stands for all."""
        ways = []
        for option in self._problem.options_of(table):
            for places in self._places(loads, option):
                if self._budget.is_spent:  # many nodes have very many ways
                    return []
                loads.put(table, option, places)
                ways.append((option, places, self._least_scores(loads, 0.0)))
                loads.take(table)
        ways = [way for way in ways if way[2] < self._score]
        return sorted(ways, key=lambda way: way[2])

    def _places(self, loads: Loads, option: int) -> Iterator[Ints]:
        own = self._problem.option_blocks[option]
        if not len(own):
            yield np.empty(0, np.int64)
            return
        fills_node = bool(self._problem.blocks.fills_node[own[0]])
        signature = np.concatenate([loads.signature(_EQUAL), self._rank_limits], axis=1)
        kinds = self._kinds(signature, fills_node)
        if self._problem.allowed is not None:
            allowed = self._problem.allowed[option]
            allowed = allowed.reshape(-1, self._problem.ranks_per_node).all(1) if fills_node else allowed
            kinds = [kind for kind in kinds if allowed[kind[0]]]
        yield from (np.array(places, np.int64) for places in _choices(own.tolist(), kinds))

    def _limits_by_rank(self) -> Floats:
        """Returns a row of numbers for each rank, equal where the same tables may lie and as many bytes."""
        world_size, allowed = self._problem.world_size, self._problem.allowed
        limits = [np.broadcast_to(own, world_size) for own in (self._aim.capacity, self._aim.host_capacity)]
        return np.column_stack([*limits, *([] if allowed is None else np.unique(allowed, axis=0))]).astype(np.float64)

    def _kinds(self, signature: Floats, fills_node: bool) -> list[list[int]]:
        """Returns places, those that are alike together; of one node only where nodes have blocks or share cores."""
        size = self._problem.ranks_per_node
        if fills_node:
            rows = [row.tobytes() for row in signature.reshape(len(signature) // size, -1)]
            keys: list[Hashable] = [*rows]
        else:
            shares_cores = self._problem.ranks_at_once < size
            has_nodes = shares_cores or bool(self._problem.blocks.fills_node.any())
            keys = [(rank // size if has_nodes else 0, row.tobytes()) for rank, row in enumerate(signature)]
        kinds: dict[Hashable, list[int]] = {}
        for place, key in enumerate(keys):
            kinds.setdefault(key, []).append(place)
        return list(kinds.values())


def _choices(blocks: Sequence[int], kinds: Sequence[Sequence[int]], first: int = 0) -> Iterator[list[int]]:
    """Yields different places of blocks, of places alike the first that are left, and of blocks alike in one order.

    Args:
        blocks: The blocks, those that are alike one after the other.
        kinds: Places that are left, those that are alike together.
        first: The kind from which on the first block may go.
    """
    if not blocks:
        yield []
        return
    for number, kind in enumerate(kinds[first:], first):
        if kind:
            left = [*kinds[:number], kind[1:], *kinds[number + 1 :]]
            # a block like this one goes to the same kind or a later one
            is_alike = len(blocks) > 1 and blocks[1] == blocks[0]
            for places in _choices(blocks[1:], left, number if is_alike else 0):
                yield [kind[0], *places]
