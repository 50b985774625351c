"""Runs that are killed and told to stop, again and again, end as one that was left alone: to the bit and to the line.

The moments are drawn, some of them forced: while a checkpoint is written, once it is whole, while an older one is
removed, while validating, at the end, before any change of a file, and at any time.
"""

import itertools
import json
import random
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from distembed.checkpoints.places import newest_checkpoint
from tests.robustness.checkpoint_numbers import saved_numbers
from tests.robustness.strikes import MOMENTS, Strike, run_and_strike

# without a process group torch says that it takes this for one process, which it is
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

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
UNEQUAL = ("seconds", "samples_per_second")  # what a clock says


@dataclass(frozen=True)
class Trained:
    """A run, as it is drawn.

    Attributes:
        config: The file.
        overrides: What is set on the command line.
        ranks: Number of processes.
        sync: Whether training waits while checkpoints are written.
    """

    config: Path
    overrides: list[str]
    ranks: int
    sync: bool

    @classmethod
    def drawn(cls, config: Path, draw: random.Random, ranks: int) -> "Trained":
        # none of them divides another
        log_every, checkpoint_every, evaluate_every = draw.sample(draw.choice([(2, 3, 5, 7), (3, 4, 5, 7)]), 3)
        dense, sparse = draw.choice([("sgd", "sgd"), ("adam", "adagrad"), ("adagrad", "amsgrad")])
        overrides = [
            f"train.batch_size={draw.choice([65, 96, 130])}",
            f"train.epochs={draw.choice([1, 2])}",
            f"train.max_steps={draw.randrange(12, 30)}",
            f"train.log_every={log_every}",
            f"train.checkpoint_every={checkpoint_every}",
            f"train.evaluate_every={draw.choice([evaluate_every, evaluate_every, 0])}",
            f"train.keep_checkpoints={draw.choice([1, 2, 3])}",
            f"train.dense_optimizer.name={dense}",
            "train.dense_optimizer.learning_rate=0.01",
            "train.dense_optimizer.schedule.decay=linear",
            f"train.sparse_optimizer.name={sparse}",
            "train.sparse_optimizer.learning_rate=0.1",
            f"sse.default.p0={draw.choice([0.0, 0.1])}",
        ]
        return cls(config, overrides, ranks, draw.random() < 0.3)

    def run(self, folder: Path, strike: Strike | None = None) -> bool:
        """Starts it, or goes on with it; returns whether it came to its end."""
        arguments = ("train", self.config, *self.overrides, "--run-dir", folder, "--resume-or-start")
        ended = run_and_strike(arguments, folder, self.ranks, strike, self.sync)
        if not any(ended.codes):
            return True
        assert ended.struck, f"{self} failed by itself, with {ended.codes}:\n{ended.text}"
        if strike is not None and strike.signal == signal.SIGKILL:
            assert ended.codes[strike.rank] == -signal.SIGKILL, f"{strike}: {ended.codes}\n{ended.text}"
        return False


def draw_strike(draw: random.Random, ranks: int) -> Strike:
    moment = draw.choice(list(MOMENTS))
    rank = draw.randrange(ranks) if moment in OF_ALL_RANKS else 0
    count = draw.randrange((OF_ALL_RANKS | OF_RANK_0)[moment])
    by = draw.choice([signal.SIGTERM, signal.SIGINT]) if moment == "step" and draw.random() < 0.5 else signal.SIGKILL
    return Strike(moment, count, by, rank, draw.random() < 0.5)


def contents(run: Path) -> dict[str, Any]:
    """What a run has left that does not depend on how fast it was."""

    def timeless(values: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if name not in UNEQUAL}

    lines = (run / "metrics.jsonl").read_text().splitlines()
    checkpoints = sorted(path.name for path in (run / "checkpoints").iterdir())
    return {
        "status": json.loads((run / "run.json").read_text())["status"],
        "checkpoints": checkpoints,
        "evaluation": timeless(json.loads((run / "evaluation.json").read_text())),
        "metrics": [timeless(json.loads(line)) for line in lines],
    }


def differences(run: Path, undisturbed: Path) -> list[str]:
    """Whatever a run has left that is not what another has."""
    found, expected = contents(run), contents(undisturbed)
    lines = itertools.zip_longest(found.pop("metrics"), expected.pop("metrics"))
    differing = [f"line {number}: {one} != {two}" for number, (one, two) in enumerate(lines, start=1) if one != two]
    differing += [f"{name}: {found[name]} != {expected[name]}" for name in expected if found[name] != expected[name]]
    numbers, others = (saved_numbers(newest_checkpoint(each)) for each in (run, undisturbed))
    assert numbers.keys() == others.keys()
    return differing + [name for name in others if not torch.equal(numbers[name], others[name])]


def strike_and_compare(trained: Trained, folder: Path, draw: random.Random, strikes: int) -> None:
    """Disturbs runs until so many strikes have hit, and compares each of them with one that is left alone."""
    undisturbed = folder / "undisturbed"
    assert trained.run(undisturbed)
    number = 0
    while strikes:
        run, hits = folder / f"run-{number}", []
        number += 1
        while len(hits) < strikes:
            strike = draw_strike(draw, trained.ranks)
            if trained.run(run, strike):
                break
            hits.append(strike)
        else:
            assert trained.run(run)
        strikes -= len(hits)
        differing = differences(run, undisturbed)
        assert not differing, "\n".join([f"after {hits} of {trained}:", *differing])


@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "strikes"), [(1, 2), (2, 2)])
def test_what_is_killed_ends_as_what_is_left_alone(config: Path, tmp_path: Path, ranks: int, strikes: int) -> None:
    draw = random.Random(ranks)
    strike_and_compare(Trained.drawn(config, draw, ranks), tmp_path, draw, strikes)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(-(-metafunc.config.getoption("--kills") // STRIKES_OF_A_TEST)))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_what_is_killed_many_times_ends_as_what_is_left_alone(config: Path, tmp_path: Path, seed: int) -> None:
    draw = random.Random(1000 + seed)
    strike_and_compare(Trained.drawn(config, draw, 1 + seed % 2), tmp_path, draw, STRIKES_OF_A_TEST)
