"""A lower bound of the slowest rank's milliseconds, over all plans that fit.

Suppose that no rank takes more than T. A rank that starts a group's kernels has at most ``T - start`` for the group's
shards, so all shards of the group together, of ``load`` milliseconds, start it at least ``load / (T - start)`` times:
each millisecond of them costs ``T / (T - start)``. The same holds of exchanges. Of two shards of more than half of that
room no rank has both. So T cannot be unless options exist, one a table, with::

    sum of milliseconds, starts included   <= world_size x (T - base)
    sum of bytes                           <= sum of capacities
    number of large shards                 <= world_size

and no shard alone takes longer, or more bytes. For any weights of these three sums the least weighted cost of each
table can be taken by itself (Lagrange's relaxation): where the sum of these is more than the weighted right sides, T is
disproved. The bound is the largest T that was disproved.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from distembed.planning.fastest.problem import NO_GROUP, Floats, Ints, Mask, Problem

_MAX_EXCHANGES = 5
"""Exchanges up to which each set of those in use has its own bound."""
_HALVINGS = 30
_SAME = 1e-8
"""Share of a time up to which another is the same, but for rounding."""
_LONGEST_MS = 1e12
"""Milliseconds from which on nothing is proved."""
_ROUNDS = 12
"""Rounds in which weights are refined."""


@dataclass(frozen=True)
class _Restriction:
    """The options that take part in some exchanges alone, and what every rank starts then.

    Attributes:
        allowed: Whether an option is one of them.
        started_ms: Milliseconds in which the exchanges are started, and the groups that no rank can be without.
        start_ms: Milliseconds in which the other groups are started, and behind them that of no group; 0 of those that
            are counted already.
    """

    allowed: Mask
    started_ms: float
    start_ms: Floats


class LowerBound:
    """Disproves times.

    Args:
        problem: The problem.
        capacity: Bytes of weights and optimizer state of a rank at most, one number for all ranks or an array by rank.
    """

    def __init__(self, problem: Problem, capacity: Floats | float) -> None:
        by_rank = np.maximum(np.broadcast_to(capacity, problem.world_size), 1.0)
        self._problem, self._capacity, self._capacity_of_all = problem, float(by_rank.max()), float(by_rank.sum())
        self._tables_of_class = np.bincount(np.asarray(problem.class_of), minlength=len(problem.classes))
        options, blocks = problem.options, problem.blocks
        counts = [len(own) for own in problem.option_blocks]
        self._option_of = np.repeat(np.arange(len(options)), counts)
        own = np.concatenate([*problem.option_blocks, np.empty(0, np.int64)]).astype(np.int64)
        self._shards = np.where(blocks.fills_node, problem.ranks_per_node, 1)[own]
        self._load_ms = blocks.lookup_ms[own] + blocks.own_ms[own].sum(1)
        self._groups = blocks.groups[own]
        self._bytes = blocks.stored_bytes[own]
        everywhere = np.array(problem.option_everywhere, np.int64)
        self._everywhere_ms = blocks.lookup_ms[everywhere] + blocks.own_ms[everywhere].sum(1)
        self._everywhere_groups = blocks.groups[everywhere]
        self._everywhere_bytes = blocks.stored_bytes[everywhere]
        self._exchanges = np.zeros((len(options), len(problem.exchange_start_ms)), bool)
        for has, option in zip(self._exchanges, options, strict=True):
            has[list(option.exchanges)] = True

    def milliseconds(self, upper: float) -> float:
        """Returns the bound.

        Args:
            upper: Milliseconds of a plan that is known: the bound is no more.
        """
        almost = best = upper * (1 - _SAME)
        for restriction in self._restrictions():
            if self._is_disproved(min(best, _LONGEST_MS), restriction):
                continue
            low, high = self._problem.base_ms, min(best, self._somewhere(restriction))
            for _ in range(_HALVINGS):
                if high - low <= 1e-4 * high:
                    break
                middle = (low + high) / 2
                if self._is_disproved(middle, restriction):
                    low = middle
                else:
                    high = middle
            best = min(best, low)
        return upper if best == almost else best

    def _somewhere(self, restriction: _Restriction) -> float:
        """Returns a time that is not disproved."""
        high = max(self._problem.base_ms, 1e-6)
        while self._is_disproved(high, restriction) and high < _LONGEST_MS:
            high *= 2
        return high

    def _restrictions(self) -> Iterator[_Restriction]:
        """Yields sets of exchanges of which every assignment has one."""
        needed = self._exchanges_of_all()
        if len(needed) > _MAX_EXCHANGES:
            # the least that any assignment has to start; what others start is not counted
            yield self._restriction(np.ones(len(needed), bool), needed)
            return
        for choice in itertools.product([False, True], repeat=len(needed)):
            used = np.array(choice, bool)
            if (used | ~needed).all():
                yield self._restriction(used, used)

    def _restriction(self, usable: Mask, used: Mask) -> _Restriction:
        """Returns what is left where tables may take part in some exchanges, and do take part in some of these."""
        problem = self._problem
        allowed = ~np.logical_or.reduce(self._exchanges & ~usable, axis=1)
        start_ms = np.array([*problem.group_start_ms, 0.0])
        everywhere = self._common_to_options(self._groups_of_all_ranks(), allowed)
        started_ms = float(np.asarray(problem.exchange_start_ms, np.float64)[used].sum() + start_ms[everywhere].sum())
        return _Restriction(allowed, started_ms, np.where(everywhere, 0.0, start_ms))

    def _groups_of_all_ranks(self) -> Mask:
        """Returns whether every rank has a group, by option and group; the last group is that of none."""
        has = np.zeros((len(self._exchanges), len(self._problem.group_start_ms) + 1), bool)
        np.put_along_axis(has, self._everywhere_groups, True, axis=1)
        if self._problem.world_size == 1:  # the only rank has all shards
            has[self._option_of[:, None], self._groups] = True
        return has

    def _exchanges_of_all(self) -> Mask:
        """Returns which exchanges some table takes part in whatever its option."""
        return self._common_to_options(self._exchanges, np.ones(len(self._exchanges), bool))

    def _common_to_options(self, has: Mask, allowed: Mask) -> Mask:
        """Returns the columns that all allowed options of some table have."""
        by_class = np.logical_and.reduceat(has | ~allowed[:, None], self._problem.first_option[:-1])
        common: Mask = np.logical_or.reduce(by_class[self._tables_of_class > 0])
        return common

    def _is_disproved(self, milliseconds: float, restriction: _Restriction) -> bool:
        costs = self._costs(milliseconds, restriction)
        return costs is None or self._largest_excess(costs) > 1e-9

    def _costs(self, milliseconds: float, restriction: _Restriction) -> Floats | None:
        """Returns what options cost for one T, as shares of what all ranks have; None where a class has no option left.

        Milliseconds, bytes and large shards, by sum and option; infinite where an option cannot be.
        """
        problem, world_size = self._problem, self._problem.world_size
        room = milliseconds - problem.base_ms - restriction.started_ms
        if room <= 0:
            return None if problem.num_tables else np.zeros((3, 0))
        start_ms, least_start_ms = _starts(restriction, self._groups)
        everywhere_start_ms, least_everywhere_start_ms = _starts(restriction, self._everywhere_groups)
        fits = self._load_ms + start_ms <= room
        fits &= self._bytes <= self._capacity
        is_large = self._load_ms > np.maximum(room - start_ms, 1e-12) / 2
        left = np.maximum(room - least_start_ms, 1e-12)
        # base and starts are of every rank, of which so many at a time have cores
        speed = min(1.0, problem.ranks_at_once / problem.ranks_per_node)
        in_all = speed * milliseconds - problem.base_ms - restriction.started_ms
        if in_all <= 0:
            return None
        shares = np.zeros((3, len(restriction.allowed)))
        self._add(shares[0], self._shards * self._load_ms * room / left / (world_size * in_all))
        self._add(shares[1], self._shards * self._bytes / self._capacity_of_all)
        self._add(shares[2], self._shards * is_large / world_size)
        everywhere_left = np.maximum(room - least_everywhere_start_ms, 1e-12)
        shares[0] += self._everywhere_ms * room / everywhere_left / in_all
        shares[1] += self._everywhere_bytes * world_size / self._capacity_of_all
        impossible = ~restriction.allowed | (self._everywhere_ms + everywhere_start_ms > room)
        impossible |= np.bincount(self._option_of[~fits], minlength=len(restriction.allowed)) > 0
        shares[:, impossible] = np.inf
        least = np.minimum.reduceat(shares[0], problem.first_option[:-1])
        return shares if np.isfinite(least[self._tables_of_class > 0]).all() else None

    def _add(self, sums: Floats, by_block: Floats) -> None:
        sums += np.bincount(self._option_of, by_block, minlength=len(sums))

    def _largest_excess(self, shares: Floats) -> float:
        """Returns by how much weighted costs exceed 1 for the best weights found."""
        candidates = [*np.eye(3), np.array([0.5, 0.5, 0.0]), np.array([0.5, 0.0, 0.5])]
        best, number = max((self._excess(shares, weights)[0], -at) for at, weights in enumerate(candidates))
        weights, step = candidates[-number], 0.5
        for _ in range(_ROUNDS if best <= 0 else 0):
            _, slopes = self._excess(shares, weights)
            direction = slopes - slopes @ weights
            scale = np.abs(direction).max()
            if scale <= 1e-12:
                break
            moved = np.maximum(weights + step * direction / scale, 0)
            moved /= moved.sum()
            excess, _ = self._excess(shares, moved)
            if excess > best:
                best, weights = excess, moved
            else:
                step /= 2
            if best > 1e-9:
                break
        return best

    def _excess(self, shares: Floats, weights: Floats) -> tuple[float, Floats]:
        """Returns the excess for some weights (which sum to 1), and its slope in each of them."""
        finite = np.where(np.isfinite(shares), shares, 1e30)
        weighted = weights @ finite
        weighted[~np.isfinite(shares[0])] = np.inf
        first = self._problem.first_option[:-1]
        least = np.minimum.reduceat(weighted, first)
        is_least = np.flatnonzero(weighted == np.repeat(least, np.diff(self._problem.first_option)))
        classes = np.searchsorted(self._problem.first_option, is_least, side="right") - 1
        chosen = is_least[np.unique(classes, return_index=True)[1]]
        slopes: Floats = finite[:, chosen] @ self._tables_of_class.astype(np.float64) - 1
        return float(least @ self._tables_of_class) - 1.0, slopes


def _starts(restriction: _Restriction, groups: Ints) -> tuple[Floats, Floats]:
    """Returns the milliseconds in which all groups of each block start, and those of the group that starts fastest."""
    starts = restriction.start_ms[groups]
    return starts.sum(1), np.where(groups == NO_GROUP, starts[:, :1], starts).min(1)
