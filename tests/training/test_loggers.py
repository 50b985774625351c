"""Loggers of metrics: the numbers that services get, by stand-ins of their packages, and services that fail."""

import json
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest
import yaml

from distembed.base.errors import UserError
from distembed.training.config import load_config
from distembed.training.loggers import _MOST_WAITING, LOGGERS, LoggedRun, Loggers, MetricsLogger
from distembed.training.run_folder.folder import RunFolder
from tests.small_runs import call, metrics


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distembed.training.loggers._PAUSES", (0, 0))


@contextmanager
def stand_in(name: str, **attributes: Any) -> Iterator[None]:
    """Puts a module with these attributes in the place of a package."""
    module = ModuleType(name)
    module.__dict__.update(attributes)
    module.__spec__ = SimpleNamespace(name=name, origin=f"{name}.py")  # type: ignore[assignment]
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before


class Wandb:
    """What a run sends to Weights & Biases."""

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.exit_codes: list[int] = []

    def init(self, **settings: Any) -> "Wandb":
        self.started.append(settings)
        return self

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.logged.append((step, numbers))

    def finish(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)


class MLflow:
    """What a run sends to MLflow, whose server ends after ``most`` batches of metrics."""

    def __init__(self, most: int) -> None:
        self.most, self.calls, self.batches = most, list[str](), list[list[Any]]()

    def __call__(self) -> "MLflow":
        return self

    def get_experiment_by_name(self, name: str) -> None:
        self.calls.append(name)

    def create_experiment(self, name: str) -> str:
        return f"id of {name}"

    def create_run(self, experiment_id: str, run_name: str) -> Any:
        self.calls.append(f"{run_name} in {experiment_id}")
        return SimpleNamespace(info=SimpleNamespace(run_id="run 7"))

    def update_run(self, run_id: str, status: str) -> None:
        self.calls.append(f"{run_id} {status}")

    def log_text(self, run_id: str, text: str, file: str) -> None:
        assert yaml.safe_load(text)["train"]["loggers"] == ["mlflow"] and file == "config.yaml"

    def log_batch(self, run_id: str, batch: list[Any]) -> None:
        if len(self.batches) == self.most:
            raise ConnectionError("the server has gone")
        self.batches.append(batch)

    def set_terminated(self, run_id: str, status: str) -> None:
        self.calls.append(f"{run_id} {status}")


def test_a_resumed_run_goes_on_under_its_id_at_weights_and_biases(config: Path, tmp_path: Path) -> None:
    run, wandb = tmp_path / "run", Wandb()
    with stand_in("wandb", init=wandb.init, Settings=dict):
        call("train", config, "train.loggers=[wandb]", "train.max_steps=3", "--run-dir", run)
        call("train", config, "train.loggers=[wandb]", "train.max_steps=5", "--run-dir", run, "--resume")
    first, second = wandb.started
    assert first["id"] == second["id"] == json.loads((run / "loggers.json").read_text())["wandb"]
    assert first["name"] == "run" and first["config"]["train"]["max_steps"] == 3 and first["resume"] == "allow"
    logged = {step: numbers["train/loss"] for step, numbers in wandb.logged if "train/loss" in numbers}
    assert logged == {line["step"]: line["loss"] for line in metrics(run, "train")}
    assert any("test/auc" in numbers for _, numbers in wandb.logged)
    assert wandb.exit_codes == [0, 0]
    assert not (run / "tensorboard").exists()


def test_a_service_that_fails_costs_a_warning(config: Path, tmp_path: Path) -> None:
    mlflow = MLflow(most=2)
    metric = lambda name, value, time, step: (name, value, step)  # noqa: E731
    failed = pytest.warns(UserWarning, match=r"mlflow failed and gets no more metrics.*the server has gone")
    with stand_in("mlflow", MlflowClient=mlflow, entities=SimpleNamespace(Metric=metric)), failed:
        call("train", config, "train.loggers=[mlflow]", "train.max_steps=4", "--run-dir", tmp_path / "run")
    assert mlflow.calls[:3] == ["distembed", "run in id of distembed", "run 7 RUNNING"]
    lines = metrics(tmp_path / "run", "train")
    assert len(lines) == 4
    losses = [(value, step) for batch in mlflow.batches for name, value, step in batch if name == "train/loss"]
    assert losses == [(line["loss"], line["step"]) for line in lines[:2]]


class Slow(MetricsLogger):
    """A service that takes no numbers before it may."""

    may_take: ClassVar[threading.Event]
    taken: ClassVar[list[tuple[int, dict[str, float]]]]
    ends: ClassVar[list[bool]]
    threads: ClassVar[set[str]]

    def __init__(self, run: LoggedRun) -> None:
        self.threads.add(threading.current_thread().name)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.threads.add(threading.current_thread().name)
        self.may_take.wait()
        self.taken.append((step, dict(numbers)))

    def close(self, is_finished: bool) -> None:
        self.threads.add(threading.current_thread().name)
        self.ends.append(is_finished)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> type[Slow]:
    # a class of its own, since a thread of an earlier test may still log
    made = type("Slow", (Slow,), {"may_take": threading.Event(), "taken": [], "ends": [], "threads": set()})
    monkeypatch.setitem(LOGGERS, "slow", made)
    return made


def logged(step: int) -> tuple[int, dict[str, float]]:
    return step, {"train/loss": 1 / step}


def test_lines_of_periods_are_in_metrics_jsonl_alone(slow: type[Slow], tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    slow.may_take.set()
    with run.open("data: {}\n", {}, 0, loggers=["slow"]):
        run.record("train", 1, {"loss": 1.0})
        run.record("period", 1, {"period": "2026-01-01", "rows": 3})
    assert slow.taken == [logged(1)]
    assert [line["rows"] for line in metrics(run.path, "period")] == [3]


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_slow_service_gets_all_numbers_in_order_from_another_thread(
    slow: type[Slow], tmp_path: Path, is_finished: bool
) -> None:
    loggers = Loggers(["slow"], LoggedRun(tmp_path, "", 0))
    for step in range(1, 6):
        loggers.log(*logged(step))
    assert slow.taken == [] and slow.ends == []  # none of the calls has waited
    slow.may_take.set()
    loggers.close(is_finished)
    assert slow.taken == [logged(step) for step in range(1, 6)] and slow.ends == [is_finished]
    assert slow.threads == {"distembed-slow"}


def test_a_full_queue_drops_the_oldest_numbers_with_one_warning(slow: type[Slow], tmp_path: Path) -> None:
    loggers, num_steps = Loggers(["slow"], LoggedRun(tmp_path, "", 0)), _MOST_WAITING + 50
    with pytest.warns(UserWarning, match="wait for slow; the oldest are dropped") as warned:
        for step in range(1, num_steps + 1):
            loggers.log(*logged(step))
    assert len(warned) == 1
    slow.may_take.set()
    loggers.close(True)
    steps = [step for step, _ in slow.taken]
    assert steps == sorted(set(steps)) and _MOST_WAITING - 2 <= len(steps) <= _MOST_WAITING + 1
    assert steps[2 - _MOST_WAITING :] == list(range(num_steps - _MOST_WAITING + 3, num_steps + 1))  # the newest
    assert slow.ends == [True]


def test_a_service_that_never_answers_delays_the_end_by_a_limit(slow: type[Slow], tmp_path: Path) -> None:
    loggers = Loggers(["slow"], LoggedRun(tmp_path, "", 0), most_seconds=0.01)
    loggers.log(*logged(1))
    with pytest.warns(UserWarning, match=r"slow has not taken all metrics within 0.01 s after the run's end"):
        loggers.close(True)
    assert slow.taken == []
    slow.may_take.set()


def test_a_slow_service_does_not_starve_another(
    slow: type[Slow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = type("Quick", (Slow,), {"may_take": threading.Event(), "taken": [], "ends": [], "threads": set()})
    monkeypatch.setitem(LOGGERS, "quick", quick)
    quick.may_take.set()
    loggers = Loggers(["slow", "quick"], LoggedRun(tmp_path, "", 0), most_seconds=0.5)
    for step in range(1, 4):
        loggers.log(*logged(step))
    with pytest.warns(UserWarning, match="slow has not taken all metrics"):
        loggers.close(True)
    for thread in threading.enumerate():
        if thread.name == "distembed-quick":
            thread.join()
    assert quick.taken == [logged(step) for step in range(1, 4)] and quick.ends == [True] and slow.taken == []
    slow.may_take.set()


class Failing(MetricsLogger):
    """A service that fails to take step 2 so many times."""

    num_failures: ClassVar[int]
    taken: ClassVar[list[tuple[int, dict[str, float]]]]

    def __init__(self, run: LoggedRun) -> None:
        self.taken.clear()

    def close(self, is_finished: bool) -> None:
        assert self.taken[-1] == logged(3)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if step == 2 and self.num_failures:
            type(self).num_failures -= 1
            raise ConnectionError("gone")
        self.taken.append((step, dict(numbers)))


@pytest.mark.parametrize("num_failures", [1, 2, 3])
def test_a_service_gets_all_numbers_unless_it_fails_three_times(
    num_failures: int, slow: type[Slow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow.may_take.set()
    made = type("Failing", (Failing,), {"num_failures": num_failures, "taken": []})
    monkeypatch.setitem(LOGGERS, "failing", made)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        loggers = Loggers(["failing", "slow", "tensorboard"], LoggedRun(tmp_path, "", 0))
        for step in range(1, 4):
            loggers.log(*logged(step))
        loggers.close(True)
    is_dropped = num_failures == 3
    assert made.taken == [logged(step) for step in range(1, 2 if is_dropped else 4)]
    assert [str(each.message) for each in warned] == is_dropped * [
        "failing failed and gets no more metrics of this run, which metrics.jsonl holds: gone"
    ]
    assert slow.taken == [logged(step) for step in range(1, 4)] and slow.ends == [True]
    assert list((tmp_path / "tensorboard").iterdir())


def test_services_that_start_at_once_keep_all_their_ids(tmp_path: Path) -> None:
    run, together = LoggedRun(tmp_path, "", 0), threading.Barrier(8)

    def make(name: str) -> str:
        together.wait()
        return f"id of {name}"

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda name: run.id_for(name, lambda: make(name)), "abcdefgh"))
    assert json.loads((tmp_path / "loggers.json").read_text()) == {name: f"id of {name}" for name in "abcdefgh"}
    assert run.id_for("a", lambda: "another") == "id of a"


def test_loggers_that_are_not_there_are_refused(config: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train.loggers.*'wand'.*Did you mean 'wandb'"):
        load_config(config, ["train.loggers=[wand]"])
    with pytest.raises(UserError, match="name each once"):
        load_config(config, ["train.loggers=[wandb,wandb]"])
    with mock.patch("importlib.util.find_spec", return_value=None), pytest.raises(UserError, match="not installed"):
        call("train", config, "train.loggers=[wandb]", "--run-dir", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_may_have_no_logger(config: Path, tmp_path: Path) -> None:
    call("train", config, "train.loggers=[]", "train.max_steps=2", "--run-dir", tmp_path / "run")
    assert len(metrics(tmp_path / "run", "train")) == 2
    assert not (tmp_path / "run" / "tensorboard").exists() and not (tmp_path / "run" / "loggers.json").exists()
