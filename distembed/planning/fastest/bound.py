"""A lower bound of the slowest rank's milliseconds, over all plans that fit.

Suppose that no rank takes more than T. A rank that starts a group's kernels has at most ``T - start`` left for the
group's shards, so all shards of the group, of ``load`` milliseconds, start it at least ``load / (T - start)`` times:
each of their milliseconds costs ``T / (T - start)``. Exchanges count alike. No rank has two shards of more than half of
that room. So T is impossible unless options exist, one per table, with::

    sum of milliseconds, starts included   <= world_size x (T - base)
    sum of bytes                           <= sum of capacities
    number of large shards                 <= world_size

and no shard alone exceeds the time or the bytes. For any weights of these three sums, each table takes its least
weighted cost by itself (Lagrange's relaxation): where their sum exceeds the weighted right sides, T is disproved. The
bound is the largest T that was disproved.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from distembed.planning.fastest.problem import NO_GROUP, Floats, Ints, Mask, Problem

_MAX_EXCHANGES = 5
"""Most exchanges for which every subset has a bound of its own: 2 ** 5 subsets."""
_HALVINGS = 30
"""Most steps of the bisection for one restriction."""
_SAME = 1e-8
"""Relative difference up to which two times count as equal."""
_LONGEST_MS = 1e12
"""Milliseconds from which on nothing is proved."""
_ROUNDS = 12
"""Rounds in which weights are refined."""
_IMPOSSIBLE = 1e30
"""Cost of an impossible option."""


@dataclass(frozen=True)
class _Restriction:
    """Plans that use only a given set of exchanges: their options, and the starts that each rank has in all of them."""

    allowed: Mask  # by option
    started_ms: float  # starts of the exchanges, and of the groups that every rank has under all allowed options
    start_ms: Floats  # starts of the remaining groups, by group; 0 for groups in started_ms, and for NO_GROUP = -1


class LowerBound:
    """Disproves times T for one problem; ``capacity`` is each rank's bytes for weights and optimizer state.

    The capacity is one number for all ranks, or an array by rank.
    """

    def __init__(self, problem: Problem, capacity: Floats | float) -> None:
        by_rank = np.maximum(np.broadcast_to(capacity, problem.world_size), 1.0)
        self._problem, self._capacity, self._capacity_of_all = problem, float(by_rank.max()), float(by_rank.sum())
        self._tables_of_class = np.bincount(np.asarray(problem.class_of), minlength=len(problem.classes))
        blocks, everywhere = problem.blocks, problem.option_everywhere
        self._option_of, placed = problem.placed_blocks
        self._shards, load_ms = problem.num_shards[placed], blocks.lookup_ms + blocks.own_ms.sum(1)
        self._load_ms, self._everywhere_ms = load_ms[placed], load_ms[everywhere]
        self._groups, self._everywhere_groups = blocks.groups[placed], blocks.groups[everywhere]
        self._bytes, self._everywhere_bytes = blocks.stored_bytes[placed], blocks.stored_bytes[everywhere]
        # by option: the exchanges that it takes part in, and the groups that every rank starts
        self._exchanges = np.zeros((len(problem.options), len(problem.exchange_start_ms)), bool)
        for has, option in zip(self._exchanges, problem.options, strict=True):
            has[list(option.exchanges)] = True
        self._groups_of_all_ranks = np.zeros((len(problem.options), len(problem.group_start_ms) + 1), bool)
        np.put_along_axis(self._groups_of_all_ranks, self._everywhere_groups, True, axis=1)
        if problem.world_size == 1:  # the only rank has all shards
            self._groups_of_all_ranks[self._option_of[:, None], self._groups] = True

    def milliseconds(self, upper: float) -> float:
        """Returns the bound; it is at most ``upper``, the milliseconds of a known plan.

        Every plan satisfies one of the restrictions, so the bound is the least over them of the largest disproved T.
        """
        # by restriction: skip it if it disproves the best T so far; else double `high` until nothing is disproved, and
        # bisect between a disproved `low` and `high`. Where every restriction disproves `almost`, `upper` is optimal
        almost = best = upper * (1 - _SAME)
        for restriction in self._restrictions():
            if self._is_disproved(min(best, _LONGEST_MS), restriction):
                continue
            low, high = self._problem.base_ms, max(self._problem.base_ms, 1e-6)
            while self._is_disproved(high, restriction) and high < _LONGEST_MS:
                high *= 2
            high = min(best, high)
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

    def _restrictions(self) -> Iterator[_Restriction]:
        """Yields restrictions, one for each set of exchanges in use, that together cover every assignment."""
        every = np.ones(len(self._exchanges), bool)
        needed = self._common_to_options(self._exchanges, every)
        if len(needed) > _MAX_EXCHANGES:
            # too many subsets: one restriction with all options, which starts the unavoidable exchanges alone
            yield self._restriction(every, needed)
            return
        for choice in itertools.product([False, True], repeat=len(needed)):
            used = np.array(choice, bool)
            if (used | ~needed).all():
                yield self._restriction(~(self._exchanges & ~used).any(1), used)

    def _restriction(self, allowed: Mask, used: Mask) -> _Restriction:
        """Returns the restriction to the ``allowed`` options, where all exchanges of ``used`` start."""
        start_ms = np.array([*self._problem.group_start_ms, 0.0])
        everywhere = self._common_to_options(self._groups_of_all_ranks, allowed)
        started_ms = np.array(self._problem.exchange_start_ms, np.float64)[used].sum() + start_ms[everywhere].sum()
        return _Restriction(allowed, float(started_ms), np.where(everywhere, 0.0, start_ms))

    def _common_to_options(self, has: Mask, allowed: Mask) -> Mask:
        """Returns the columns of ``has`` (by option) that no plan avoids: set in all allowed options of some class."""
        by_class = np.logical_and.reduceat(has | ~allowed[:, None], self._problem.first_option[:-1])
        common: Mask = np.logical_or.reduce(by_class)
        return common

    def _is_disproved(self, milliseconds: float, restriction: _Restriction) -> bool:
        """Returns whether no plan under the restriction takes at most T = ``milliseconds``; True is a proof."""
        costs = self._costs(milliseconds, restriction)
        return costs is None or self._largest_excess(costs) > 1e-9

    def _costs(self, milliseconds: float, restriction: _Restriction) -> Floats | None:
        """Returns the options' costs for one T, as shares of the three right sides; None if a class has no option.

        Rows are milliseconds, bytes and large shards; columns are options. A plan within T has row sums of at most 1.
        """
        problem, world_size = self._problem, self._problem.world_size
        # a node's cores run only ranks_at_once of its ranks, which all have the base and the starts: `room` is the
        # rest of T for one rank, `in_all` the mean over the ranks of a node
        speed = min(1.0, problem.ranks_at_once / problem.ranks_per_node)
        room, in_all = (ms - problem.base_ms - restriction.started_ms for ms in (milliseconds, speed * milliseconds))
        if in_all <= 0:
            return None
        start_ms, least_start_ms = _starts(restriction, self._groups)
        everywhere_start_ms, least_everywhere_start_ms = _starts(restriction, self._everywhere_groups)
        fits = (self._load_ms + start_ms <= room) & (self._bytes <= self._capacity)
        is_large = self._load_ms > np.maximum(room - start_ms, 1e-12) / 2
        # each millisecond in a group costs room / (room - start), with the cheapest of the block's groups
        block_shares = (
            self._load_ms * room / np.maximum(room - least_start_ms, 1e-12) / (world_size * in_all),
            self._bytes / self._capacity_of_all,
            is_large / world_size,
        )
        num_options = len(restriction.allowed)
        sums = [np.bincount(self._option_of, self._shards * block_share, num_options) for block_share in block_shares]
        shares = np.stack(sums).astype(np.float64)  # counts, where no option has blocks
        shares[0] += self._everywhere_ms * room / np.maximum(room - least_everywhere_start_ms, 1e-12) / in_all
        shares[1] += self._everywhere_bytes * world_size / self._capacity_of_all
        impossible = ~restriction.allowed | (self._everywhere_ms + everywhere_start_ms > room)
        impossible[self._option_of[~fits]] = True
        shares[:, impossible] = _IMPOSSIBLE
        return None if np.logical_and.reduceat(impossible, problem.first_option[:-1]).any() else shares

    def _largest_excess(self, shares: Floats) -> float:
        """Returns the largest excess of the weighted costs over 1 for the weights tried; a positive one disproves T."""
        # projected subgradient ascent over weights w >= 0 that sum to 1: a step along the slopes of the excess, halved
        # where it does not increase the excess
        candidates = [*np.eye(3), np.array([0.5, 0.5, 0.0]), np.array([0.5, 0.0, 0.5])]
        weights = max(candidates, key=lambda candidate: self._excess(shares, candidate)[0])
        (best, slopes), step = self._excess(shares, weights), 0.5
        for _ in range(_ROUNDS):
            direction = slopes - slopes @ weights
            scale = np.abs(direction).max()
            if best > 1e-9 or scale <= 1e-12:
                break
            moved = np.maximum(weights + step * direction / scale, 0)
            moved /= moved.sum()
            excess, moved_slopes = self._excess(shares, moved)
            if excess > best:
                best, weights, slopes = excess, moved, moved_slopes
            else:
                step /= 2
        return best

    def _excess(self, shares: Floats, weights: Floats) -> tuple[float, Floats]:
        """Returns the excess for three weights that sum to 1, and its slope in each weight.

        Excess: the sum over tables of their least weighted cost, - 1. The slope in a weight is its row of ``shares``
        summed over the chosen options, - 1.
        """
        first, weighted = self._problem.first_option, weights @ shares
        least = np.minimum.reduceat(weighted, first[:-1])
        is_least = np.flatnonzero(weighted == np.repeat(least, np.diff(first)))
        chosen = is_least[np.searchsorted(is_least, first[:-1])]  # the first of each class
        slopes: Floats = shares[:, chosen] @ self._tables_of_class.astype(np.float64) - 1
        return float(least @ self._tables_of_class) - 1.0, slopes


def _starts(restriction: _Restriction, groups: Ints) -> tuple[Floats, Floats]:
    """Returns, for each row of padded ``groups``, the start milliseconds of all its groups and of its fastest group."""
    # start_ms[NO_GROUP] is 0, the padding adds nothing to the sum; for the minimum, it repeats the first group
    starts = restriction.start_ms[groups]
    return starts.sum(1), np.where(groups == NO_GROUP, starts[:, :1], starts).min(1)
