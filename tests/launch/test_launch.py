"""``distembed launch`` on a real Slurm: what is refused, what is kept, what a killed process and a dead node do."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from torchx.runner import get_runner
from torchx.specs import AppState

from distembed.launch.jobs.job import load_job
from tests.in_process import in_this_process
from tests.launch.conftest import MiniSlurm, processes, wait_until
from tests.small_runs import ROWS, config_values
from tests.small_runs import distembed as run_directly

pytestmark = pytest.mark.timeout(280)


@pytest.fixture
def config(tmp_path: Path, dataset: Path) -> Path:
    """A compositional DLRM whose steps take some milliseconds."""
    values = config_values(dataset)
    values["train"] |= {"batch_size": 32, "epochs": 8, "log_every": 10, "checkpoint_every": 50}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    return tmp_path / "config.yaml"


@pytest.fixture
def here(slurm: MiniSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MiniSlurm]:
    monkeypatch.chdir(tmp_path)
    for name, value in (("OMP_NUM_THREADS", "1"), ("GLOO_SOCKET_IFNAME", "lo")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("distembed.launch.schedulers.slurm.states.ASK_SECONDS", 0.3)
    yield slurm


def distembed(*arguments: object, code: int = 0) -> str:
    """What the command prints, errors too."""
    done = in_this_process(*arguments, code=code)
    return done.stdout + done.stderr


def launch(config: Path, run: str, *arguments: object, code: int = 0) -> str:
    # all nodes are this machine, and so are those of other tests
    node = ["--cpus", 1, "--memory-mb", 2000]
    return distembed("launch", config, "-s", "slurm", "--run-dir", run, *node, *arguments, code=code)


def metrics_of(run: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(Path(run, "evaluation.json").read_text())
    return {name: value for name, value in values.items() if name != "seconds"}


def steps(run: str) -> int:
    try:
        return int(json.loads(Path(run, "metrics.jsonl").read_text().splitlines()[-1])["step"])
    except (OSError, IndexError, ValueError):
        return 0


def workers(run: str) -> list[int]:
    """Ranks that train into a run folder."""
    found = processes(Path(run).absolute()).items()
    return [pid for pid, words in found if "distembed.launch.nodes.run" not in words and "bash" not in words[0]]


def status(run: str) -> str:
    return distembed("status", run).splitlines()[0]


@pytest.mark.thorough
def test_refusals_and_dry_runs_submit_nothing(here: MiniSlurm, config: Path) -> None:
    queued = ["squeue", "--noheader", "--states=all", "--format=%i"]
    before = subprocess.run(queued, capture_output=True, text=True).stdout
    no_partition = "the partition 'gpu' is not there, or has no nodes (-o partition=NAME; there are debug"
    too_few = "has 2 node(s) of 1 CPUs, 2000 MB and 0 GPUs or more that are up, and the job needs 5"
    large = ["embedding.tables.C2={embedding_dim: 8}", "train.batch_size=90000000"]
    for arguments, found in (
        (["-j", "5x1", "train.checkpoint_dir=/proc/none"], [too_few, "nothing can be written to /proc/none"]),
        (["-j", "2x1", "-o", "partition=gpu", *large], [no_partition, "does not fit 2 x 1"]),
    ):
        output = launch(config, "run", *arguments, code=3)
        for said in (*found, "nothing was submitted"):
            assert said in output and "Traceback" not in output, output
    output = launch(config, "run", "data.path=none", code=2)
    assert "none" in output
    for arguments, said in ((["-j", "0x1"], "start at 1"), (["-o", "colour=red"], "no option 'colour'")):
        assert said in launch(config, "run", *arguments, code=2)
    output = launch(config, "run", "-j", "2x1", "--dry-run")
    assert "#SBATCH --nodes=2" in output and "distembed.launch.nodes.run" in output and "plan: 4 " in output
    assert not Path("run").exists()
    assert subprocess.run(queued, capture_output=True, text=True).stdout == before


def undisturbed(config: Path, *overrides: str) -> dict[str, Any]:
    """Metrics of the same training on two ranks of one machine, without Slurm and without interruption."""
    folder = Path("undisturbed").absolute()  # the processes that are kept for commands have another current folder
    run_directly("train", config, "train.checkpoint_every=0", *overrides, "--run-dir", folder, ranks=2)
    return metrics_of("undisturbed")


@pytest.mark.slow
def test_a_cancelled_run_has_saved_and_goes_on(here: MiniSlurm, config: Path) -> None:
    output = launch(config, "run", "-j", "2x1", "train.epochs=2000", "--detach")
    assert "ok     plan: fits 2 x 1 cpu" in output and "ok     partition: debug: 2 node(s)" in output
    assert "ok     submission: to start at " in output
    wait_until(lambda: steps("run") >= 50, "it does not train")
    assert "running" in status("run")
    assert "cancel it first" in distembed("resume", "run", code=2)
    distembed("cancel", "run")
    wait_until(lambda: "cancelled" in status("run"), "it is not cancelled")
    wait_until(lambda: not workers("run"), "processes are left")
    assert json.loads(Path("run/run.json").read_text())["status"] == "interrupted"
    stopped = max(int(path.name.split("-")[1]) for path in Path("run/checkpoints").glob("step-*"))
    assert "holds a run already" in launch(config, "run", code=2)
    distembed("resume", "run", "--detach")
    wait_until(lambda: steps("run") > stopped, "it does not go on")
    assert f"resuming at step {stopped} " in distembed("logs", "run")
    distembed("cancel", "run")
    wait_until(lambda: "cancelled" in status("run"), "it is not cancelled")


@pytest.mark.slurm
def test_a_mistake_that_shows_on_the_nodes_only_is_told_once_and_not_tried_again(
    here: MiniSlurm, config: Path, tmp_path: Path
) -> None:
    """The dataset is there where the job is submitted, and gone when it starts."""
    (tmp_path / "moving").symlink_to(yaml.safe_load(config.read_text())["data"]["path"])
    moving = f"data.path={tmp_path}/moving"
    launch(config, "run", moving, "-j", "2x1", "--max-retries", 3, "-o", "sbatch=--hold", "--detach")
    (tmp_path / "moving").unlink()
    subprocess.run(["scontrol", "release", load_job("run").app_id], check=True)
    wait_until(lambda: "failed" in status("run"), "it does not end")
    output = distembed("logs", "run")
    assert output.count(f"{tmp_path}/moving") == 1 and "would not mend it" in output, output
    said = Path(f"run/launch/logs/slurm-{load_job('run').app_id}.out")
    assert said.read_text().count(", start ") == 1 and "no retry" in said.read_text()
    assert len(list(Path("run/launch/logs").rglob("attempt_*"))) == 2  # one on each node


@pytest.mark.slurm
def test_a_job_whose_submitter_was_killed_is_found_again(
    here: MiniSlurm, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies when Slurm has taken the job, and has not noted the number of it."""
    real = shutil.which("sbatch")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text(
        f'#!/bin/bash\n[[ " $* " != *" --test-only "* ]] || exec {real} "$@"\n{real} "$@"\nkill -KILL $PPID\n'
    )
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    command = ["launch", config, "-s", "slurm", "-j", "2x1", "--run-dir", "run", "--cpus", 1, "--memory-mb", 2000]
    killed = subprocess.run(
        [sys.executable, "-m", "distembed", *map(str, command), "--detach", "train.epochs=2000"],
        env={**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert killed.returncode == -signal.SIGKILL, killed
    assert [one.handle for one in load_job("run").submissions] == [""]
    assert "cancel it first" in distembed("resume", "run", code=2)
    (queued,) = subprocess.run(["squeue", "-h", "-o", "%i"], capture_output=True, text=True).stdout.split()
    assert load_job("run").handle == f"slurm://torchx/{queued}"
    distembed("cancel", "run")
    wait_until(lambda: "cancelled" in status("run"), "it is not cancelled")


@pytest.mark.slurm
def test_a_job_that_is_run_twice_does_no_harm(here: MiniSlurm, config: Path) -> None:
    launch(config, "run", "-j", "1x2", "--detach")
    with get_runner() as runner:
        load_job("run").submit(runner)
        first, second = (submission.handle for submission in load_job("run").submissions)
        wait_until(lambda: all(runner.status(job).is_terminal() for job in (first, second)), "they do not end")
        assert {runner.status(job).state for job in (first, second)} == {AppState.SUCCEEDED}
    assert metrics_of("run") == undisturbed(config)
    trained = [line["step"] for line in map(json.loads, Path("run/metrics.jsonl").open()) if line["kind"] == "train"]
    assert trained == sorted(set(trained)) and trained[-1] == 488


@pytest.mark.slurm
def test_a_job_whose_node_dies_is_queued_again_and_ends_as_if_nothing_had_happened(
    here: MiniSlurm, config: Path
) -> None:
    launch(config, "run", "-j", "2x1", "--detach")
    wait_until(lambda: steps("run") >= 100, "it does not train")
    here.kill_node("mini2")
    wait_until(lambda: "pending" in status("run"), "it is not queued again")
    here.start_node("mini2")
    wait_until(lambda: "succeeded" in status("run"), "it does not go on", seconds=200)
    assert "resuming at step" in distembed("logs", "run")
    assert metrics_of("run") == undisturbed(config)


@pytest.mark.slurm
@pytest.mark.parametrize("node", ["mini1", "mini2"])
def test_an_elastic_job_goes_on_with_the_node_that_is_left(here: MiniSlurm, config: Path, node: str) -> None:
    """The first node takes the batch script with it: the job is queued again, and starts on the other."""
    launch(config, "run", "-j", "1:2x1", "train.epochs=16", "--detach")
    wait_until(lambda: steps("run") >= 100, "it does not train")
    here.kill_node(node)
    try:
        wait_until(lambda: "succeeded" in status("run"), "it does not go on", seconds=240)
    finally:
        here.start_node(node)
    output = distembed("logs", "run")
    assert "on 2 x cpu" in output and "on 1 x cpu" in output
    found, expected = metrics_of("run"), undisturbed(config, "train.epochs=16")
    assert found["samples"] == expected["samples"] == 16 * ROWS["train"]
    # one rank sums in another order than two
    assert found["logloss"] == pytest.approx(expected["logloss"], rel=1e-5)
    assert found["auc"] == pytest.approx(expected["auc"], rel=1e-5)
