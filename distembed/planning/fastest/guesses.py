"""First guesses: every table in one way, and the largest tables in one way with the rest in another.

A good plan seldom mixes many ways, since each exchange and each group of lookups in use has to be started. Guesses are
sorted by an estimate that spreads all work evenly over the ranks: most are worse than others before a table is placed.
"""

import itertools

import numpy as np

from distembed.planning.fastest.loads import Aim
from distembed.planning.fastest.problem import Ints, Problem

_SHARES = (0.1, 0.25, 0.5, 0.75)
"""Shares of all tables that the largest are."""


def first_guesses(problem: Problem, aim: Aim) -> list[Ints]:
    """Returns options by table, the best guess first by the estimate."""
    tables = np.asarray(problem.class_of, np.int64)
    ways = {(option.kind, option.num_ranges): None for option in problem.options}
    by_way = [np.array([_nearest(problem, own, *way) for own in range(len(problem.classes))], np.int64) for way in ways]
    most_bytes = np.maximum.reduceat(problem.mean_sums[:, 1], problem.first_option[:-1])
    aim = Aim(float(np.mean(aim.capacity)), float(np.mean(aim.host_capacity)), aim.limit_ms)
    most_ms = np.minimum.reduceat(problem.mean_ms, problem.first_option[:-1])
    guesses = [options[tables] for options in by_way]
    for sizes in (most_bytes[tables], most_ms[tables]):
        order = np.argsort(-sizes, kind="stable")
        for share, (large, rest) in itertools.product(_SHARES, itertools.permutations(by_way, 2)):
            options, largest = rest[tables], order[: max(1, round(share * len(tables)))]
            options[largest] = large[tables[largest]]
            guesses.append(options)
    distinct = {options.tobytes(): options for options in guesses}
    return sorted(distinct.values(), key=lambda options: _estimate(problem, aim, options))


def _nearest(problem: Problem, number: int, kind: object, num_ranges: int) -> int:
    """Returns the option of a class that is a way or nearest to it, else the one with the least work."""
    own = range(int(problem.first_option[number]), int(problem.first_option[number + 1]))
    alike = [option for option in own if problem.options[option].kind == kind]
    if alike:
        return min(alike, key=lambda option: abs(problem.options[option].num_ranges - num_ranges))
    return min(own, key=lambda option: problem.mean_ms[option])


def _estimate(problem: Problem, aim: Aim, options: Ints) -> float:
    """Returns the score of a rank that has its share of everything; at least the longest shard takes its rank."""
    sums = problem.mean_sums[options].sum(0)
    exchanges = {exchange for option in options for exchange in problem.options[option].exchanges}
    starts = sum(problem.exchange_start_ms[exchange] for exchange in exchanges)
    starts += np.asarray(problem.group_start_ms) @ np.minimum(sums[3 + 2 * problem.num_phases : -1], 1)
    ms = problem.base_ms + starts + max(problem.mean_ms[options].sum(), problem.longest_ms[options].max())
    return float(aim.scores(ms, sums[1], sums[2]).mean())
