"""Runs that are disturbed by strikes, again and again, until they end, and what they have left then.

A disturbed run has to end as one that was left alone: to the bit of its weights and to the line of its metrics.
"""

import itertools
import json
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distembed.checkpoints.store import CheckpointStore, checkpoint_place, newest_checkpoint
from tests.robustness.checkpoint_numbers import saved_numbers
from tests.robustness.strikes import Strike, Surroundings, run_and_strike

UNEQUAL = ("seconds", "samples_per_second")  # what a clock says


@dataclass(frozen=True)
class DrawnRun:
    """A run, as it is drawn."""

    config: Path
    overrides: list[str]
    ranks: int
    sync: bool
    place: str | None = None

    @classmethod
    def drawn(cls, config: Path, draw: random.Random, ranks: int) -> "DrawnRun":
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

    def checkpoint_dir(self, folder: Path) -> str | None:
        return None if self.place is None else f"{self.place}/{folder.name}"

    def run(self, folder: Path, strike: Strike | None = None) -> bool:
        """Starts it, or goes on with it; returns whether it came to its end."""
        overrides = [*self.overrides]
        if self.place is not None:
            overrides.append(f"train.checkpoint_dir={self.checkpoint_dir(folder)}")
        arguments = ("train", self.config, *overrides, "--run-dir", folder, "--resume-or-start")
        ended = run_and_strike(arguments, folder, self.ranks, strike, Surroundings(self.sync, self.place is not None))
        if not any(ended.codes):
            return True
        assert ended.struck, f"{self} failed by itself, with {ended.codes}:\n{ended.text}"
        if strike is not None and strike.signal == signal.SIGKILL:
            assert ended.codes[strike.rank] == -signal.SIGKILL, f"{strike}: {ended.codes}\n{ended.text}"
        return False

    def contents(self, run: Path) -> dict[str, Any]:
        """What a run has left that does not depend on how fast it was."""

        def timeless(values: dict[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in values.items() if name not in UNEQUAL}

        lines = (run / "metrics.jsonl").read_text().splitlines()
        return {
            "status": json.loads((run / "run.json").read_text())["status"],
            "checkpoints": CheckpointStore(checkpoint_place(run, self.checkpoint_dir(run))).names(),
            "evaluation": timeless(json.loads((run / "evaluation.json").read_text())),
            "metrics": [timeless(json.loads(line)) for line in lines],
        }


def differences(run: Path, of: DrawnRun, undisturbed: Path, left_alone: DrawnRun) -> list[str]:
    """Whatever a run has left that is not what another has."""
    found, expected = of.contents(run), left_alone.contents(undisturbed)
    lines = itertools.zip_longest(found.pop("metrics"), expected.pop("metrics"))
    differing = [f"line {number}: {one} != {two}" for number, (one, two) in enumerate(lines, start=1) if one != two]
    differing += [f"{name}: {found[name]} != {expected[name]}" for name in expected if found[name] != expected[name]]
    numbers = saved_numbers(newest_checkpoint(run, of.checkpoint_dir(run)))
    others = saved_numbers(newest_checkpoint(undisturbed, left_alone.checkpoint_dir(undisturbed)))
    assert numbers.keys() == others.keys()
    return differing + [name for name in others if not torch.equal(numbers[name], others[name])]


def strike_and_compare(
    drawn: DrawnRun, left_alone: DrawnRun, folder: Path, draw_strike: Callable[[], Strike], strikes: int
) -> None:
    """Disturbs runs until so many strikes have hit, and compares each of them with one that is left alone."""
    undisturbed = folder / "undisturbed"
    assert left_alone.run(undisturbed)
    number = 0
    while strikes:
        run, hits = folder / f"run-{number}", []
        number += 1
        while len(hits) < strikes:
            strike = draw_strike()
            if drawn.run(run, strike):
                break
            hits.append(strike)
        else:
            assert drawn.run(run)
        strikes -= len(hits)
        differing = differences(run, drawn, undisturbed, left_alone)
        assert not differing, "\n".join([f"after {hits} of {drawn}:", *differing])
