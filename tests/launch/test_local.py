"""``distembed launch -s local_cwd``: what is left of a job whose launcher was killed, and how its end is told."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.launch.conftest import processes, wait_until
from tests.small_runs import config_values, write_dataset

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow, pytest.mark.distributed]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    values = config_values(write_dataset(tmp_path / "dataset"))
    values["train"] |= {"epochs": 5000, "log_every": 10}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


@pytest.fixture
def launched(config: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "distembed", "launch", str(config), "-j", "1x2", "--run-dir", str(tmp_path / "run")],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


def wait_for_steps(run: Path) -> None:
    metrics = run / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and '"step": 20' in metrics.read_text(), "it does not train")


def test_no_process_outlives_a_launch_that_is_killed(launched: subprocess.Popen[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    wait_for_steps(run)
    assert len(processes(run)) == 3  # the launcher of the node, and two ranks
    launched.kill()
    wait_until(lambda: not processes(run), "processes are left", seconds=30)
    # it was told to end, and has saved
    assert json.loads((run / "run.json").read_text())["status"] == "interrupted"
    assert list((run / "checkpoints").glob("step-*"))


def test_a_job_whose_ranks_are_told_to_end_was_interrupted(launched: subprocess.Popen[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    wait_for_steps(run)
    rank = next(pid for pid, words in processes(run).items() if "distembed.launch.nodes.run" not in words)
    os.kill(rank, signal.SIGTERM)
    printed, _ = launched.communicate(timeout=120)
    assert launched.returncode == 75, printed
    assert "was interrupted" in printed and "Traceback" not in printed and "go on with `distembed resume" in printed


def test_a_mistake_that_only_the_ranks_see_is_told_once_and_not_tried_again(config: Path, tmp_path: Path) -> None:
    """The dataset is gone when the node starts, which has another interpreter."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nmv {tmp_path}/dataset {tmp_path}/elsewhere\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-m", "distembed", "launch", str(config), "-j", "1x2", "--run-dir", str(run)]
        + ["--python", str(python)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 2, printed
    after = printed.partition("submitted: ")[2]
    assert after.count(f"{tmp_path}/dataset") == 1 and "would not mend it" in after, printed
    assert "Traceback" not in printed and "go on with `distembed resume" in printed
    assert [path.name for path in run.rglob("attempt_*")] == ["attempt_0"]
