"""Loads of all ranks under an assignment, kept in arrays, and what they would be with one table placed elsewhere."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from distembed.planning.fastest.problem import NO_GROUP, Assignment, Floats, Ints, Problem

_PENALTY = 1e6
"""Weight of what is beyond a limit, against what is minimised."""


@dataclass(frozen=True)
class Aim:
    """What a search makes small for the rank where it is largest.

    Attributes:
        capacity: Bytes of each rank, one number for all or an array by rank.
        host_capacity: Bytes of each rank's share of the machine's memory beside a device, likewise.
        limit_ms: Milliseconds that no rank should take, where bytes are to be few; None where time is to be short.
    """

    capacity: Floats | float
    host_capacity: Floats | float = 0.0
    limit_ms: float | None = None

    def scores(self, ms: Floats, num_bytes: Floats, host_bytes: Floats) -> Floats:
        """Returns each rank's score: milliseconds, or the share of its capacity; far more where it exceeds a limit."""
        fullness: Floats = num_bytes / np.maximum(self.capacity, 1.0)
        excess: Floats = np.maximum(host_bytes - self.host_capacity, 0) / np.maximum(self.host_capacity, 1.0)
        if self.limit_ms is None:
            return ms + _PENALTY * (np.maximum(fullness - 1, 0) + excess)
        late = np.maximum(ms / max(self.limit_ms, 1e-12) - 1, 0)
        return fullness + _PENALTY * (late + excess)

    def of_ranks(self, ranks: Ints) -> "Aim":
        """Returns the aim of some ranks, in their order."""
        own, host = (each if np.ndim(each) == 0 else each[ranks] for each in (self.capacity, self.host_capacity))  # type: ignore[index]
        return Aim(own, host, self.limit_ms)

    def fits(self, num_bytes: Floats, host_bytes: Floats) -> bool:
        """Returns whether no rank exceeds its capacity."""
        return bool((num_bytes <= self.capacity).all() and (host_bytes <= self.host_capacity).all())


class Loads:
    """Milliseconds and bytes of all ranks.

    Args:
        problem: The problem.
        assignment: Where tables go; it is changed as tables are put and taken.

    Attributes:
        num_bytes: Bytes of each rank.
        host_bytes: Bytes of each rank in the machine's memory beside a device.
        tables_of: Tables of which each rank has a shard.
    """

    def __init__(self, problem: Problem, assignment: Assignment) -> None:
        self.problem, self.assignment, self._blocks = problem, assignment, problem.blocks
        world_size, phases = problem.world_size, problem.num_phases
        self._group_start_ms = np.array([*problem.group_start_ms, 0.0])  # the last is that of no group
        # rows as the columns of problem.block_sums: what a shard adds to a rank is added at once
        self._sums = np.zeros((problem.block_sums.shape[1], world_size))
        self._ms, self.num_bytes, self.host_bytes = self._sums[:3]
        self._own_ms = self._sums[3 : 3 + phases]
        self._rest_ms = self._sums[3 + phases : 3 + 2 * phases]  # what a rank has of the shards of others
        self._in_group = self._sums[3 + 2 * phases :]
        self._exchange_users = np.zeros(len(problem.exchange_start_ms), np.int64)
        self.tables_of: list[set[int]] = [set() for _ in range(world_size)]
        self._add_all()
        self._start_ms = self._starts(slice(None))

    def _add_all(self) -> None:
        """Adds all tables of the assignment at once."""
        problem, assignment = self.problem, self.assignment
        self._ms += problem.base_ms
        tables = np.flatnonzero(assignment.option >= 0)
        self._sums += problem.option_sums[assignment.option[tables]].sum(0)[:, None]
        shards: list[tuple[int, int]] = []
        for table in tables.tolist():
            option = int(assignment.option[table])
            self._use_exchange(option, 1)
            for block, place in zip(
                problem.option_blocks[option].tolist(), assignment.places[table].tolist(), strict=True
            ):
                for rank in self._ranks(block, place):
                    shards.append((block, rank))
                    self.tables_of[rank].add(table)
        numbers, ranks = np.array(shards, np.int64).reshape(-1, 2).T
        for own, by_block in zip(self._sums, problem.block_sums.T, strict=True):
            own += np.bincount(ranks, by_block[numbers], minlength=problem.world_size)

    def put(self, table: int, option: int, places: Ints) -> None:
        """Places a table that is nowhere."""
        self._change(option, places, 1)
        for rank in self._ranks_of(option, places):
            self.tables_of[rank].add(table)
        self.assignment.option[table], self.assignment.places[table] = option, places

    def take(self, table: int) -> None:
        """Takes a table from where it is."""
        option, places = int(self.assignment.option[table]), self.assignment.places[table]
        self._change(option, places, -1)
        for rank in self._ranks_of(option, places):
            self.tables_of[rank].discard(table)
        self.assignment.option[table] = -1

    def scores(self, aim: Aim) -> Floats:
        """Returns the score of every rank."""
        return aim.scores(self.milliseconds(), self.num_bytes, self.host_bytes)

    def milliseconds(self) -> Floats:
        """Returns the milliseconds of every rank."""
        problem, alone = self.problem, self.milliseconds_alone()
        if problem.ranks_at_once >= problem.ranks_per_node:
            return alone
        nodes = alone.reshape(-1, problem.ranks_per_node).sum(1) / problem.ranks_at_once
        return np.maximum(alone, np.repeat(nodes, problem.ranks_per_node))

    def milliseconds_alone(self) -> Floats:
        """Returns the milliseconds of every rank, as if it had cores of its own."""
        alone: Floats = self._ms + np.maximum(self._own_ms, self._rest_ms).sum(0) + self._start_ms
        return alone

    def own_milliseconds(self) -> Floats:
        """Returns the milliseconds of every rank without those in which it waits for exchanges of others.

        A table more adds to their sum what its shards take, whatever else is placed.
        """
        own: Floats = self._ms + self._own_ms.sum(0) + self._start_ms
        return own

    def scores_with(self, block: int, aim: Aim) -> Floats:
        """Returns the score of every rank if it had a shard of a block whose option is counted already."""
        blocks, groups, phases = self._blocks, self._blocks.groups[block], self._blocks.phases[block]
        longer = np.maximum(self._own_ms, self._rest_ms)
        own, rest = blocks.own_ms[block, phases, None], blocks.other_ms[block, phases, None]
        longer[phases] = np.maximum(self._own_ms[phases] + own, self._rest_ms[phases] - rest)
        starts = self._group_start_ms[groups] @ (self._in_group[groups] == 0)
        ms = self._ms + blocks.lookup_ms[block] + longer.sum(0) + (self._start_ms + starts)
        return aim.scores(ms, self.num_bytes + blocks.num_bytes[block], self.host_bytes + blocks.host_bytes[block])

    def try_option(self, option: int, aim: Aim) -> tuple[Ints, Floats]:
        """Returns the best places for a table's option one by one, and the scores of all ranks with it there."""
        self._change_everywhere(option, 1)
        placed: list[tuple[int, int]] = []
        taken: dict[bool, list[int]] = {False: [], True: []}
        blocks = self.problem.option_blocks[option]
        for block in blocks.tolist():
            fills_node = bool(self._blocks.fills_node[block])
            by_rank = self.scores_with(block, aim)
            if self.problem.allowed is not None:
                by_rank = np.where(self.problem.allowed[option], by_rank, np.inf)
            scores = self._places(by_rank, fills_node)
            scores[taken[fills_node]] = np.inf
            place = int(scores.argmin())
            taken[fills_node].append(place)
            placed.append((block, place))
            self._change_block(block, place, 1)
        scores = self.scores(aim)
        for block, place in placed:
            self._change_block(block, place, -1)
        self._change_everywhere(option, -1)
        return np.array([place for _, place in placed], np.int64), scores

    def scores_after(self, ranks: Ints, without: Ints, with_: Ints, aim: Aim) -> Floats:
        """Returns the score of each of some ranks if one shard of it was exchanged for another.

        Args:
            ranks: The ranks.
            without: Block of the shard that each of them gives up.
            with_: Block of the shard that each gets.
            aim: What makes the score.
        """
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

    def _places(self, scores: Floats, fills_node: bool) -> Floats:
        return scores.reshape(-1, self.problem.ranks_per_node).max(1) if fills_node else scores

    def _ranks(self, block: int, place: int) -> range:
        size = self.problem.ranks_per_node if self._blocks.fills_node[block] else 1
        return range(place * size, (place + 1) * size)

    def _ranks_of(self, option: int, places: Ints) -> Iterator[int]:
        for block, place in zip(self.problem.option_blocks[option].tolist(), places.tolist(), strict=True):
            yield from self._ranks(block, place)

    def _change(self, option: int, places: Ints, sign: int) -> None:
        self._change_everywhere(option, sign)
        for block, place in zip(self.problem.option_blocks[option].tolist(), places.tolist(), strict=True):
            self._change_block(block, place, sign)

    def _change_everywhere(self, option: int, sign: int) -> None:
        """Adds what an option takes of every rank, as if its shards were all on other ranks; or takes it away."""
        problem, everywhere = self.problem, self.problem.option_everywhere[option]
        rows, added = problem.option_changes[option]
        self._sums[rows] += sign * added
        if (self._blocks.groups[everywhere] != NO_GROUP).any():
            self._start_ms = self._starts(slice(None))
        self._use_exchange(option, sign)

    def _use_exchange(self, option: int, sign: int) -> None:
        """Counts one table more, or less, of an option's exchanges; the first table of an exchange adds its start."""
        for exchange in self.problem.options[option].exchanges:
            before = self._exchange_users[exchange]
            self._exchange_users[exchange] += sign
            if (before == 0) != (self._exchange_users[exchange] == 0):
                self._ms += sign * self.problem.exchange_start_ms[exchange]

    def _change_block(self, block: int, place: int, sign: int) -> None:
        own = self._ranks(block, place)
        ranks, added = slice(own.start, own.stop), self.problem.block_sums[block, :, None]
        self._sums[:, ranks] += added if sign > 0 else -added
        # it may be the first of its group, or was the last
        if (self._in_group[self._blocks.groups[block], own.start] <= 1).any():
            self._start_ms[ranks] = self._starts(ranks)

    def _starts(self, ranks: slice) -> Floats:
        """Returns the milliseconds in which some ranks start the kernels of their groups."""
        starts: Floats = self._group_start_ms @ (self._in_group[:, ranks] > 0)
        return starts
