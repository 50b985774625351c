"""Loggers of metrics: the numbers that services get, by stand-ins of their packages, and services that fail."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import yaml

from distembed.base.errors import UserError
from distembed.training.config import load_config
from tests.small_runs import call, metrics


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
