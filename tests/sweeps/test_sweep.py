"""Whole sweeps of the command: runs that are those of `train`, go on after any end, and are checked beforehand."""

import importlib
import json
import os
import re
import signal
import sys
import time
from multiprocessing import current_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from distembed.base.errors import Interrupted, UserError
from distembed.checkpoints.store import checkpoint_place, newest_checkpoint
from distembed.training.run_folder.lock import owned
from distembed.training.run_folder.record import RunInfo
from distembed.training.sweeps import train
from distembed.training.sweeps.sweep import Sweep, given_runs, plan_sweep
from distembed.training.sweeps.train import train_sweep
from tests.processes import start_processes
from tests.robustness.checkpoint_numbers import saved_numbers
from tests.small_runs import call, run_command
from tests.training.test_runs import wait_for_steps

TIMES = {"seconds", "samples_per_second"}
RATES = "train.dense_optimizer.learning_rate"


def run_sweep(rank: int, arguments: tuple[object, ...], folder: Path) -> None:
    current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # else it may not start processes
    run_command(rank, arguments, folder)


def launch(config: Path, folder: Path, *settings: object) -> BaseProcess:
    """Starts a sweep in a process that has loaded torch already; its output goes to files beside the config."""
    for name in ("output", "errors"):
        (config.parent / name).unlink(missing_ok=True)
    arguments = ("sweep", config, *settings, "--run-dir", folder)
    (process,) = start_processes(1, run_sweep, arguments, config.parent).processes
    return process


def end(process: BaseProcess, config: Path, code: int = 0) -> str:
    """Waits for the end of a sweep and returns its output."""
    process.join()
    output = "".join((config.parent / name).read_text() for name in ("output", "errors"))
    assert process.exitcode == code, output
    assert "Traceback" not in output
    return output


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics without what depends on the machine's speed."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def status(folder: Path) -> dict[str, str]:
    return {name: run["status"] for name, run in json.loads((folder / "sweep.json").read_text())["runs"].items()}


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.thorough
def test_an_interrupted_sweep_goes_on_and_its_runs_are_those_of_train(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    settings = ["train.seed=0,1", f"{RATES}=0.1,0.05", "train.max_steps=30", "--baseline", "learning_rate=0.1"]
    process = launch(config, folder, *settings)
    first = folder / "learning_rate=0.1,seed=0"
    wait_for_steps(first, process, 5)
    os.kill(process.pid or 0, signal.SIGINT)
    assert "interrupted with 0 of 4 runs finished" in end(process, config, code=75)
    assert status(folder)["learning_rate=0.1,seed=0"] == "interrupted"
    assert list(status(folder).values()).count("waiting") == 3
    listed = call("sweep", config, *settings, "--run-dir", folder, "--dry-run")
    assert "learning_rate=0.1,seed=0  resumed" in listed and "4 runs: 3 new, 1 resumed" in listed

    output = end(launch(config, folder, *settings, "--workers", "2"), config)
    assert "resuming learning_rate=0.1,seed=0" in output and output.count("training learning_rate") == 3
    assert set(status(folder).values()) == {"finished"} and len(status(folder)) == 4
    own, alone = folder / "learning_rate=0.05,seed=1", tmp_path / "alone"
    call("train", config, "train.seed=1", f"{RATES}=0.05", "train.max_steps=30", "--run-dir", alone)
    assert metrics(own) == metrics(alone)
    numbers, expected = (saved_numbers(newest_checkpoint(run)) for run in (own, alone))
    assert numbers.keys() == expected.keys() and all(numbers[name].equal(expected[name]) for name in expected)
    # best first, seeds together, and the means beside a baseline
    runs = [line.split()[0] for line in output.splitlines() if line.endswith(" finished") and line.startswith("learn")]
    means = {rate: mean_auc(folder, rate) for rate in (0.1, 0.05)}
    best, other = sorted(means, key=means.__getitem__, reverse=True)
    assert runs == [f"learning_rate={rate},seed={seed}" for rate in (best, other) for seed in (0, 1)]
    assert "Differences are to learning_rate=0.1" in output and (folder / "report.html").exists()

    before = (folder / "report.html").read_bytes()
    again = call("sweep", config, *settings, "--run-dir", folder)
    assert "training learning_rate" not in again and "resuming" not in again
    assert (folder / "report.html").read_bytes() == before


def mean_auc(folder: Path, rate: float) -> float:
    found = [json.loads((folder / f"learning_rate={rate},seed={s}" / "evaluation.json").read_text()) for s in (0, 1)]
    return sum(evaluation["auc"] for evaluation in found) / 2


@pytest.mark.thorough
def test_a_run_that_fails_or_dies_does_not_end_the_sweep(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    process = launch(config, folder, f"{RATES}=0.1,1e30,0.05", "train.max_steps=62")
    wait_for_steps(folder / "learning_rate=0.1", process, 3)
    (worker,) = children(process.pid or 0)
    os.kill(worker, signal.SIGKILL)
    output = end(process, config, code=1)
    found = json.loads((folder / "sweep.json").read_text())["runs"]
    assert found["learning_rate=0.1"]["error"] == "its process ended with signal SIGKILL"
    assert "The loss is" in found["learning_rate=1e+30"]["error"]
    assert list(status(folder).values()) == ["failed", "failed", "finished"]
    assert "2 of 3 runs did not finish" in output
    assert json.loads((folder / "learning_rate=1e+30" / "run.json").read_text())["status"] == "failed"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["train.seed=0,-1", f"{RATES}=0.1,0.2"], "learning_rate=0.1,seed=-1, learning_rate=0.2,seed=-1: 1 mistake"),
        (["train.sed=0,1"], "did you mean train.seed?"),
        (["data.path=nowhere,neither"], "path=nowhere: "),
        (["data.test=test,tset"], "data.test is 'tset'"),
        (["train.seed=0,1", "--baseline", "seed=2"], "--baseline is 'seed=2', which is not known"),
    ],
)
def test_mistakes_are_told_before_anything_is_started(
    config: Path, tmp_path: Path, settings: list[str], said: str
) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        call("sweep", config, *settings, "--run-dir", tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    ("checkpoint_dir", "expected"),
    [
        (None, "{folder}/{name}/checkpoints"),
        ("kept", "{folder}/{name}/kept"),
        ("../kept", "{folder}/kept/{name}"),
        ("/elsewhere/", "/elsewhere/{name}"),
        ("s3://bucket/kept", "s3://bucket/kept/{name}"),
    ],
)
def test_every_run_has_checkpoints_of_its_own(
    config: Path, tmp_path: Path, checkpoint_dir: str | None, expected: str
) -> None:
    settings = ["train.seed=0,1", *([] if checkpoint_dir is None else [f"train.checkpoint_dir={checkpoint_dir}"])]
    for run in plan_sweep(config, settings, tmp_path / "sweep"):
        place = checkpoint_place(run.folder, run.config.train.checkpoint_dir)
        known = place if "://" in place else os.path.normpath(place)
        assert known == expected.format(folder=tmp_path / "sweep", name=run.name)


def test_a_sweep_is_no_run_on_several_ranks(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="this is one of 2 ranks"):
        plan_sweep(config, ["train.seed=0,1"], tmp_path / "sweep")


@pytest.mark.thorough
def test_what_only_building_a_model_finds_out_is_told_before_the_first_run(config: Path, tmp_path: Path) -> None:
    output = end(launch(config, tmp_path / "sweep", "train.sparse_optimizer.name=sgd,adam"), config, code=2)
    assert "name=adam: " in output and "CUDA only" in output
    assert not list((tmp_path / "sweep").glob("*/config.yaml"))


def test_a_models_own_exception_is_listed_with_its_run(config: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def fail(*given: Any) -> None:
        raise KeyError("width")

    monkeypatch.setattr("distembed.training.build.Blueprint.build_plannable", fail)
    runs = plan_sweep(config, ["train.seed=1,2"], tmp_path / "sweep")
    with pytest.raises(UserError, match=r"seed=1: KeyError: 'width'"):
        train_sweep(Sweep(config, [], tmp_path / "sweep", runs), 1, print)
    plan_sweep(config, ["train.seed=1,2"], tmp_path / "sweep")  # the folder is that of a sweep


def test_a_signal_ends_the_check_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_for_long(runs: Any, log: Path, sender: Any) -> None:
        train._be_forked(log)
        time.sleep(200)

    monkeypatch.setattr(train, "_send_mistakes", check_for_long)
    with train._Processes(1) as processes, pytest.raises(Interrupted, match="before the first run"):
        Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        processes.check([], tmp_path / "log")


def test_other_folders_are_left_alone(config: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(UserError, match=r"other files and no sweep \(thesis.tex\)"):
        call("sweep", config, "train.seed=0,1", "--run-dir", tmp_path / "mine")
    call("sweep", config, "train.seed=0,1", "--run-dir", tmp_path / "new", "--dry-run")
    assert not (tmp_path / "new").exists()


@pytest.mark.thorough
def test_tpe_trains_so_many_runs_and_prunes_bad_ones(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    bad = "1e-9,2e-9,3e-9,4e-9,5e-9"
    settings = [f"{RATES}=0.1,0.2,0.3,0.4,0.5,0.6,{bad}", "train.sparse_optimizer.learning_rate=1.0,1e-9"]
    settings += ["train.max_steps=4", "train.evaluate_every=2", "--sampler", "tpe", "--trials", "7", "--prune"]
    output = end(launch(config, folder, *settings), config)
    ended = status(folder)
    assert len(ended) == 7 and set(ended.values()) == {"finished", "pruned"}, output
    pruned = [name for name, how in ended.items() if how == "pruned"]
    assert all("pruned after step 2" in (folder / name / "run.json").read_text() for name in pruned)
    assert {name: RunInfo.read(folder / name / "run.json").status for name in ended} == ended
    call("sweep", config, *settings, "--run-dir", folder)  # does nothing
    assert status(folder) == ended


def test_a_sweep_that_another_process_trains_is_left_alone(config: Path, tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").write_text("theirs")
    with owned(tmp_path / "sweep"), pytest.raises(UserError, match="in use by another process"):
        call("sweep", config, "train.seed=0,1", "--run-dir", tmp_path / "sweep")
    assert (tmp_path / "sweep" / "sweep.json").read_text() == "theirs"


def test_random_draws_the_same_runs_every_time_and_more_for_a_higher_number(config: Path, tmp_path: Path) -> None:
    settings = ["train.seed=0,1,2,3,4", f"{RATES}=0.1,0.2,0.3"]
    drawn = [[run.name for run in plan_sweep(config, settings, tmp_path, "random", n)] for n in (2, 2, 5)]
    assert len(set(drawn[2])) == 5 and drawn[0] == drawn[1] == drawn[2][:2]
    for sampler, trials in (("random", None), ("tpe", None), ("grid", 3)):
        with pytest.raises(UserError, match="--trials"):
            plan_sweep(config, settings, tmp_path, sampler, trials)


def test_without_optuna_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.delitem(sys.modules, "distembed.training.sweeps.train", raising=False)
    with pytest.raises(UserError, match=re.escape("pip install 'distembed[sweep]'")):
        importlib.import_module("distembed.training.sweeps.train")


def make_sweep(folder: Path, names: list[str]) -> list[Path]:
    (folder / "logs").mkdir(parents=True)
    for file in ("sweep.json", "report.html"):
        (folder / file).write_text("{}")
    for name in names:
        (folder / name).mkdir()
        for file in ("run.json", "config.yaml"):
            (folder / name / file).write_text("{}")
    return [folder / name for name in names]


@pytest.mark.parametrize("names", [["seed=0"], ["rate=1,seed=0", "rate=1,seed=1", "rate=2,seed=0"]])
def test_a_sweep_is_its_runs(tmp_path: Path, names: list[str]) -> None:
    runs = make_sweep(tmp_path / "sweep", names)
    assert given_runs([tmp_path / "sweep"]) == runs
    assert given_runs(sorted((tmp_path / "sweep").iterdir())) == runs


def test_what_is_no_sweeps_own_is_left_to_be_refused(tmp_path: Path) -> None:
    make_sweep(tmp_path / "sweep", [])
    others = [tmp_path / "logs", tmp_path / "sweep" / "notes"]
    assert given_runs(others) == others
    with pytest.raises(UserError, match="none of whose runs has begun"):
        given_runs([tmp_path / "sweep"])
