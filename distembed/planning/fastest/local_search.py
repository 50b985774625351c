"""Search for an assignment that makes the largest score of all ranks small: largest first, then moves and swaps.

Tables are placed longest first, and again with the most bytes first, each where the largest score stays least. Then the
rank with the largest score gives up shards: one goes elsewhere, one is exchanged for another, or a table is placed in
another way. Where nothing helps, some tables are placed anew at random and the same begins again.

Trade-off: no assignment is tried twice the same way, but nothing says that the best was among them; the bound
(:mod:`distembed.planning.fastest.bound`) does. Work is counted, not timed, so that equal problems have equal outcomes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from distembed.planning.fastest.loads import Aim, Loads
from distembed.planning.fastest.problem import Assignment, Floats, Ints, Problem

_TRIES_PER_STEP = 24
"""Tables of the rank with the largest score that are tried in one step."""
_MAX_REPLACED = 6
"""Tables that are placed anew at once, at most."""
_GAIN = 1e-9
"""Least share of the largest score by which a step makes it smaller."""


@dataclass
class Budget:
    """Work that a search may do: a unit for each operation on arrays, and one more for each 4,096 numbers.

    Attributes:
        units: Units that are left.
    """

    units: float

    def spend(self, operations: int, numbers: int = 0) -> None:
        """Takes the units of some operations over so many numbers each."""
        self.units -= operations * (1 + numbers / 4096)

    @property
    def is_spent(self) -> bool:
        """Whether no unit is left."""
        return self.units <= 0


@dataclass(frozen=True)
class Found:
    """An assignment and the scores that it has.

    Attributes:
        assignment: Where tables go.
        score: The largest score of a rank.
    """

    assignment: Assignment
    score: float


class LocalSearch:
    """Searches assignments of a problem.

    Args:
        problem: The problem.
        aim: What is made small.
        budget: Work that is allowed, of all calls together.
        keeps_options: Whether tables stay divided as they are.
        seed: Seed of the choices at random.
    """

    def __init__(self, problem: Problem, aim: Aim, budget: Budget, keeps_options: bool = False, seed: int = 0) -> None:
        self._problem, self._aim, self._budget, self._keeps_options = problem, aim, budget, keeps_options
        self._random = np.random.default_rng(seed)
        self._numbers = problem.world_size * (problem.num_phases + len(problem.group_start_ms) + 2)

    def construct(self, options: Sequence[Iterable[int]]) -> Found:
        """Returns the better of two assignments: one places tables longest first, the other largest first.

        Args:
            options: Options that each table may have.
        """
        allowed = [list(own) for own in options]
        numbers, num_bytes = self._problem.option_blocks, self._problem.blocks.num_bytes
        found = self._construct(allowed, self._problem.longest_ms)
        if self._budget.is_spent:
            return found
        largest = np.array([num_bytes[own].max(initial=0) for own in numbers])
        return min(found, self._construct(allowed, largest), key=lambda it: it.score)

    def _construct(self, allowed: Sequence[Sequence[int]], size_of_option: Floats) -> Found:
        """Places the largest tables first, each where the largest score stays least."""
        loads = Loads(self._problem, Assignment.empty(self._problem.num_tables))
        sizes = [size_of_option[own].max() for own in allowed]
        for table in sorted(range(self._problem.num_tables), key=lambda table: -sizes[table]):
            option, places, _ = self._best_option(loads, allowed[table])
            loads.put(table, option, places)
        return self._found(loads)

    def improve(self, assignment: Assignment) -> Found:
        """Returns an assignment that no step makes better, or the last one before the budget was spent."""
        loads = Loads(self._problem, assignment.copy())
        while not self._budget.is_spent and self._step(loads):
            pass
        return self._found(loads)

    def shake(self, found: Found, enough: float) -> Found:
        """Returns the best assignment after placing tables anew, again and again.

        Args:
            found: The assignment to begin with.
            enough: Score at which the search ends; else it does when the budget is spent.
        """
        while not self._budget.is_spent and found.score > enough:
            loads = Loads(self._problem, found.assignment.copy())
            tables = self._tables_to_replace(loads)
            options = [
                [int(loads.assignment.option[table])] if self._keeps_options else self._some_options(table)
                for table in tables
            ]
            for table in tables:
                loads.take(table)
            for table, some in zip(tables, options, strict=True):
                option, places, _ = self._best_option(loads, some)
                loads.put(table, option, places)
            again = self.improve(loads.assignment)
            if again.score <= found.score:
                found = again
        return found

    def _found(self, loads: Loads) -> Found:
        exact = Loads(self._problem, loads.assignment)  # without the rounding of what was added and taken away
        return Found(loads.assignment, float(self._scores(exact).max()))

    def _scores(self, loads: Loads) -> Floats:
        self._budget.spend(1, self._numbers)
        return loads.scores(self._aim)

    def _best_option(self, loads: Loads, options: Sequence[int]) -> tuple[int, Ints, Floats]:
        """Returns the best of some options of a table that is nowhere, its places, and the scores with it."""
        best: tuple[int, Ints, Floats] | None = None
        for option in options:
            places, scores = loads.try_option(option, self._aim)
            self._budget.spend(3 + 2 * len(places), self._numbers)
            if best is None or _is_less(scores, best[2]):
                best = option, places, scores
        assert best is not None
        return best

    def _step(self, loads: Loads) -> bool:
        """Makes the largest score smaller, if one of the steps does."""
        scores = self._scores(loads)
        worst = int(scores.argmax())
        tables = self._tables_on(loads, worst)
        return (
            self._move(loads, tables, scores)
            or self._swap(loads, tables, worst, scores)
            or (not self._keeps_options and self._replace(loads, self._others(tables), scores))
        )

    def _tables_on(self, loads: Loads, rank: int) -> list[int]:
        """Returns some tables with a shard on a rank, as many of each size."""
        own = sorted(loads.tables_of[rank])
        if len(own) > _TRIES_PER_STEP:
            own.sort(key=lambda table: self._problem.longest_ms[loads.assignment.option[table]])
            own = [own[int(i)] for i in np.linspace(0, len(own) - 1, _TRIES_PER_STEP)]
        return own

    def _others(self, tables: Sequence[int]) -> list[int]:
        """Returns these tables and some of all others: what is slow may be what every rank does for them."""
        num_tables = self._problem.num_tables
        if num_tables <= _TRIES_PER_STEP:
            return list(range(num_tables))
        drawn = self._random.choice(num_tables, _TRIES_PER_STEP // 2, replace=False)
        return list(dict.fromkeys([*tables, *drawn.tolist()]))

    def _move(self, loads: Loads, tables: Sequence[int], scores: Floats) -> bool:
        """Moves a table's shards, its option as it is."""
        return self._replace(loads, tables, scores, keeps_option=True)

    def _replace(self, loads: Loads, tables: Sequence[int], scores: Floats, keeps_option: bool = False) -> bool:
        """Places the table anew that makes the largest score least; tells whether one makes it smaller.

        Where options may change, each other table that made it smaller takes its best option too, if that still does:
        trying all options of all tables again for each of these tables would spend the budget.
        """
        improving: list[tuple[Floats, int, int, Ints]] = []
        tried: set[tuple[int, bytes]] = set()
        for table in tables:
            if self._budget.is_spent:
                break
            before, places = int(loads.assignment.option[table]), loads.assignment.places[table]
            if (before, places.tobytes()) in tried:
                continue  # one that is alike lies there as well
            tried.add((before, places.tobytes()))
            loads.take(table)
            option, better, after = self._best_option(
                loads, [before] if keeps_option else list(self._problem.options_of(table))
            )
            loads.put(table, before, places)
            if _is_less(after, scores):
                improving.append((after, table, option, better))
        if not improving:
            return False
        best = reduce(lambda own, other: other if _is_less(other[0], own[0]) else own, improving)
        scores, table, option, better = best
        loads.take(table)
        loads.put(table, option, better)
        if keeps_option:
            return True
        for _, table, option, _ in sorted(improving, key=lambda own: own[0].max()):
            before, places = int(loads.assignment.option[table]), loads.assignment.places[table]
            if table == best[1] or option == before:
                continue
            loads.take(table)
            _, better, after = self._best_option(loads, [option])
            is_less = _is_less(after, scores)
            scores = after if is_less else scores
            loads.put(table, option if is_less else before, better if is_less else places)
        return True

    def _swap(self, loads: Loads, tables: Sequence[int], worst: int, scores: Floats) -> bool:
        """Exchanges a shard of the worst rank for one of another rank, if that makes both smaller than it was."""
        others = _Shards(self._problem, loads.assignment)
        best, exchanged = float(scores[worst]) * (1 - _GAIN), None
        tried: set[tuple[int, int]] = set()
        for table in tables:
            for position in others.positions(table, worst):
                own = int(loads.assignment.option[table]), int(others.block[position])
                if own in tried or self._budget.is_spent:
                    continue
                tried.add(own)
                after = others.scores_if_swapped(loads, position, self._aim)
                self._budget.spend(4, len(others.block) * (self._problem.num_phases + 4))
                if len(after) and after.min() < best:
                    best, exchanged = float(after.min()), (position, int(after.argmin()))
        if exchanged is None:
            return False
        before = loads.assignment.copy()
        swapped = others.swap(loads, *exchanged)
        if _is_less(self._scores(loads), scores):
            return True
        # what was told of both ranks is told as if they had cores of their own
        for table in swapped:
            loads.take(table)
            loads.put(table, int(before.option[table]), before.places[table])
        return False

    def _tables_to_replace(self, loads: Loads) -> list[int]:
        """Returns tables at random, some of them of the rank with the largest score, in an order at random."""
        worst = sorted(loads.tables_of[int(self._scores(loads).argmax())])
        count = int(self._random.integers(2, _MAX_REPLACED + 1))
        drawn = self._random.permutation(worst)[: (count + 1) // 2].tolist()
        drawn += self._random.permutation(self._problem.num_tables)[: count // 2].tolist()
        return [int(table) for table in self._random.permutation(list(dict.fromkeys(drawn)))]

    def _some_options(self, table: int) -> list[int]:
        """Returns a table's options, without each with a chance of a third."""
        options = np.array(self._problem.options_of(table))
        kept = options[self._random.random(len(options)) > 1 / 3]
        return [int(option) for option in (kept if len(kept) else options)]


class _Shards:
    """Shards of an assignment that may be exchanged: those of blocks for one rank."""

    def __init__(self, problem: Problem, assignment: Assignment) -> None:
        self._problem = problem
        tables: list[int] = []
        indices: list[int] = []
        blocks: list[Ints] = []
        ranks: list[Ints] = []
        for table, places in enumerate(assignment.places):
            own = problem.option_blocks[assignment.option[table]]
            if len(places) and not problem.blocks.fills_node[own[0]]:
                tables += [table] * len(places)
                indices += range(len(places))
                blocks.append(own)
                ranks.append(places)
        self.table, self._index = np.array(tables, np.int64), np.array(indices, np.int64)
        self.block: Ints = np.concatenate(blocks) if blocks else np.empty(0, np.int64)
        self.rank: Ints = np.concatenate(ranks) if ranks else np.empty(0, np.int64)
        self._option = assignment.option[self.table]

    def positions(self, table: int, rank: int) -> list[int]:
        """Returns where a table's shard on a rank is among all shards."""
        start, stop = np.searchsorted(self.table, [table, table + 1])
        return [int(start) + int(i) for i in np.flatnonzero(self.rank[start:stop] == rank)]

    def scores_if_swapped(self, loads: Loads, position: int, aim: Aim) -> Floats:
        """Returns the larger score of both ranks if a shard is exchanged for each of the others."""
        block, rank = int(self.block[position]), int(self.rank[position])
        mine = np.full(len(self.block), block)
        there = loads.scores_after(self.rank, self.block, mine, aim)
        here = loads.scores_after(np.full(len(self.block), rank), mine, self.block, aim)
        after: Floats = np.maximum(there, here)
        after[(self.rank == rank) | (self.block == block)] = np.inf
        if self._problem.allowed is not None:
            after[~self._problem.allowed[self._option, rank]] = np.inf
            after[~self._problem.allowed[self._option[position], self.rank]] = np.inf
        # no rank gets a second shard of one table
        for other in self.table[self.rank == rank].tolist() if (np.bincount(self.table) > 1).any() else ():
            after[self.table == other] = np.inf
        for other_rank in self.rank[self.table == self.table[position]].tolist():
            after[self.rank == other_rank] = np.inf
        return after

    def swap(self, loads: Loads, position: int, other: int) -> list[int]:
        """Exchanges two shards, and returns their tables."""
        for table, index, rank in (
            (int(self.table[position]), int(self._index[position]), int(self.rank[other])),
            (int(self.table[other]), int(self._index[other]), int(self.rank[position])),
        ):
            option, places = int(loads.assignment.option[table]), loads.assignment.places[table].copy()
            places[index] = rank
            loads.take(table)
            loads.put(table, option, places)
        return list(dict.fromkeys([int(self.table[position]), int(self.table[other])]))


def _is_less(scores: Floats, others: Floats) -> bool:
    """Returns whether the largest score is less, or as large on fewer ranks, or all of them together are less."""
    largest, other = float(scores.max()), float(others.max())
    if abs(largest - other) > _GAIN * abs(other):
        return largest < other
    near = largest - 1e-6 * abs(largest)
    count, other_count = int((scores >= near).sum()), int((others >= near).sum())
    if count != other_count:
        return count < other_count
    return float(scores.sum()) < float(others.sum()) * (1 - 1e-6)
