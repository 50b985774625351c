"""Assignments of numbers alone: bound, complete search and HiGHS against every assignment of small problems."""

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from distembed.base.errors import UserError
from distembed.planning.fastest import polish
from distembed.planning.fastest.bound import LowerBound
from distembed.planning.fastest.exact import ExactSearch
from distembed.planning.fastest.loads import Aim, Loads
from distembed.planning.fastest.local_search import Budget, LocalSearch
from distembed.planning.fastest.problem import Assignment, Floats, Option, Problem, ShardBlock
from distembed.planning.fastest.solver import Solver

NOTHING = ShardBlock(0.0, 0.0, 0.0, (), (0.0,), (0.0,))
# with ranges that differ, cores that are shared, and exchanges that take longer than lookups
USUAL = (50, 63, 101, 104, 125, 176)
CAPACITIES = (12.0, 20.0, 1000.0)


def block(rng: np.random.Generator, world_size: int, most_ms: float, fills_node: bool = False) -> ShardBlock:
    """A shard of which lookups, bytes and what is exchanged are drawn; exchanges may be most of it, or nothing."""
    exchanged = most_ms * rng.random() * float(rng.choice([0, 1, 3]))
    num_bytes, group = float(rng.integers(1, 11)), int(rng.integers(2))
    others = (exchanged / (world_size - 1),)
    return ShardBlock(most_ms * rng.random(), num_bytes, num_bytes, (group,), (exchanged,), others, fills_node)


def drawn_problem(seed: int) -> Problem:
    """Two or three tables whole, in two shards or three, by nodes and on all ranks, of 2 ranks to 4."""
    rng = np.random.default_rng(seed)
    nodes, ranks_per_node = [(1, 2), (1, 3), (2, 2)][seed % 3]
    world_size = nodes * ranks_per_node
    tables = []
    for _ in range(2 + seed % 2):
        first, second = block(rng, world_size, 2), block(rng, world_size, 1)
        several = [(first, first), (first, second), (first, first, second)][int(rng.integers(3))]
        options = [Option((block(rng, world_size, 4),), NOTHING, (0,))]
        options += [Option(several, NOTHING, (1,))] if len(several) <= world_size else []
        if nodes > 1 and rng.random() < 0.5:
            options.append(Option((block(rng, world_size, 1.5, fills_node=True),), NOTHING, (1,)))
        if rng.random() < 0.4:
            held = float(rng.integers(1, 7))
            options.append(Option((), ShardBlock(3 * rng.random(), held, held, (), (0.0,), (0.0,))))
        tables.append(options)
    return Problem(
        world_size,
        ranks_per_node,
        ranks_at_once=ranks_per_node / float(rng.choice([1, 2])),
        base_ms=rng.random(),
        group_start_ms=[0.2, 0.3],
        exchange_start_ms=[0.1, 0.4],
        num_phases=1,
        classes=tables,
        class_of=list(range(len(tables))),
    )


def with_limits(problem: Problem, seed: int) -> tuple[Problem, Floats]:
    """The problem with a table pinned, its first two tables together, and a capacity for each rank, all drawn."""
    rng = np.random.default_rng(seed)
    ranks = sorted(rng.permutation(problem.world_size)[: int(rng.integers(1, problem.world_size))].tolist())
    nodes = np.isin(np.arange(problem.world_size), ranks).reshape(-1, problem.ranks_per_node).all(1).sum()
    pinned = [
        own
        for own in problem.classes[0]
        if own.blocks and len(own.blocks) <= (nodes if own.blocks[0].fills_node else len(ranks))
    ]
    if rng.random() < 0.5:
        # one way for both, with blocks of two groups and exchanges
        pairs = [
            Option.together([own, other])
            for own in pinned
            for other in problem.classes[1]
            if [block.fills_node for block in own.blocks] == [block.fills_node for block in other.blocks]
        ]
        classes, limits = [pairs, *problem.classes[2:]], [ranks, *([] for _ in problem.classes[2:])]
    else:
        classes, limits = [pinned, *problem.classes[1:]], [ranks, *([] for _ in problem.classes[1:])]
    own = replace(problem, classes=classes, class_of=range(len(classes)), ranks_of_class=limits)
    return own, rng.choice([8.0, 16.0, 30.0, 1000.0], problem.world_size)


def ways(problem: Problem, table: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    limits = problem.ranks_of_class[problem.class_of[table]] if problem.ranks_of_class else ()
    allowed = set(limits or range(problem.world_size))
    for option in problem.options_of(table):
        size = problem.ranks_per_node if any(own.fills_node for own in problem.options[option].blocks) else 1
        num_blocks = len(problem.options[option].blocks)
        for places in itertools.permutations(range(problem.world_size // size), num_blocks):
            if {place * size + at for place in places for at in range(size)} <= allowed:
                yield option, places


def loads_of_way(problem: Problem, option: int, places: Sequence[int]) -> Floats:
    """What one way adds to each rank: ms, bytes, own and other ms of the one phase, shards by group, exchanges."""
    own, groups, size = problem.options[option], len(problem.group_start_ms), problem.ranks_per_node
    loads = np.zeros((4 + groups + len(problem.exchange_start_ms), problem.world_size))
    loads[4 + groups + np.array(own.exchanges, np.int64)] = 1
    shards = [(own.everywhere, rank) for rank in range(problem.world_size)]
    for block, place in zip(own.blocks, places, strict=True):
        at = range(place * size, (place + 1) * size) if block.fills_node else [place]
        shards += [(block, rank) for rank in at]
        for rank in at:
            loads[3] += block.other_ms[0] * (np.arange(problem.world_size) != rank)
    for block, rank in shards:
        loads[:3, rank] += block.lookup_ms, block.num_bytes, block.own_ms[0]
        loads[4 + np.array(block.groups, np.int64), rank] += 1
    loads[3] += own.everywhere.other_ms[0]
    return loads


def fastest_of_all(problem: Problem, capacity: Floats | float) -> float:
    """Milliseconds of the best of all assignments that fit, infinite where none does; by the formula of a problem."""
    first, *rest = (
        np.stack([loads_of_way(problem, *way) for way in ways(problem, table)]) for table in range(problem.num_tables)
    )
    best, shape = np.inf, (-1, *first.shape[1:])
    for loads in first:
        for own in rest:
            loads = (loads.reshape(shape)[:, None] + own).reshape(shape)
        ms, num_bytes, own_ms, other_ms = loads.reshape(shape).transpose(1, 0, 2)[:4]
        in_use = loads.reshape(shape)[:, 4:].transpose(0, 2, 1) > 0
        ms = ms + np.maximum(own_ms, other_ms) + in_use @ [*problem.group_start_ms, *problem.exchange_start_ms]
        nodes = (problem.base_ms + ms).reshape(len(ms), -1, problem.ranks_per_node)
        slowest = np.maximum(nodes, nodes.sum(2, keepdims=True) / problem.ranks_at_once).max((1, 2))
        best = min(best, slowest[(num_bytes <= capacity).all(1)].min(initial=np.inf))
    return float(best)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < 6 or seed in USUAL else pytest.mark.slow) for seed in range(240)]
)
def test_a_complete_search_and_the_program_of_highs_find_the_best_of_all(seed: int) -> None:
    problem, capacity = drawn_problem(seed), CAPACITIES[seed % 5 % 3]
    best = fastest_of_all(problem, capacity)

    found, is_complete = ExactSearch(problem, Aim(capacity), Budget(1e9)).better_than(1e6)
    program, bound = polish.solve(problem, Aim(capacity), None, 60, gap=0.0)

    assert is_complete
    assert (found is None) == (program is None) == np.isinf(best)
    if found is not None and program is not None:
        assert found.score == pytest.approx(best)
        assert LowerBound(problem, capacity).milliseconds(np.inf) <= best * (1 + 1e-9)
        loads = Loads(problem, program)
        assert loads.milliseconds().max() == pytest.approx(best, rel=1e-5) == bound
        assert loads.num_bytes.max() <= capacity * (1 + 1e-6)
        again, _ = polish.solve(problem, Aim(capacity), program, 60, gap=0.0)
        assert again is None or Loads(problem, again).milliseconds().max() == pytest.approx(best, rel=1e-5)


def test_without_highspy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(UserError, match=r"pip install 'distembed\[polish\]'"):
        polish.solve(drawn_problem(0), Aim(1000.0), None, 1.0)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [pytest.param(at, marks=pytest.mark.slow if at > 5 else ()) for at in range(300)])
def test_pinned_tables_and_tables_together_lie_where_they_may_on_ranks_of_unequal_memory(seed: int) -> None:
    problem, capacity = with_limits(drawn_problem(seed), seed)
    best = fastest_of_all(problem, capacity)

    found, is_complete = ExactSearch(problem, Aim(capacity), Budget(1e9)).better_than(1e4)
    solution = Solver(problem, 0.0, capacity, tolerance=0.0).fastest(capacity)

    assert is_complete
    assert (found is None) == np.isinf(best)
    allowed = [set(ways(problem, i)) for i in range(problem.num_tables)]
    for own in [solution.assignment, *([found.assignment] if found else [])]:
        places = zip(own.option.tolist(), map(tuple, own.places), strict=True)
        assert all(way in possible for way, possible in zip(places, allowed, strict=True))
    if found is not None:
        assert found.score == pytest.approx(best)
        assert LowerBound(problem, capacity).milliseconds(np.inf) <= best * (1 + 1e-9)
        assert not solution.fits or solution.milliseconds >= best * (1 - 1e-9)


def test_a_complete_search_that_is_stopped_says_so() -> None:
    _, is_complete = ExactSearch(drawn_problem(2), Aim(1000), Budget(3)).better_than(np.inf)
    assert not is_complete


@pytest.mark.parametrize("seed", range(8))
def test_no_step_makes_ranks_that_share_cores_slower(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tables = [[Option((block(rng, 4, 5),), NOTHING, (0,))] for _ in range(12)]
    problem = Problem(4, 4, 2, 1.0, [0.2, 0.3], [0.5], 1, tables, range(12))
    start = Assignment(np.arange(12), [np.array([rank]) for rank in rng.integers(0, 4, 12)])
    budget = Budget(4_000)

    found = LocalSearch(problem, Aim(1000), budget).improve(start)

    assert found.score <= Loads(problem, start.copy()).milliseconds().max() * (1 + 1e-9)
    assert not budget.is_spent


def shard(
    ms: float, num_bytes: float = 0.0, group: int | None = None, sent_ms: float = 0.0, to_any: float = 0.0
) -> ShardBlock:
    return ShardBlock(ms, num_bytes, num_bytes, () if group is None else (group,), (sent_ms,), (to_any,))


def problem(classes: Sequence[Sequence[Option]], class_of: Sequence[int], ranks: int, **changes: object) -> Problem:
    """One node, no networks, no starts, unless it is said."""
    usual: dict[str, object] = {
        "world_size": ranks,
        "ranks_per_node": ranks,
        "ranks_at_once": float("inf"),
        "base_ms": 0.0,
        "group_start_ms": [],
        "exchange_start_ms": [],
        "num_phases": 1,
    }
    return Problem(**{**usual, **changes}, classes=classes, class_of=class_of)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [pytest.param(at, marks=pytest.mark.slow if at > 7 else ()) for at in range(240)])
def test_no_assignment_goes_below_the_bound_where_every_rank_starts_groups_in_any_case(seed: int) -> None:
    random, own, capacity = np.random.default_rng(seed), drawn_problem(seed), [20.0, 1000.0][seed % 2]
    classes = []
    for options in own.classes:
        group = int(random.integers(2))
        common = [shard(random.random(), 1.0, group if random.random() < 0.8 else 1 - group) for _ in options]
        with_common = [replace(option, everywhere=mine) for option, mine in zip(options, common, strict=True)]
        classes.append(with_common[: 1 + int(random.integers(len(options)))])
    own = replace(own, classes=classes)
    best = fastest_of_all(own, capacity)
    assert LowerBound(own, capacity).milliseconds(np.inf) <= best * (1 + 1e-9)
    assert LowerBound(own, capacity).milliseconds(best) <= best


@pytest.mark.parametrize("start_ms", [0.0, 0.7])
@pytest.mark.parametrize(("num_tables", "of_one_rank"), [(12, 3), (5, 2)])  # the mean, and two shards on one rank
def test_equal_tables_take_the_most_shards_of_a_rank_and_the_start_of_their_group(
    num_tables: int, of_one_rank: int, start_ms: float
) -> None:
    own = problem([[Option((shard(1.0, group=0),), NOTHING)]], [0] * num_tables, 4, group_start_ms=[start_ms])
    assert LowerBound(own, 1.0).milliseconds(np.inf) == pytest.approx(of_one_rank + start_ms, rel=2e-4)


def test_a_faster_way_for_which_there_is_no_room_does_not_lower_the_bound() -> None:
    fast, slow = Option((), shard(1.0, num_bytes=8)), Option((shard(6.0, num_bytes=8),), NOTHING)
    own = problem([[fast, slow]], [0, 0], 2)
    # both on every rank take 2 ms and 16 bytes; with 8 bytes a rank each has one
    assert LowerBound(own, 16.0).milliseconds(np.inf) == pytest.approx(2.0, rel=2e-4)
    assert LowerBound(own, 8.0).milliseconds(np.inf) == pytest.approx(6.0, rel=2e-4)


@pytest.mark.thorough
@pytest.mark.parametrize(("num_exchanges", "ranks_at_once"), [(1, 4.0), (8, 1.0)])
def test_the_bound_of_the_only_assignment_is_its_time(num_exchanges: int, ranks_at_once: float) -> None:
    starts = [0.1 * (at + 1) for at in range(num_exchanges)]
    on_all = [[Option((), shard(at + 1.0, group=at % 3, sent_ms=0.5), (at % num_exchanges,))] for at in range(12)]
    own = problem(
        on_all,
        range(12),
        4,
        base_ms=0.3,
        ranks_at_once=ranks_at_once,
        group_start_ms=[0.2, 0.5, 0.9],
        exchange_start_ms=starts,
    )
    found = Solver(own, 0.0, 1e6, tolerance=0.0).fastest(1e6)
    assert found.milliseconds == pytest.approx((0.3 + 78 + 6 + 1.6 + sum(starts)) * 4 / ranks_at_once)
    assert found.lower_bound_ms == found.milliseconds
    assert found.is_complete


def test_the_bound_of_one_rank_is_its_time() -> None:
    own = problem(
        [[Option((shard(at + 1.0, group=at % 2),), NOTHING, (0,))] for at in range(9)],
        range(9),
        1,
        group_start_ms=[0.2, 0.5],
        exchange_start_ms=[0.1],
    )
    found = Solver(own, 0.0, 1e6, tolerance=0.0).fastest(1e6)
    assert found.milliseconds == pytest.approx(45.8)
    assert found.lower_bound_ms == found.milliseconds
    assert found.is_complete
