"""Numbers drawn a step ahead in a thread are those that would be drawn at the step."""

import copy
import dataclasses
import pickle
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distembed.sse import SSE
from distembed.sse.draws import DrawAhead, Drawer, StepDraws
from distembed.sse.rule import IdStream

RULES = {
    "often": SSE(p0=0.5),
    "rarely": SSE(p0=0.01),
    "always": SSE(p0=1.0),
    "never": SSE(p0=0.0),
    "by_schedule": SSE(p0=0.5, schedule=((0, 0.0), (8, 1.0))),
}


def streams(rule: SSE) -> list[IdStream]:
    return [IdStream(name, name, n, rule, seed=3) for name, n in {"a": 1000, "b": 2, "c": 10**12}.items()]


def require_equal(ahead: StepDraws, expected: StepDraws) -> None:
    for field in dataclasses.fields(StepDraws):
        np.testing.assert_array_equal(getattr(ahead, field.name), getattr(expected, field.name), err_msg=field.name)


def check(rule: SSE, batches: Sequence[Sequence[int]], steps: Sequence[int]) -> None:
    ahead = DrawAhead(Drawer(streams(rule)))
    for counts, step in zip(batches, steps, strict=True):
        sizes = tuple(counts)
        starts = tuple(np.cumsum([5, *sizes[:-1]]).tolist())
        require_equal(ahead(sizes, starts, step, 1), Drawer(streams(rule))(sizes, starts, step, 1))


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=8, deadline=None)
@given(batches=st.lists(st.lists(st.integers(0, 70), min_size=3, max_size=3), min_size=1, max_size=5))
def test_numbers_are_the_same_whatever_the_sizes_of_batches(rule: str, batches: list[list[int]]) -> None:
    check(RULES[rule], batches, range(7, 7 + len(batches)))


@pytest.mark.parametrize("rule", RULES)
def test_numbers_are_the_same_in_large_batches_of_one_size(rule: str) -> None:
    check(RULES[rule], [[8192, 8192, 8192]] * 4, range(4))


def test_a_copy_draws_the_same() -> None:
    ahead = DrawAhead(Drawer(streams(RULES["often"])))
    sizes, starts = (30, 4, 100), (0, 30, 34)
    first = ahead(sizes, starts, 0, 0)
    for other in (copy.deepcopy(ahead), pickle.loads(pickle.dumps(ahead))):
        require_equal(other(sizes, starts, 0, 0), first)
        require_equal(other(sizes, starts, 1, 0), Drawer(streams(RULES["often"]))(sizes, starts, 1, 0))


def test_a_step_that_was_not_expected_is_drawn_when_it_comes() -> None:
    check(RULES["often"], [[40, 3, 9], [40, 3, 9], [900, 3, 9], [1, 0, 0]], [3, 100, 4, 5])
