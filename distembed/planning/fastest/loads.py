"""Milliseconds and bytes of all ranks under an assignment: sums over shards, in arrays that each move updates."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distembed.planning.fastest.problem import Assignment, Floats, Ints, Problem

_PENALTY = 1e6
"""Penalty of a load at twice its limit, in the unit of the score: milliseconds, or filled shares of a capacity."""


@dataclass(frozen=True)
class Aim:
    """The load that a search minimises on the worst rank: milliseconds, or bytes where ``limit_ms`` is given."""

    capacity: Floats | float  # bytes of each rank, one number for all or an array by rank
    host_capacity: Floats | float = 0.0  # bytes of each rank's share of host memory, apart from its device
    limit_ms: float | None = None  # most milliseconds of a rank while bytes are minimised; None minimises milliseconds

    @cached_property
    def _divisors(self) -> tuple[Floats, Floats]:
        """Capacities to divide by, of devices and of host memory."""
        return np.maximum(self.capacity, 1.0), np.maximum(self.host_capacity, 1.0)

    def scores(self, ms: Floats, num_bytes: Floats, host_bytes: Floats | None) -> Floats:
        """Returns each rank's score, which a search makes small: milliseconds, or filled bytes / capacity.

        Each share by which a load exceeds its limit adds a large penalty. Bytes over the capacity have no penalty
        while bytes are minimised, since they are the score. ``host_bytes`` is None where no shard is in host memory.
        """
        # a search spends its time here, in arrays of a few numbers: each operation counts
        capacity, host_capacity = self._divisors
        fullness: Floats = num_bytes / capacity
        if self.limit_ms is None:
            excess: Floats = np.maximum(fullness - 1, 0)
        else:
            excess = np.maximum(ms / max(self.limit_ms, 1e-12) - 1, 0)
        if host_bytes is not None:
            excess += np.maximum(host_bytes - self.host_capacity, 0) / host_capacity
        excess *= _PENALTY
        excess += ms if self.limit_ms is None else fullness
        return excess

    def for_ranks(self, ranks: Ints) -> "Aim":
        """Returns the aim with the capacities of some ranks, in their order; ranks may repeat."""
        if self._divisors[0].ndim == self._divisors[1].ndim == 0:
            return self
        device, host = (each if np.ndim(each) == 0 else each[ranks] for each in (self.capacity, self.host_capacity))  # type: ignore[index]
        return Aim(device, host, self.limit_ms)

    def fits(self, num_bytes: Floats, host_bytes: Floats) -> bool:
        return bool((num_bytes <= self.capacity).all() and (host_bytes <= self.host_capacity).all())


class Loads:
    """Milliseconds and bytes of all ranks under an assignment.

    :meth:`put` and :meth:`take` change the given assignment itself. ``tables_by_rank`` has the tables with a shard on
    each rank. Arrays are by rank.
    """

    def __init__(self, problem: Problem, assignment: Assignment) -> None:
        self.problem, self.assignment, self._blocks = problem, assignment, problem.blocks
        world_size, phases = problem.world_size, problem.num_phases
        self._group_start_ms = np.array([*problem.group_start_ms, 0.0])  # [NO_GROUP] = [-1]: no start
        self._has_host_bytes = bool(problem.blocks.host_bytes.any())
        # rows are the columns of problem.block_sums, so that adding a shard is one addition; the names are views of it
        self._sums = np.zeros((problem.block_sums.shape[1], world_size))
        self._ms, self.num_bytes, self.host_bytes = self._sums[:3]
        self._own_ms = self._sums[3 : 3 + phases]
        self._others_ms = self._sums[3 + phases : 3 + 2 * phases]  # a rank's work for other ranks' shards
        self._in_group = self._sums[3 + 2 * phases :]  # number of the rank's shards in each group
        self._exchange_users = [0] * len(problem.exchange_start_ms)
        self.tables_by_rank: list[set[int]] = [set() for _ in range(world_size)]
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
                    self.tables_by_rank[rank].add(table)
        blocks, shard_ranks = np.array(shards, np.int64).reshape(-1, 2).T
        # one sum over all shards for each cell, row * world_size + rank
        num_rows = len(self._sums)
        cells = np.arange(0, num_rows * world_size, world_size)[:, None] + shard_ranks
        added = np.bincount(cells.ravel(), problem.block_sums.T[:, blocks].ravel(), minlength=num_rows * world_size)
        self._sums += added.reshape(num_rows, world_size)
        self._start_ms = self._starts(slice(None))

    def put(self, table: int, option: int, places: Ints) -> None:
        """Places a table's blocks at ``places`` by an option, after removing the table from its old places, if any."""
        if self.assignment.option[table] >= 0:
            self.take(table)
        self._change(table, option, places, 1)
        self.assignment.option[table], self.assignment.places[table] = option, places

    def take(self, table: int) -> None:
        """Removes a placed table's load, and leaves the table without an option."""
        self._change(table, int(self.assignment.option[table]), self.assignment.places[table], -1)
        self.assignment.option[table] = -1

    def scores(self, aim: Aim) -> Floats:
        return aim.scores(self.milliseconds(), self.num_bytes, self.host_bytes if self._has_host_bytes else None)

    def milliseconds(self) -> Floats:
        """Returns the milliseconds of every rank (the formula of :mod:`distembed.planning.fastest.problem`)."""
        at_once, size = self.problem.ranks_at_once, self.problem.ranks_per_node
        alone: Floats = self._ms + np.add.reduce(np.maximum(self._own_ms, self._others_ms)) + self._start_ms
        if at_once >= size:
            return alone
        return np.maximum(alone, np.repeat(alone.reshape(-1, size).sum(1) / at_once, size))

    def own_milliseconds(self) -> Floats:
        """Returns the milliseconds of every rank, without its work for other ranks' shards and without shared cores.

        Another table raises their sum by at least the time of its shards, wherever they go. The true milliseconds may
        rise by less: ``max(own, rest)`` absorbs ``own`` on a rank that works longer for other ranks' shards.
        """
        rank_ms: Floats = self._ms + self._own_ms.sum(0) + self._start_ms
        return rank_ms

    def try_option(self, option: int, aim: Aim) -> tuple[Ints, Floats]:
        """Returns places for an unplaced table's option, and the scores of all ranks with the table there.

        Greedy: each block in turn goes to the allowed, still unused place with the least score. The loads are
        afterwards as before.
        """
        self._change_everywhere(option, 1)
        blocks, places = self.problem.option_blocks[option].tolist(), list[int]()
        for block in blocks:
            scores = self._scores_with(block, aim)
            if self.problem.is_pinned:
                scores[~self.problem.allowed[option]] = np.inf
            if self._blocks.fills_node[block]:
                scores = scores.reshape(-1, self.problem.ranks_per_node).max(1)
            if places:
                scores[places] = np.inf  # blocks of one table go to different places
            places.append(int(scores.argmin()))
            self._change_block(block, self._ranks(block, places[-1]), 1)
        scores = self.scores(aim)
        for block, place in zip(blocks, places, strict=True):
            self._change_block(block, self._ranks(block, place), -1)
        self._change_everywhere(option, -1)
        return np.array(places, np.int64), scores

    def _scores_with(self, block: int, aim: Aim) -> Floats:
        """Returns the score of every rank if that rank had a shard of ``block``, with cores of its own.

        :meth:`_change_everywhere` has added the block's option before.
        """
        blocks, groups = self._blocks, self._blocks.groups[block]
        owner_ms, others_ms = self._own_ms + blocks.own_columns[block], self._others_ms - blocks.other_columns[block]
        if len(groups) == 1:
            starts = self._group_start_ms[groups[0]] * (self._in_group[groups[0]] == 0)
        else:
            starts = self._group_start_ms[groups] @ (self._in_group[groups] == 0)
        starts += self._start_ms
        ms: Floats = self._ms + blocks.lookup_ms[block]
        ms += np.add.reduce(np.maximum(owner_ms, others_ms, out=owner_ms))
        ms += starts
        host_bytes = self.host_bytes + blocks.host_bytes[block] if self._has_host_bytes else None
        return aim.scores(ms, self.num_bytes + blocks.num_bytes[block], host_bytes)

    def scores_after(self, ranks: Ints, without: Ints, with_: Ints, aim: Aim) -> Floats:
        """Returns the score of ``ranks[i]`` if it exchanged a shard of block ``without[i]`` for one of ``with_[i]``.

        The three arrays have equal lengths. Ranks are scored as if they had cores of their own.
        """
        blocks = self._blocks
        owner_ms = self._own_ms.T[ranks] - blocks.own_ms[without] + blocks.own_ms[with_]
        others_ms = self._others_ms.T[ranks] + blocks.other_ms[without] - blocks.other_ms[with_]
        # a group's start ends with the rank's last shard of the group, and begins with its first one
        old_groups, new_groups, rank = blocks.groups[without], blocks.groups[with_], ranks[:, None]
        ends = (self._in_group[old_groups, rank] == 1) & (old_groups[:, :, None] != new_groups[:, None]).all(2)
        begins = self._in_group[new_groups, rank] == 0
        changes_ms = begins * self._group_start_ms[new_groups] - ends * self._group_start_ms[old_groups]
        starts = self._start_ms[ranks] + changes_ms.sum(1)
        ms = self._ms[ranks] - blocks.lookup_ms[without] + blocks.lookup_ms[with_]
        num_bytes = self.num_bytes[ranks] - blocks.num_bytes[without] + blocks.num_bytes[with_]
        host_bytes = None
        if self._has_host_bytes:
            host_bytes = self.host_bytes[ranks] - blocks.host_bytes[without] + blocks.host_bytes[with_]
        return aim.for_ranks(ranks).scores(ms + np.maximum(owner_ms, others_ms).sum(1) + starts, num_bytes, host_bytes)

    def signature(self, decimals: int) -> Floats:
        """Returns a row of rounded sums for each rank; ranks with equal loads have rows with equal bytes."""
        rounded: Floats = self._sums.T.round(decimals) + 0.0  # -0.0 becomes 0.0, whose bytes differ
        return rounded

    def _ranks(self, block: int, place: int) -> range:
        """Returns the ranks at a block's place: all ranks of the node, or the rank itself."""
        size = self.problem.ranks_per_node if self._blocks.fills_node[block] else 1
        return range(place * size, (place + 1) * size)

    def _placed(self, option: int, places: Ints) -> list[tuple[int, range]]:
        """Returns each block of an option with its ranks."""
        blocks = self.problem.option_blocks[option].tolist()
        return [(block, self._ranks(block, place)) for block, place in zip(blocks, places.tolist(), strict=True)]

    def _change(self, table: int, option: int, places: Ints, sign: int) -> None:
        """Adds a table to the loads and to ``tables_by_rank`` for sign 1; removes it for sign -1."""
        self._change_everywhere(option, sign)
        for block, ranks in self._placed(option, places):
            self._change_block(block, ranks, sign)
            for rank in ranks:
                (self.tables_by_rank[rank].add if sign > 0 else self.tables_by_rank[rank].discard)(table)

    def _change_everywhere(self, option: int, sign: int) -> None:
        """Adds ``sign`` times an option's cost to every rank, as if its shards were all on other ranks.

        Counts the option's exchanges, and the starts of groups that the option has on every rank.
        """
        add = np.add if sign > 0 else np.subtract
        add(self._sums, self.problem.option_columns[option], out=self._sums)
        if self.problem.starts_everywhere[option]:
            self._start_ms = self._starts(slice(None))
        self._use_exchanges(option, sign)

    def _use_exchanges(self, option: int, sign: int) -> None:
        """Adds ``sign`` to the users of each of an option's exchanges; an exchange with users starts once a step."""
        for exchange in self.problem.options[option].exchanges:
            before = self._exchange_users[exchange]
            self._exchange_users[exchange] += sign
            if (before == 0) != (self._exchange_users[exchange] == 0):
                self._ms += sign * self.problem.exchange_start_ms[exchange]

    def _change_block(self, block: int, ranks: range, sign: int) -> None:
        """Adds ``sign`` shards of a block to each rank of ``ranks``, and updates the starts of their groups."""
        rank_slice, first = slice(ranks.start, ranks.stop), ranks.start
        sums, add = self._sums[:, rank_slice], np.add if sign > 0 else np.subtract
        add(sums, self.problem.block_columns[block], out=sums)
        # at most 1 shard left in a group: the first shard may have come, or the last one gone
        if any(self._in_group[group, first] <= 1 for group in self._blocks.groups_of[block]):
            self._start_ms[rank_slice] = self._starts(rank_slice)

    def _starts(self, ranks: slice) -> Floats:
        """Returns the milliseconds in which each of some ranks starts the kernels of its groups."""
        starts: Floats = self._group_start_ms @ (self._in_group[:, ranks] > 0)
        return starts
