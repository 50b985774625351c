"""Whole runs on several labels with each of their models: ranks, resuming, plans, and metrics of what is predicted."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from sklearn.metrics import log_loss, roc_auc_score, root_mean_squared_error

import distembed as package
from distembed.data.dataset.schema import Label
from distembed.models import MODELS
from distembed.serving.model_folder.reading import read_manifest
from tests.server.exported_models import exported
from tests.small_runs import ROWS, call, config_values, distembed, losses, metrics, stopped_at, write_dataset

LABELS = (Label("click"), Label("stars", "number"), Label("buy"))
MODEL_SETTINGS = {
    "mmoe": "num_experts: 2, deep: [16], tower: [8]",
    "ple": "deep: [16], tower: [8], num_shared: 1, num_specific: 1",
    "esmm": "deep: [16]",
}
ESMM_LABELS = "task.labels={click: {}, buy: {after: click}}"


def with_labels(split: str, table: pa.Table) -> pa.Table:
    """Adds labels that depend on I1, of which some are missing: a purchase is known of clicked rows alone."""
    rng, rows = np.random.default_rng(len(split)), len(table)
    click, signal = table["label"].to_numpy(), table["I1"].to_numpy()
    stars = np.where(rng.random(rows) < 0.4, np.nan, 3 + signal + 0.1 * rng.normal(size=rows))
    buy = np.where(click == 1, signal + rng.normal(size=rows) > 0, np.nan)
    table = table.append_column("click", pa.array(click, pa.int8()))
    table = table.append_column("stars", pa.array(stars, pa.float32(), from_pandas=True))
    table = table.append_column("buy", pa.array(buy, pa.float32(), from_pandas=True))
    return table.append_column("importance", pa.array(rng.integers(0, 4, rows).astype(np.float32)))


def write_labelled(folder: Path) -> Path:
    return write_dataset(folder, change=with_labels, label=None, labels=LABELS, weight="importance")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("labels")
    values: dict[str, Any] = config_values(write_labelled(folder / "dataset"))
    values["train"] |= {"batch_size": 65}  # cannot be halved, and of the last batch's one row a rank has none
    values["train"]["dense_optimizer"]["learning_rate"] = 0.02
    values["train"]["sparse_optimizer"]["learning_rate"] = 0.2
    values |= {"sse": {"default": {"p0": 0.05}}, "task": {"name": "multi", "labels": {}}}
    del values["model"]
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    return folder / "config.yaml"


def logged(run: Path, kind: str = "train") -> list[dict[str, float]]:
    """Returns the step, the loss and the metrics of labels of each line."""
    return [
        {key: value for key, value in line.items() if "." in key or key in ("step", "loss")}
        for line in metrics(run, kind)
    ]


def model_settings(name: str) -> list[str]:
    return [f"model={{name: {name}, {MODEL_SETTINGS[name]}}}", *([ESMM_LABELS] if name == "esmm" else [])]


def test_every_model_is_trained() -> None:
    assert set(MODEL_SETTINGS) == {
        name for name, kind in MODELS.items() if getattr(kind, "returns", "") == "multi_logits"
    }


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("name", MODEL_SETTINGS)
def test_two_ranks_train_as_one_and_a_resumed_run_as_an_uninterrupted_one(
    name: str, config: Path, tmp_path: Path
) -> None:
    one, two, resumed, no_sse = (tmp_path / run for run in ("one", "two", "resumed", "no_sse"))
    settings = (config, *model_settings(name))
    # at the checkpoint the window of metrics has one of its two steps
    few = (*settings, "train.max_steps=8", "train.checkpoint_every=3", "train.log_every=2")
    call("train", *few, "--run-dir", one)
    # draws of SSE depend on the rank, so two ranks are compared without it, over the epoch with its last short batch
    call("train", *settings, "sse.default.p0=0", "--run-dir", no_sse)
    distembed("train", *settings, "sse.default.p0=0", "--run-dir", two, ranks=2)
    for kind in ("train", "eval"):
        for own, other in zip(metrics(no_sse, kind), metrics(two, kind), strict=True):
            assert own.keys() == other.keys()
            for key in (key for key in own if "." in key or key == "loss"):
                # an AUC that is not defined, of rows of equal labels, is null
                assert own[key] == (None if other[key] is None else pytest.approx(other[key], rel=1e-4))
    assert losses(one) != losses(no_sse)[1:8:2]
    call("train", *few, "--run-dir", stopped_at(3, one, resumed), "--resume")
    assert losses(resumed) == losses(one)
    assert logged(resumed) == logged(one)
    plan = json.loads(call("plan", *settings, "--nodes", "1", "--gpus", "2", "--gpu", "a100-40gb", "--json"))
    assert len(plan["ranks"]) == 2


@pytest.mark.thorough
def test_metrics_are_of_what_is_predicted(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    weights = "task.labels={click: {weight: 2.0}, stars: {weight: 0.5}, buy: {}}"
    call(
        *("train", config, *model_settings("mmoe"), weights, "task.headline=stars.rmse", "--run-dir", run),
        "train.dense_optimizer={name: adam, learning_rate: 0.01}",
        *("train.evaluate_every=10", "train.stop_after_evaluations=50", "train.epochs=4"),
    )
    found = json.loads((run / "evaluation.json").read_text())
    call("predict", run, "--output", tmp_path / "predictions.parquet")
    table = pq.read_table(tmp_path / "predictions.parquet")
    assert table.column_names == ["click", "stars", "buy", "click.label", "stars.label", "buy.label"]
    test = pq.read_table(config.parent / "dataset" / "test" / "part-0.parquet")
    weight = test["importance"].to_numpy()
    assert (found["rows"], found["weight"]) == (ROWS["test"], weight.sum())
    for label in LABELS:
        labels = test[label.name].to_pandas().to_numpy(np.float64)
        np.testing.assert_allclose(table[f"{label.name}.label"].to_numpy(), labels, rtol=1e-6)
        is_there = ~np.isnan(labels)
        known, predicted = labels[is_there], table[label.name].to_numpy()[is_there].astype(np.float64)
        share = {"sample_weight": weight[is_there]}
        assert found[f"{label.name}.rows"] == is_there.sum()
        if label.kind == "number":
            rmse = root_mean_squared_error(known, predicted, **share)
            assert found["stars.rmse"] == pytest.approx(rmse, rel=1e-5)
            assert rmse < 0.9 * np.std(known)  # it has learned
        else:
            assert found[f"{label.name}.auc"] == pytest.approx(roc_auc_score(known, predicted, **share), abs=1e-6)
            assert found[f"{label.name}.logloss"] == pytest.approx(log_loss(known, predicted, **share), rel=1e-5)
    recorded = json.loads((run / "run.json").read_text())
    assert recorded["metrics"][0]["name"] == "stars.rmse"
    assert recorded["best"]["value"] == min(line["stars.rmse"] for line in metrics(run, "eval")[:-1])
    assert "stars RMSE" in call("report", run, "--output", tmp_path / "report.html")
    assert f"click: logloss {found['click.logloss']:.4f}" in call("evaluate", run)


@pytest.mark.thorough
def test_a_run_of_one_of_the_labels_equals_a_run_on_that_label(config: Path, tmp_path: Path) -> None:
    """A shared bottom of one label is a network of that label, whatever other labels the rows have."""
    alone = write_dataset(tmp_path / "alone", change=with_labels, label="click", weight="importance")
    settings = ("model={name: mmoe, num_experts: 1, deep: [16], tower: [8]}", "train.max_steps=5")
    chosen, only = tmp_path / "chosen", tmp_path / "only"
    call("train", config, *settings, "task.labels={click: {}}", "--run-dir", chosen)
    call("train", config, *settings, f"data.path={alone}", "--run-dir", only)
    assert losses(chosen) == losses(only)
    assert all(math.isfinite(loss) for loss in losses(chosen))
    # other labels of another dataset do not matter
    more = write_dataset(
        tmp_path / "more", change=with_labels, label=None, labels=(Label("label"), *LABELS), weight="importance"
    )
    assert call("evaluate", chosen, "--data", more, "--json") == call("evaluate", chosen, "--json")


@pytest.mark.thorough
def test_the_runs_config_names_its_labels(config: Path, tmp_path: Path) -> None:
    """A label that another dataset has beside the run's is not learned, evaluated or exported by the run's commands."""
    run, few = tmp_path / "run", ("train.checkpoint_every=3", "train.max_steps=5")
    call("train", config, *model_settings("mmoe"), *few, "--run-dir", run)
    assert list(yaml.safe_load((run / "config.yaml").read_text())["task"]["labels"]) == ["click", "stars", "buy"]
    more = write_dataset(
        tmp_path / "more", change=with_labels, label=None, labels=(Label("label"), *LABELS), weight="importance"
    )
    assert call("evaluate", run, "--data", more, "--json") == call("evaluate", run, "--json")
    resumed = stopped_at(3, run, tmp_path / "resumed")
    call("train", config, *model_settings("mmoe"), *few, "--run-dir", resumed, "--resume")
    assert losses(resumed) == losses(run)
    subset, labels = tmp_path / "subset", "task.labels={buy: {weight: 2.0}, click: {}}"
    call("train", config, *model_settings("mmoe"), labels, *few, "--run-dir", subset)
    assert package.load(subset).evaluate("test").keys() == json.loads(call("evaluate", subset, "--json")).keys()
    model = exported(subset, tmp_path / "model")
    assert list(read_manifest(model).network.outputs) == ["click", "buy"]
