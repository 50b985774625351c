"""Learning rates over the steps."""

import math

import pytest

from distembed.training.config import ScheduleConfig
from distembed.training.optimizers import learning_rate_factor


def factors(num_steps: int = 100, **settings: object) -> list[float]:
    schedule = ScheduleConfig(**settings)  # type: ignore[arg-type]
    return [learning_rate_factor(schedule, step, num_steps) for step in range(num_steps)]


def test_no_schedule_is_constant() -> None:
    assert set(factors()) == {1.0}


def test_warm_up_grows_to_one_in_its_share_of_the_steps() -> None:
    found = factors(warmup=0.1)
    assert found[:11] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0])


@pytest.mark.parametrize(("decay", "half"), [("linear", 0.5), ("cosine", 0.5 * (1 + math.cos(math.pi / 2)))])
def test_decay_falls_to_its_final_factor(decay: str, half: float) -> None:
    found = factors(decay=decay)
    assert found[0] == 1.0
    assert found[50] == pytest.approx(half)
    assert found == sorted(found, reverse=True)
    assert learning_rate_factor(ScheduleConfig(decay=decay, final_factor=0.2), 100, 100) == pytest.approx(0.2)


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_short_runs_have_positive_rates(num_steps: int) -> None:
    assert all(factor > 0 for factor in factors(num_steps, warmup=0.9, decay="linear"))
