"""Runs that are killed and told to stop, again and again, end as one that was left alone.

The moments are drawn, some of them forced: while a checkpoint is written, once it is whole, while an older one is
removed, while validating, at the end, before any change of a file, and at any time. Some runs have their checkpoints in
an S3 that fails often.
"""

import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.robustness.disturbed_runs import DrawnRun, strike_and_compare
from tests.robustness.s3_server import reached_s3
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


# the same of a run whose checkpoints are in an S3, with requests to it thrice as likely as another moment
S3_RANK_0 = {"validated": 10, "end": 1}
S3_ALL_RANKS = {"request": 150, "time": 300, "step": 31}
FAILED_SHARE = 0.4
"""Of the requests to S3."""


def draw_strike(draw: random.Random, ranks: int) -> Strike:
    moment = draw.choice([*OF_ALL_RANKS, *OF_RANK_0])
    rank = draw.randrange(ranks) if moment in OF_ALL_RANKS else 0
    count = draw.randrange((OF_ALL_RANKS | OF_RANK_0)[moment])
    by = draw.choice([signal.SIGTERM, signal.SIGINT]) if moment == "step" and draw.random() < 0.5 else signal.SIGKILL
    return Strike(moment, count, by, rank, draw.random() < 0.5)


def draw_strike_with_s3(draw: random.Random, ranks: int) -> Strike:
    moment = draw.choice([*S3_ALL_RANKS, *S3_RANK_0, "request", "request"])
    rank = draw.randrange(ranks) if moment in S3_ALL_RANKS else 0
    count = draw.randrange((S3_ALL_RANKS | S3_RANK_0)[moment])
    return Strike(moment, count, signal.SIGKILL, rank, draw.random() < 0.5)


def kill_and_compare(
    config: Path, tmp_path: Path, seed: int, ranks: int, strikes: int = STRIKES_OF_A_TEST, s3: str | None = None
) -> None:
    draw = random.Random(seed)
    left_alone = DrawnRun.drawn(config, draw, ranks)
    strike = draw_strike if s3 is None else draw_strike_with_s3
    strike_and_compare(replace(left_alone, place=s3), left_alone, tmp_path, lambda: strike(draw, ranks), strikes)


@pytest.mark.thorough
@pytest.mark.parametrize(("ranks", "strikes"), [pytest.param(1, 2, marks=pytest.mark.slow), (2, 1)])
def test_what_is_killed_ends_as_what_is_left_alone(config: Path, tmp_path: Path, ranks: int, strikes: int) -> None:
    kill_and_compare(config, tmp_path, ranks, ranks, strikes)


@pytest.mark.slow
@pytest.mark.parametrize("moment", [*OF_ALL_RANKS, *OF_RANK_0])
def test_every_moment_comes(config: Path, tmp_path: Path, moment: str) -> None:
    overrides = ["train.max_steps=9", "train.checkpoint_every=2", "train.keep_checkpoints=1"]
    assert not DrawnRun(config, overrides, 1, sync=True).run(tmp_path / "run", Strike(moment))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # of the kills of runs, a fifth are of ones with S3
    for name, share in (("seed", 1), ("s3_seed", 5)):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, range(-(-metafunc.config.getoption("--kills") // (share * STRIKES_OF_A_TEST))))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_is_killed_many_times_ends_as_what_is_left_alone(config: Path, tmp_path: Path, seed: int) -> None:
    kill_and_compare(config, tmp_path, 1000 + seed, 1 + seed % 2)


@pytest.fixture
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with reached_s3(tmp_path_factory.mktemp("s3"), FAILED_SHARE) as place:
        yield place


@pytest.mark.slow
def test_killed_while_much_of_what_is_asked_of_s3_fails(config: Path, tmp_path: Path, s3: str) -> None:
    kill_and_compare(config, tmp_path, 0, 1, strikes=1, s3=s3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_often_while_much_of_what_is_asked_of_s3_fails(
    config: Path, tmp_path: Path, s3: str, s3_seed: int
) -> None:
    kill_and_compare(config, tmp_path, 2000 + s3_seed, 1 + s3_seed % 2, s3=s3)
