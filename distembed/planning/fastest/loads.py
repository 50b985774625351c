"""Loads of all ranks under an assignment, kept in arrays, and the loads with one table placed elsewhere."""

from dataclasses import dataclass

import numpy as np

from distembed.planning.fastest.problem import NO_GROUP, Assignment, Floats, Ints, Problem

_PENALTY = 1e6
"""Weight of a load's excess over a limit, against the minimised load."""


@dataclass(frozen=True)
class Aim:
    """The minimised load of the worst rank: milliseconds; or bytes, where milliseconds are limited."""

    capacity: Floats | float  # bytes of each rank, one number for all or an array by rank
    host_capacity: Floats | float = 0.0  # bytes of each rank's share of host memory besides a device
    limit_ms: float | None = None  # that no rank should take, where bytes are to be few; None where time is to be short

    def scores(self, ms: Floats, num_bytes: Floats, host_bytes: Floats) -> Floats:
        """Returns each rank's score: milliseconds, or the filled share of its capacity; far more beyond a limit."""
        fullness: Floats = num_bytes / np.maximum(self.capacity, 1.0)
        excess: Floats = np.maximum(host_bytes - self.host_capacity, 0) / np.maximum(self.host_capacity, 1.0)
        if self.limit_ms is None:
            return ms + _PENALTY * (np.maximum(fullness - 1, 0) + excess)
        late = np.maximum(ms / max(self.limit_ms, 1e-12) - 1, 0)
        return fullness + _PENALTY * (late + excess)

    def of_ranks(self, ranks: Ints) -> "Aim":
        own, host = (each if np.ndim(each) == 0 else each[ranks] for each in (self.capacity, self.host_capacity))  # type: ignore[index]
        return Aim(own, host, self.limit_ms)

    def fits(self, num_bytes: Floats, host_bytes: Floats) -> bool:
        return bool((num_bytes <= self.capacity).all() and (host_bytes <= self.host_capacity).all())


class Loads:
    """Milliseconds and bytes of all ranks under an assignment, which changes as tables are put and taken.

    ``tables_of`` has each rank's tables. Arrays are by rank.
    """

    def __init__(self, problem: Problem, assignment: Assignment) -> None:
        self.problem, self.assignment, self._blocks = problem, assignment, problem.blocks
        world_size, phases = problem.world_size, problem.num_phases
        self._group_start_ms = np.array([*problem.group_start_ms, 0.0])  # the last is that of no group
        # rows are the columns of problem.block_sums, so that adding a shard is one addition
        self._sums = np.zeros((problem.block_sums.shape[1], world_size))
        self._ms, self.num_bytes, self.host_bytes = self._sums[:3]
        self._own_ms = self._sums[3 : 3 + phases]
        self._rest_ms = self._sums[3 + phases : 3 + 2 * phases]  # a rank's work for other ranks' shards
        self._in_group = self._sums[3 + 2 * phases :]
        self._exchange_users = np.zeros(len(problem.exchange_start_ms), np.int64)
        self.tables_of: list[set[int]] = [set() for _ in range(world_size)]
        # all tables of the assignment are added at once
        self._ms += problem.base_ms
        tables = np.flatnonzero(assignment.option >= 0)
        self._sums += problem.option_sums[assignment.option[tables]].sum(0)[:, None]
        shards: list[tuple[int, int]] = []
        for table in tables.tolist():
            option = int(assignment.option[table])
            self._use_exchanges(option, 1)
            for block, ranks in self._placed(option, assignment.places[table]):
                shards += ((block, rank) for rank in ranks)
                for rank in ranks:
                    self.tables_of[rank].add(table)
        blocks, of_rank = np.array(shards, np.int64).reshape(-1, 2).T
        for own, by_block in zip(self._sums, problem.block_sums.T, strict=True):
            own += np.bincount(of_rank, by_block[blocks], minlength=world_size)
        self._start_ms = self._starts(slice(None))

    def put(self, table: int, option: int, places: Ints) -> None:
        """Places a table; it is taken from its old place before."""
        if self.assignment.option[table] >= 0:
            self.take(table)
        self._change(table, option, places, 1)
        self.assignment.option[table], self.assignment.places[table] = option, places

    def take(self, table: int) -> None:
        """Takes a table from its place."""
        self._change(table, int(self.assignment.option[table]), self.assignment.places[table], -1)
        self.assignment.option[table] = -1

    def scores(self, aim: Aim) -> Floats:
        return aim.scores(self.milliseconds(), self.num_bytes, self.host_bytes)

    def milliseconds(self) -> Floats:
        at_once, size = self.problem.ranks_at_once, self.problem.ranks_per_node
        alone: Floats = self._ms + np.maximum(self._own_ms, self._rest_ms).sum(0) + self._start_ms
        if at_once >= size:
            return alone
        return np.maximum(alone, np.repeat(alone.reshape(-1, size).sum(1) / at_once, size))

    def own_milliseconds(self) -> Floats:
        """Returns the milliseconds of every rank without waiting for other ranks' exchanges.

        Placing one more table adds the time of its shards to their sum, wherever other tables lie.
        """
        own: Floats = self._ms + self._own_ms.sum(0) + self._start_ms
        return own

    def try_option(self, option: int, aim: Aim) -> tuple[Ints, Floats]:
        """Returns the best places for an option's blocks, one by one, and the scores of all ranks with them."""
        self._change_everywhere(option, 1)
        blocks, places = self.problem.option_blocks[option].tolist(), list[int]()
        for block in blocks:
            scores = np.where(self.problem.allowed[option], self._scores_with(block, aim), np.inf)
            if self._blocks.fills_node[block]:
                scores = scores.reshape(-1, self.problem.ranks_per_node).max(1)
            scores[places] = np.inf
            places.append(int(scores.argmin()))
            self._change_block(block, self._ranks(block, places[-1]), 1)
        scores = self.scores(aim)
        for block, place in zip(blocks, places, strict=True):
            self._change_block(block, self._ranks(block, place), -1)
        self._change_everywhere(option, -1)
        return np.array(places, np.int64), scores

    def _scores_with(self, block: int, aim: Aim) -> Floats:
        """Returns the score of every rank if it had a shard of a block whose option is counted already."""
        blocks, groups = self._blocks, self._blocks.groups[block]
        own, rest = self._own_ms + blocks.own_ms[block, :, None], self._rest_ms - blocks.other_ms[block, :, None]
        starts = self._group_start_ms[groups] @ (self._in_group[groups] == 0)
        ms = self._ms + blocks.lookup_ms[block] + np.maximum(own, rest).sum(0) + (self._start_ms + starts)
        return aim.scores(ms, self.num_bytes + blocks.num_bytes[block], self.host_bytes + blocks.host_bytes[block])

    def scores_after(self, ranks: Ints, without: Ints, with_: Ints, aim: Aim) -> Floats:
        """Returns the score of each of some ranks if it gave up a shard of one block for one of another."""
        blocks = self._blocks
        own = self._own_ms.T[ranks] - blocks.own_ms[without] + blocks.own_ms[with_]
        rest = self._rest_ms.T[ranks] + blocks.other_ms[without] - blocks.other_ms[with_]
        old, new, of_rank = blocks.groups[without], blocks.groups[with_], ranks[:, None]
        ends = (self._in_group[old, of_rank] == 1) & (old[:, :, None] != new[:, None]).all(2)
        begins = self._in_group[new, of_rank] == 0
        starts = self._start_ms[ranks] + (begins * self._group_start_ms[new] - ends * self._group_start_ms[old]).sum(1)
        ms = self._ms[ranks] - blocks.lookup_ms[without] + blocks.lookup_ms[with_]
        num_bytes = self.num_bytes[ranks] - blocks.num_bytes[without] + blocks.num_bytes[with_]
        host_bytes = self.host_bytes[ranks] - blocks.host_bytes[without] + blocks.host_bytes[with_]
        return aim.of_ranks(ranks).scores(ms + np.maximum(own, rest).sum(1) + starts, num_bytes, host_bytes)

    def signature(self, decimals: int) -> Floats:
        """Returns numbers by rank that are equal, to so many decimals, where ranks have equal loads."""
        rounded: Floats = self._sums.T.round(decimals) + 0.0
        return rounded

    def _ranks(self, block: int, place: int) -> range:
        size = self.problem.ranks_per_node if self._blocks.fills_node[block] else 1
        return range(place * size, (place + 1) * size)

    def _placed(self, option: int, places: Ints) -> list[tuple[int, range]]:
        """Returns each block of an option with its ranks."""
        blocks = self.problem.option_blocks[option].tolist()
        return [(block, self._ranks(block, place)) for block, place in zip(blocks, places.tolist(), strict=True)]

    def _change(self, table: int, option: int, places: Ints, sign: int) -> None:
        """Adds a table to the loads, or takes it away where the sign is -1."""
        self._change_everywhere(option, sign)
        for block, ranks in self._placed(option, places):
            self._change_block(block, ranks, sign)
            for rank in ranks:
                (self.tables_of[rank].add if sign > 0 else self.tables_of[rank].discard)(table)

    def _change_everywhere(self, option: int, sign: int) -> None:
        """Adds an option's cost to every rank, as if its shards were all on other ranks."""
        self._sums += sign * self.problem.option_sums[option, :, None]
        if (self._blocks.groups[self.problem.option_everywhere[option]] != NO_GROUP).any():
            self._start_ms = self._starts(slice(None))
        self._use_exchanges(option, sign)

    def _use_exchanges(self, option: int, sign: int) -> None:
        """Counts one table more of an option's exchanges; the first table of an exchange adds its start."""
        for exchange in self.problem.options[option].exchanges:
            before = self._exchange_users[exchange]
            self._exchange_users[exchange] += sign
            if (before == 0) != (self._exchange_users[exchange] == 0):
                self._ms += sign * self.problem.exchange_start_ms[exchange]

    def _change_block(self, block: int, own: range, sign: int) -> None:
        ranks = slice(own.start, own.stop)
        self._sums[:, ranks] += sign * self.problem.block_sums[block, :, None]
        # it may be the first of its group, or was the last
        if (self._in_group[self._blocks.groups[block], own.start] <= 1).any():
            self._start_ms[ranks] = self._starts(ranks)

    def _starts(self, ranks: slice) -> Floats:
        """Returns the milliseconds in which some ranks start the kernels of their groups."""
        starts: Floats = self._group_start_ms @ (self._in_group[:, ranks] > 0)
        return starts
