"""Settings: rates that follow a schedule, and mistakes that are named."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from distembed.base.errors import UserError
from distembed.sse import SSE, FeaturePerturbation, Graph, IdPerturbation, IdStream, Walk, set_step
from tests.sse.reference import FALSE_ALARM, share_p_value

GRAPH = Graph.from_edges(4, [0, 1], [1, 2])


def interpolated(schedule: list[tuple[int, float]], step: int) -> float:
    if step <= schedule[0][0]:
        return schedule[0][1]
    for (left, low), (right, high) in zip(schedule, schedule[1:], strict=False):
        if left <= step <= right:
            return low + (high - low) * (step - left) / (right - left)
    return schedule[-1][1]


@given(
    points=st.dictionaries(st.integers(0, 10**6), st.floats(0, 1), min_size=1, max_size=5),
    step=st.integers(0, 2 * 10**6),
    p0=st.floats(0, 1),
)
def test_the_rate_is_linear_between_the_points_of_the_schedule(points: dict[int, float], step: int, p0: float) -> None:
    schedule = sorted(points.items())
    sse = SSE(p0, schedule=schedule)
    for at in (step, *points):
        assert sse.rate(at) == pytest.approx(p0 * interpolated(schedule, at), rel=1e-9, abs=1e-12)


def test_without_a_schedule_the_rate_is_p0() -> None:
    assert [SSE(p0).rate(step) for p0 in (0, 0.3, 1) for step in (0, 10**9)] == [0, 0, 0.3, 0.3, 1, 1]


def test_replaced_shares_follow_the_schedule() -> None:
    schedule = [(2, 0.0), (6, 1.0), (8, 0.25)]
    perturb, ids = (
        IdPerturbation(100, SSE(0.4, schedule=schedule), rank=0, name="ids"),
        torch.zeros(100_000, dtype=torch.long),
    )
    for step in range(12):
        share = 0.4 * interpolated(schedule, step)
        assert share_p_value((perturb(ids) != 0).sum(), len(ids), share) > FALSE_ALARM
    set_step(perturb, 7)
    assert share_p_value((perturb(ids) != 0).sum(), len(ids), 0.4 * 0.625) > FALSE_ALARM


def test_settings_may_be_lists_and_are_put_in_order() -> None:
    sse = SSE(0.1, schedule=[[0, 0], [10, 1]], reserved=[5, 0, 5])
    assert sse.schedule == ((0, 0), (10, 1)) and sse.reserved == (0, 5)
    assert sse == SSE(0.1, schedule=((0, 0.0), (10, 1.0)), reserved=(0, 5))
    assert hash(sse) == hash(SSE(0.1, schedule=((0, 0.0), (10, 1.0)), reserved=(0, 5)))


@pytest.mark.parametrize(
    "settings",
    [
        {"p0": 0},
        {"p0": 1},
        {"p0": np.float64(0.5)},
        {"p0": 0.5, "rho": 1},
        {"p0": 0.5, "rho": 1, "graph": GRAPH},
        {"p0": 0.5, "rho": 7, "graph": GRAPH, "walk": Walk(0, 20)},
        {"p0": 0.5, "rho": 1.0, "graph": GRAPH, "walk": Walk(1, 1)},
        {"p0": 0.5, "reserved": range(64)},
        {"p0": 0.5, "schedule": [(3, 0.5)]},
    ],
)
def test_settings_at_their_limits_are_taken(settings: dict[str, Any]) -> None:
    sse = SSE(**settings)
    assert 0 <= sse.rate(3) <= 1
    new = IdPerturbation(100 if sse.graph is None else 4, sse, name="ids")(torch.zeros(50, dtype=torch.long))
    assert ((new >= 0) & (new < 100)).all()


NUMBERS_THAT_ARE_NONE: list[Any] = [math.nan, math.inf, -math.inf, "0.5", None, True, [0.5], 1j]
WRONG: list[tuple[str, str, Callable[[], Any]]] = [
    *[("p0", repr(v), lambda v=v: SSE(v)) for v in [-0.1, 1.1, 2, *NUMBERS_THAT_ARE_NONE]],
    *[("rho", repr(v), lambda v=v: SSE(0.1, v, GRAPH)) for v in [0, 0.99, -3, *NUMBERS_THAT_ARE_NONE]],
    ("rho", "2", lambda: SSE(0.1, 2)),
    ("walk", "Walk(restart=0.5, max_steps=8)", lambda: SSE(0.1, walk=Walk())),
    ("graph", "4", lambda: SSE(0.1, 2.0, 4)),  # type: ignore[arg-type]
    ("walk", "0.5", lambda: SSE(0.1, 2.0, GRAPH, 0.5)),  # type: ignore[arg-type]
    *[("walk.restart", repr(v), lambda v=v: Walk(v)) for v in [-0.1, 1.1, *NUMBERS_THAT_ARE_NONE]],
    *[("walk.max_steps", repr(v), lambda v=v: Walk(0.5, v)) for v in [0, -1, 21, 1.0, "3", None, True, math.inf]],
    *[
        ("schedule", shown, lambda v=v: SSE(0.1, schedule=v))
        for v, shown in [
            (None, "None"),
            (3, "3"),
            ("ab", "'ab'"),
            ([1, 2], "[1, 2]"),
            ([(1, 0.5, 2)], "[(1, 0.5, 2)]"),
            ([(-1, 0.5)], "(-1, 0.5)"),
            ([(1.0, 0.5)], "(1.0, 0.5)"),
            ([(True, 0.5)], "(True, 0.5)"),
            ([("1", 0.5)], "('1', 0.5)"),
            ([(1, 1.5)], "(1, 1.5)"),
            ([(1, -0.5)], "(1, -0.5)"),
            ([(1, math.nan)], "(1, nan)"),
            ([(1, "1")], "(1, '1')"),
            ([(1, None)], "(1, None)"),
            ([(5, 0.5), (3, 1.0)], "[5, 3]"),
            ([(5, 0.5), (5, 1.0)], "[5, 5]"),
        ]
    ],
    *[
        ("reserved", shown, lambda v=v: SSE(0.1, reserved=v))
        for v, shown in [
            (3, "3"),
            (None, "None"),
            ("12", "'12'"),
            ([-1], "[-1]"),
            ([0.0], "[0.0]"),
            ([True], "[True]"),
            (["0"], "['0']"),
            ([None], "[None]"),
            (range(65), "65 ids"),
        ]
    ],
    *[("step", repr(v), lambda v=v: set_step(nn.Linear(1, 1), v)) for v in [-1, 1.0, "1", None, True, math.nan]],
    ("reserved id", "100", lambda: IdPerturbation(100, SSE(0.1, reserved=(0, 100)), name="ids")),
    ("graph", "4 ids", lambda: IdPerturbation(5, SSE(0.1, 2.0, GRAPH), name="ids")),
    ("edges", "2", lambda: IdPerturbation(4, SSE(0.1, 2.0, GRAPH, reserved=(2,)), name="ids")),
    ("table 'users'", "5", lambda: IdStream("users", "user", 5, SSE(0.1, 2.0, GRAPH), seed=0)),
]


@pytest.mark.parametrize("field, shown, make", WRONG, ids=[f"{field} {shown}" for field, shown, _ in WRONG])
def test_a_wrong_setting_is_named_with_its_value(field: str, shown: str, make: Callable[[], Any]) -> None:
    with pytest.raises(UserError) as caught:
        make()
    assert field in str(caught.value) and shown in str(caught.value)


def test_a_step_reaches_all_that_replaces_ids() -> None:
    inner = FeaturePerturbation([IdStream("t", "f", 10, SSE(0.5), seed=0)])
    model = nn.Sequential(nn.Sequential(inner), IdPerturbation(10, SSE(0.5), name="ids"))
    set_step(model, 12)
    assert [inner.step, model[1].step] == [12, 12]
    with pytest.raises(UserError, match="step is -3"):
        set_step(model, -3)
    assert [inner.step, model[1].step] == [12, 12]
