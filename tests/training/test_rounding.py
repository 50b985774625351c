"""Runs whose fp16 tables are rounded at random on a CPU."""

from pathlib import Path

import pytest

from distembed.base.errors import UserError
from tests.small_runs import call, losses, stopped_at

HALF = "embedding.default.data_type=fp16"
EVERYWHERE = "train.sparse_optimizer.stochastic_rounding=everywhere"
PLACED = ["plan.sharding_types=[table_wise]", "embedding.kernel=fused"]


@pytest.mark.thorough
def test_a_resumed_run_repeats_its_rounding(config: Path, tmp_path: Path) -> None:
    one, resumed, nearest = (tmp_path / name for name in ("one", "resumed", "nearest"))
    call("train", config, HALF, EVERYWHERE, *PLACED, "train.checkpoint_every=7", "--run-dir", one)
    call("train", config, HALF, EVERYWHERE, *PLACED, "--run-dir", stopped_at(28, one, resumed), "--resume")
    assert losses(resumed) == losses(one)
    call("train", config, HALF, *PLACED, "--run-dir", nearest)
    assert losses(nearest) != losses(one)
    assert losses(nearest) == pytest.approx(losses(one), rel=0.05)


@pytest.mark.parametrize("setting", ["plan.sharding_types=[data_parallel]", "embedding.kernel=auto"])
def test_tables_that_a_cpu_cannot_round_at_random_are_refused(setting: str, config: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="stochastic_rounding is 'everywhere', .* unlike table 'C"):
        call("train", config, HALF, EVERYWHERE, setting, "--run-dir", tmp_path / "run")
