"""Search for an assignment with a small largest score of all ranks: largest tables first, then moves and swaps.

*Construct*: tables are placed longest first, and again with the most bytes first, each where the largest score stays
least. *Improve*: the rank with the largest score gives up a shard, which moves or is swapped for another, or a table is
divided differently, until no step helps. *Shake*: random tables are placed again and the result is improved.

Trade-off: nothing says that the best assignment was found; the bound (:mod:`distembed.planning.fastest.bound`) limits
the loss. Work is counted, not timed, so equal problems have equal results.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distembed.planning.fastest.loads import Aim, Loads
from distembed.planning.fastest.problem import Assignment, Floats, Ints, Problem

_TRIES_PER_STEP = 24
"""Most tables that one step tries to place again."""
_MAX_REPLACED = 6
"""Most tables that one shake places again."""
_GAIN = 1e-9
"""Relative decrease of the largest score below which two scores count as equal."""


@dataclass
class Budget:
    """Work that a search may do: a unit for each operation on arrays, and one more for each 4,096 numbers."""

    units: float  # the work left; at most 0 once the budget is spent

    def spend(self, operations: int, numbers: int = 0) -> None:
        """Subtracts the units of ``operations`` array operations over ``numbers`` numbers each."""
        self.units -= operations * (1 + numbers / 4096)

    @property
    def is_spent(self) -> bool:
        return self.units <= 0


@dataclass(frozen=True)
class Found:
    """An assignment, and its largest score over all ranks: the quantity that a search makes small."""

    assignment: Assignment
    score: float


class LocalSearch:
    """Searches assignments with a small largest score under an aim.

    All calls together spend the given budget. With ``keeps_options`` shards move, and every table keeps its option.
    ``seed`` seeds the random choices.
    """

    def __init__(self, problem: Problem, aim: Aim, budget: Budget, keeps_options: bool = False, seed: int = 0) -> None:
        self._problem, self._aim, self._budget, self._keeps_options = problem, aim, budget, keeps_options
        self._random = np.random.default_rng(seed)
        self._numbers = problem.world_size * (problem.num_phases + len(problem.group_start_ms) + 2)

    def construct(self, options: Sequence[Sequence[int]]) -> Found:
        """Places all tables, each by one of its ``options`` (a sequence by table); returns the better of two attempts.

        One attempt places tables by falling milliseconds, the other by falling bytes.
        """
        by_milliseconds = self._construct(options, self._problem.longest_ms)
        if self._budget.is_spent:
            return by_milliseconds
        largest = self._problem.largest(self._problem.blocks.num_bytes)
        return min(by_milliseconds, self._construct(options, largest), key=lambda result: result.score)

    def _construct(self, options: Sequence[Sequence[int]], size_of_option: Floats) -> Found:
        """Places tables by falling ``size_of_option``, each by the option and at the places with the least scores."""
        loads = Loads(self._problem, Assignment.empty(self._problem.num_tables))
        sizes = [size_of_option[table_options].max() for table_options in options]
        for table in sorted(range(self._problem.num_tables), key=lambda table: -sizes[table]):
            option, places, _ = self._best_option(loads, options[table])
            loads.put(table, option, places)
        return self._result(loads)

    def improve(self, assignment: Assignment) -> Found:
        """Takes improving steps from a copy of the assignment until none improves it or the budget is spent."""
        loads = Loads(self._problem, assignment.copy())
        while not self._budget.is_spent and self._step(loads):
            pass
        return self._result(loads)

    def shake(self, found: Found, enough_score: float) -> Found:
        """Places random tables again and improves, until the score is at most ``enough_score`` or the budget is spent.

        A result that is no worse replaces the assignment, so ties let the search wander.
        """
        while not self._budget.is_spent and found.score > enough_score:
            loads = Loads(self._problem, found.assignment.copy())
            tables = self._tables_to_replace(loads)
            options = [
                [int(loads.assignment.option[table])] if self._keeps_options else self._some_options(table)
                for table in tables
            ]
            for table in tables:
                loads.take(table)
            for table, table_options in zip(tables, options, strict=True):
                option, places, _ = self._best_option(loads, table_options)
                loads.put(table, option, places)
            improved = self.improve(loads.assignment)
            if improved.score <= found.score:
                found = improved
        return found

    def _result(self, loads: Loads) -> Found:
        exact = Loads(self._problem, loads.assignment)  # without the rounding of repeated sums and differences
        return Found(loads.assignment, float(self._scores(exact).max()))

    def _scores(self, loads: Loads) -> Floats:
        self._budget.spend(1, self._numbers)
        return loads.scores(self._aim)

    def _best_option(self, loads: Loads, options: Sequence[int]) -> tuple[int, Ints, Floats]:
        """Returns the best of a removed table's options, the option's places, and all ranks' scores with it."""
        best: tuple[int, Ints, Floats] | None = None
        for option in options:
            places, scores = loads.try_option(option, self._aim)
            self._budget.spend(3 + 2 * len(places), self._numbers)
            if best is None or _is_less(scores, best[2]):
                best = option, places, scores
        assert best is not None
        return best

    def _step(self, loads: Loads) -> bool:
        """Applies one change to ``loads`` that makes the scores less; returns False where none was found."""
        # only changes of the worst rank lower the largest score: try, from cheap to expensive, to move one of its
        # tables, to swap one of its shards for another rank's, and to divide a table differently
        scores = self._scores(loads)
        worst = int(scores.argmax())
        tables = sorted(loads.tables_by_rank[worst])
        if len(tables) > _TRIES_PER_STEP:  # a sample evenly spread over the sizes
            tables.sort(key=lambda table: self._problem.longest_ms[loads.assignment.option[table]])
            tables = [tables[int(i)] for i in np.linspace(0, len(tables) - 1, _TRIES_PER_STEP)]
        if self._replace(loads, tables, scores, keeps_option=True) or self._swap(loads, tables, worst, scores):
            return True
        if self._keeps_options:
            return False
        # a random sample of all tables too: the worst rank's time may be its work for other ranks' shards
        candidates = list(range(self._problem.num_tables))
        if len(candidates) > _TRIES_PER_STEP:
            drawn = self._random.choice(len(candidates), _TRIES_PER_STEP // 2, replace=False)
            candidates = list(dict.fromkeys([*tables, *drawn.tolist()]))
        return self._replace(loads, candidates, scores)

    def _replace(self, loads: Loads, tables: Sequence[int], scores: Floats, keeps_option: bool = False) -> bool:
        """Places one of ``tables`` again, the one that makes the scores least; returns whether any makes them less.

        With ``keeps_option`` the table moves and keeps its option. Otherwise each other table whose best option would
        have helped takes that option too, if it still helps after the first change: a new search over all options of
        all tables would spend the budget.
        """
        improving: list[tuple[Floats, int, int, Ints]] = []
        tried: set[tuple[int, bytes]] = set()
        for table in tables:
            before, places = int(loads.assignment.option[table]), loads.assignment.places[table]
            if self._budget.is_spent:
                break
            if (before, places.tobytes()) in tried:
                continue  # a table with the same option and places has been tried
            tried.add((before, places.tobytes()))
            loads.take(table)
            options = [before] if keeps_option else self._problem.options_of(table)
            option, better, after = self._best_option(loads, options)
            loads.put(table, before, places)
            if _is_less(after, scores):
                improving.append((after, table, option, better))
        if not improving:
            return False
        scores, replaced, option, better = improving[0]
        for change in improving[1:]:
            if _is_less(change[0], scores):
                scores, replaced, option, better = change
        loads.put(replaced, option, better)
        for _, table, option, _ in [] if keeps_option else sorted(improving, key=lambda change: change[0].max()):
            before, places = int(loads.assignment.option[table]), loads.assignment.places[table]
            if table != replaced and option != before:
                loads.take(table)
                _, better, after = self._best_option(loads, [option])
                if _is_less(after, scores):
                    scores, before, places = after, option, better
                loads.put(table, before, places)
        return True

    def _swap(self, loads: Loads, tables: Sequence[int], worst: int, scores: Floats) -> bool:
        """Swaps a shard of the worst rank for a shard of another rank, if both ranks end below the worst score.

        Tries the worst rank's shards of ``tables``, and applies the best swap. Returns whether the scores got less.
        """
        shards, before = _Shards(self._problem, loads.assignment), loads.assignment.copy()
        best, swapped = float(scores[worst]) * (1 - _GAIN), None
        tried: set[tuple[int, int]] = set()
        for table in tables:
            for position in np.flatnonzero((shards.table == table) & (shards.rank == worst)).tolist():
                shard_kind = int(before.option[table]), int(shards.block[position])
                if shard_kind in tried or self._budget.is_spent:
                    continue
                tried.add(shard_kind)
                after = shards.scores_if_swapped(loads, position, self._aim)
                self._budget.spend(4, len(after) * (self._problem.num_phases + 4))
                if after.min() < best:
                    best, swapped = float(after.min()), (position, int(after.argmin()))
        if swapped is None:
            return False
        for position, partner in (swapped, swapped[::-1]):
            table = int(shards.table[position])
            places = before.places[table].copy()
            places[shards.index[position]] = shards.rank[partner]
            loads.put(table, int(before.option[table]), places)
        if _is_less(self._scores(loads), scores):
            return True
        # scores_if_swapped assumes that each rank has cores of its own; with shared cores the swap does not help: undo
        for table in shards.table[list(swapped)].tolist():
            loads.put(table, int(before.option[table]), before.places[table])
        return False

    def _tables_to_replace(self, loads: Loads) -> list[int]:
        """Returns up to 6 distinct random tables in random order, about half of them from the worst rank."""
        worst = sorted(loads.tables_by_rank[int(self._scores(loads).argmax())])
        count = int(self._random.integers(2, _MAX_REPLACED + 1))
        drawn = self._random.permutation(worst)[: (count + 1) // 2].tolist()
        drawn += self._random.permutation(self._problem.num_tables)[: count // 2].tolist()
        return [int(table) for table in self._random.permutation(list(dict.fromkeys(drawn)))]

    def _some_options(self, table: int) -> list[int]:
        """Returns each of a table's options with probability 2/3; all of them where none is drawn."""
        options = np.array(self._problem.options_of(table))
        drawn: list[int] = options[self._random.random(len(options)) > 1 / 3].tolist()
        return drawn or options.tolist()


class _Shards:
    """All shards that may be swapped, as equally long arrays: ``table``, ``block``, ``rank`` and ``index``.

    ``index`` is the shard's position among its table's blocks. Blocks that fill a node are left out.
    """

    def __init__(self, problem: Problem, assignment: Assignment) -> None:
        blocks = [problem.option_blocks[number] for number in assignment.option]
        counts = list(map(len, assignment.places))
        self.block = np.concatenate(blocks)
        is_alone = ~problem.blocks.fills_node[self.block]
        self.block, self.rank = self.block[is_alone], np.concatenate(assignment.places)[is_alone]
        self.table = np.repeat(np.arange(len(counts)), counts)[is_alone]
        self.index = np.concatenate([np.arange(count) for count in counts])[is_alone]
        self._problem, self._option = problem, assignment.option[self.table]

    def scores_if_swapped(self, loads: Loads, position: int, aim: Aim) -> Floats:
        """Returns for each shard the larger score of the two ranks if it is swapped with the shard at ``position``.

        Infinite for equal blocks, ranks where a table may not lie, and a second shard of a table on one rank.
        """
        table, block, rank = self.table[position], self.block[position], self.rank[position]
        own_blocks, own_ranks = np.full(len(self.block), block), np.full(len(self.block), rank)
        # one call scores the other shards' ranks, and then this shard's rank
        ranks, without, with_ = (
            np.concatenate(both)
            for both in ((self.rank, own_ranks), (self.block, own_blocks), (own_blocks, self.block))
        )
        other_scores, rank_scores = loads.scores_after(ranks, without, with_, aim).reshape(2, -1)
        after: Floats = np.maximum(other_scores, rank_scores)
        after[self.block == block] = np.inf
        if self._problem.is_pinned:
            allowed = self._problem.allowed
            after[~allowed[self._option, rank] | ~allowed[self._option[position], self.rank]] = np.inf
        # no rank gets a second shard of one table
        tables_on_rank = np.zeros(self._problem.num_tables, bool)
        tables_on_rank[self.table[self.rank == rank]] = True
        ranks_of_table = np.zeros(self._problem.world_size, bool)
        ranks_of_table[self.rank[self.table == table]] = True
        after[tables_on_rank[self.table] | ranks_of_table[self.rank]] = np.inf
        return after


def _is_less(scores: Floats, other_scores: Floats) -> bool:
    """Compares scores by rank: by the largest score, then by the number of ranks that have it, then by the sum."""
    largest, other_largest = float(scores.max()), float(other_scores.max())
    if abs(largest - other_largest) > _GAIN * abs(other_largest):
        return largest < other_largest
    near = largest - 1e-6 * abs(largest)
    count, other_count = int((scores >= near).sum()), int((other_scores >= near).sum())
    if count != other_count:
        return count < other_count
    return float(scores.sum()) < float(other_scores.sum()) * (1 - 1e-6)
