"""Runs that are killed and told to stop, again and again, end as one that was left alone.

The moments are drawn, some of them forced: while a checkpoint is written, once it is whole, while an older one is
removed, while validating, at the end, before any change of a file, and at any time.
"""

import random
import signal
from pathlib import Path

import pytest

from tests.robustness.disturbed_runs import DrawnRun, strike_and_compare
from tests.robustness.strikes import Strike

pytestmark = pytest.mark.distributed

STRIKES_OF_A_TEST = 4
# those that only rank 0 comes to, and how often they come at most in a run that is left alone
OF_RANK_0 = {
    "change": 150,
    "saved": 8,
    "removing": 16,
    "validated": 10,
    "finally evaluated": 1,
    "evaluation file": 1,
    "end": 1,
}
OF_ALL_RANKS = {"time": 150, "step": 31, "saving": 40, "validation": 10, "final evaluation": 1}


def draw_strike(draw: random.Random, ranks: int) -> Strike:
    moment = draw.choice([*OF_ALL_RANKS, *OF_RANK_0])
    rank = draw.randrange(ranks) if moment in OF_ALL_RANKS else 0
    count = draw.randrange((OF_ALL_RANKS | OF_RANK_0)[moment])
    by = draw.choice([signal.SIGTERM, signal.SIGINT]) if moment == "step" and draw.random() < 0.5 else signal.SIGKILL
    return Strike(moment, count, by, rank, draw.random() < 0.5)


@pytest.mark.parametrize(("ranks", "strikes"), [pytest.param(1, 2, marks=pytest.mark.slow), (2, 1)])
def test_what_is_killed_ends_as_what_is_left_alone(config: Path, tmp_path: Path, ranks: int, strikes: int) -> None:
    draw = random.Random(ranks)
    drawn = DrawnRun.drawn(config, draw, ranks)
    strike_and_compare(drawn, drawn, tmp_path, lambda: draw_strike(draw, ranks), strikes)


@pytest.mark.slow
@pytest.mark.parametrize("moment", [*OF_ALL_RANKS, *OF_RANK_0])
def test_every_moment_comes(config: Path, tmp_path: Path, moment: str) -> None:
    overrides = ["train.max_steps=9", "train.checkpoint_every=2", "train.keep_checkpoints=1"]
    assert not DrawnRun(config, overrides, 1, sync=True).run(tmp_path / "run", Strike(moment))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(-(-metafunc.config.getoption("--kills") // STRIKES_OF_A_TEST)))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_is_killed_many_times_ends_as_what_is_left_alone(config: Path, tmp_path: Path, seed: int) -> None:
    draw, ranks = random.Random(1000 + seed), 1 + seed % 2
    drawn = DrawnRun.drawn(config, draw, ranks)
    strike_and_compare(drawn, drawn, tmp_path, lambda: draw_strike(draw, ranks), STRIKES_OF_A_TEST)
