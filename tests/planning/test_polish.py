"""Plans that HiGHS polishes: the best of all where its time is enough, and never one that is slower or does not fit."""

import sys
from dataclasses import replace

import numpy as np
import pytest

from distembed.base.errors import UserError
from distembed.planning.fastest import polish
from distembed.planning.fastest.loads import Aim, Loads
from distembed.planning.search import find_plan
from tests.planning.drawn_requests import draw
from tests.planning.test_fastest import CAPACITIES, drawn_problem, fastest_of_all


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < 12 else pytest.mark.slow) for seed in range(60)]
)
def test_the_program_has_the_time_of_the_best_of_all(seed: int) -> None:
    problem, capacity = drawn_problem(seed), CAPACITIES[seed % 5 % 3]
    best = fastest_of_all(problem, capacity)
    found, bound = polish.solve(problem, Aim(capacity), None, 60, gap=0.0)
    assert (found is None) == np.isinf(best)
    if found is not None:
        loads = Loads(problem, found)
        assert loads.milliseconds().max() == pytest.approx(best, rel=1e-5)
        assert loads.num_bytes.max() <= capacity * (1 + 1e-6)
        assert bound == pytest.approx(best, rel=1e-5)
        again, _ = polish.solve(problem, Aim(capacity), found, 60, gap=0.0)
        assert again is None or Loads(problem, again).milliseconds().max() == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("seed", [1, 13, pytest.param(22, marks=pytest.mark.slow)])
def test_a_polished_plan_fits_and_is_no_slower(seed: int) -> None:
    request, _ = draw(seed, 500)
    polished = replace(request, config=replace(request.config, polish_seconds=5.0))
    before, after = (find_plan(own) for own in (request, polished))
    slowest, own = (max(rank.times.total for rank in plan.ranks) for plan in (before, after))
    assert after.fits >= before.fits
    assert own <= slowest * (1 + request.config.time_tolerance)
    assert before.lower_bound_ms <= after.lower_bound_ms <= own * (1 + 1e-9)
    assert after.is_complete >= before.is_complete


def test_without_highspy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(UserError, match=r"pip install 'distembed\[polish\]'"):
        polish.solve(drawn_problem(0), Aim(1000.0), None, 1.0)
