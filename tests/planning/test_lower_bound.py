"""The bound where the least time of all assignments is known, and where every rank starts groups in any case."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from distembed.planning.fastest.bound import LowerBound
from distembed.planning.fastest.problem import Block, Option, Problem
from distembed.planning.fastest.solver import Solver
from tests.planning.test_fastest import drawn_problem, fastest_of_all

NOTHING = Block(0.0, 0.0, 0.0, (), (0.0,), (0.0,))


def shard(
    ms: float, num_bytes: float = 0.0, group: int | None = None, sent_ms: float = 0.0, to_any: float = 0.0
) -> Block:
    return Block(ms, num_bytes, num_bytes, () if group is None else (group,), (sent_ms,), (to_any,))


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
def test_tables_that_fill_all_ranks_alike_are_bounded_by_their_mean_with_the_starts_of_a_group(start_ms: float) -> None:
    own = problem([[Option((shard(1.0, group=0),), NOTHING)]], [0] * 12, 4, group_start_ms=[start_ms])
    assert LowerBound(own, 1.0).milliseconds(np.inf) == pytest.approx(3.0 + start_ms, rel=2e-4)


@pytest.mark.parametrize("start_ms", [0.0, 0.7])
def test_of_more_shards_than_ranks_two_are_on_one(start_ms: float) -> None:
    own = problem([[Option((shard(1.0, group=0),), NOTHING)]], [0] * 5, 4, group_start_ms=[start_ms])
    assert LowerBound(own, 1.0).milliseconds(np.inf) == pytest.approx(2.0 + start_ms, rel=2e-4)


def test_a_faster_way_for_which_there_is_no_room_does_not_lower_the_bound() -> None:
    fast, slow = Option((), shard(1.0, num_bytes=8)), Option((shard(6.0, num_bytes=8),), NOTHING)
    own = problem([[fast, slow]], [0, 0], 2)
    # both on every rank take 2 ms and 16 bytes; with 8 bytes a rank each has one
    assert LowerBound(own, 16.0).milliseconds(np.inf) == pytest.approx(2.0, rel=2e-4)
    assert LowerBound(own, 8.0).milliseconds(np.inf) == pytest.approx(6.0, rel=2e-4)


@pytest.mark.parametrize("num_exchanges", [1, 8])
@pytest.mark.parametrize("ranks_at_once", [1.0, 4.0])
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
