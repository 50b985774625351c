"""Runs whose tables are looked up in one pass: stopped, and gone on with by the same kernel or another."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.small_runs import distembed

STEPS, STOPPED = 9, 5
OPTIMIZERS = ["train.sparse_optimizer.name=row_wise_adagrad", "train.sparse_optimizer.learning_rate=0.05"]


def train(config: Path, run: Path, kernel: str, steps: int, *arguments: str) -> None:
    settings = [f"embedding.kernel={kernel}", f"train.max_steps={steps}", f"train.checkpoint_every={STOPPED}"]
    distembed("train", config, *OPTIMIZERS, *settings, "--run-dir", run, *arguments)


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.slow
@pytest.mark.distributed
def test_a_run_goes_on_by_another_kernel_up_to_rounding_and_by_its_own_to_the_bit(config: Path, tmp_path: Path) -> None:
    for kernel in ("fused", "fbgemm"):
        train(config, tmp_path / kernel, kernel, STEPS)
        for second in ("fused", "fbgemm"):
            run = tmp_path / f"{kernel}-{second}"
            train(config, run, kernel, STOPPED)
            train(config, run, second, STEPS, "--resume")
            assert len(losses(run)) == STEPS
            if second == kernel:
                assert losses(run) == losses(tmp_path / kernel)
            np.testing.assert_allclose(losses(run), losses(tmp_path / kernel), rtol=1e-5)
    np.testing.assert_allclose(losses(tmp_path / "fused"), losses(tmp_path / "fbgemm"), rtol=1e-5)
