"""Runs whose checkpoints are in an S3 that fails often, and that are killed, end as one that had neither."""

import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import s3fs

from tests.robustness.disturbed_runs import DrawnRun, strike_and_compare
from tests.robustness.s3_server import BUCKET, failing_s3
from tests.robustness.strikes import Strike, retry_at_once

pytestmark = pytest.mark.distributed

FAILED_SHARE = 0.4
# and how often they come at most
MOMENTS = {"request": 150, "time": 300, "step": 31, "validated": 10, "end": 1}
STRIKES_OF_A_TEST = 4


@pytest.fixture
def s3(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A place for checkpoints, which this process and those that it starts reach."""
    with failing_s3(tmp_path_factory.mktemp("s3"), FAILED_SHARE, seed=0) as url:
        for name, value in {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }.items():
            monkeypatch.setenv(name, value)
        retry_at_once()
        s3fs.S3FileSystem.clear_instance_cache()  # those of this process know the server of the test before
        yield f"s3://{BUCKET}"


def draw_strike(draw: random.Random, ranks: int) -> Strike:
    moment = draw.choice([*MOMENTS, "request", "request"])
    rank = 0 if moment in ("validated", "end") else draw.randrange(ranks)
    return Strike(moment, draw.randrange(MOMENTS[moment]), signal.SIGKILL, rank, draw.random() < 0.5)


def run_and_compare(config: Path, tmp_path: Path, s3: str, draw: random.Random, ranks: int, strikes: int) -> None:
    left_alone = DrawnRun.drawn(config, draw, ranks)
    drawn = replace(left_alone, place=s3)
    strike_and_compare(drawn, left_alone, tmp_path, lambda: draw_strike(draw, ranks), strikes)


@pytest.mark.slow
def test_killed_while_much_of_what_is_asked_of_s3_fails(config: Path, tmp_path: Path, s3: str) -> None:
    run_and_compare(config, tmp_path, s3, random.Random(0), ranks=1, strikes=1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        # of the kills of runs, a fifth
        metafunc.parametrize("seed", range(-(-metafunc.config.getoption("--kills") // (5 * STRIKES_OF_A_TEST))))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_often_while_much_of_what_is_asked_of_s3_fails(config: Path, tmp_path: Path, s3: str, seed: int) -> None:
    run_and_compare(config, tmp_path, s3, random.Random(2000 + seed), 1 + seed % 2, STRIKES_OF_A_TEST)
