"""Whole runs of each click model over the vectors of all features: ranks, resuming, plans and exports."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml

from distembed.data.dataset.schema import CategoricalFeature
from distembed.models import MODELS
from distembed.models.config import FeatureVectorConfig
from tests.small_runs import call, config_values, distembed, losses, stopped_at, write_dataset

MODEL_SETTINGS = {
    "dcnv2": "rank: 8, structure: stacked, deep: [16]",
    "gdcn": "num_cross_layers: 2, deep: [16]",
    "deepfm": "deep: [16]",
    "finalmlp": "first: {sizes: [16], gated_by: [C1, M]}, second: {sizes: [8]}, gate: [8], num_heads: 2",
    "din": "attention: [8], deep: [16]",
}
MORE_SETTINGS = [
    ("din", "history: transformer, deep: [16]"),
    ("din", "history: {H: mean}, history_length: {H: 3}, deep: [16]"),
    ("dlrm", "dense: both, soft_one_hot: {value_range: [-2, 2]}, bottom: [16], top: [16]"),
]


def with_history(split: str, table: pa.Table) -> pa.Table:
    """Adds a list of ids of C2's table to each row, and a list of as many numbers; some numbers are missing."""
    rng = np.random.default_rng(len(split))
    lists = [rng.integers(0, 400, rng.integers(0, 5)).tolist() for _ in range(len(table))]
    numbers = [[None if rng.random() < 0.1 else float(rng.normal()) for _ in ids] for ids in lists]
    is_missing = rng.random(len(table)) < 0.3
    table = table.set_column(1, "I1", pa.array(table["I1"].to_numpy(), mask=is_missing))
    table = table.append_column("H", pa.array(lists, pa.list_(pa.int32())))
    return table.append_column("G", pa.array(numbers, pa.list_(pa.float32())))


@pytest.fixture(scope="module")
def config_with_history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("history")
    history = CategoricalFeature("H", 400, True, 2.0, table="C2")
    numbers: dict[str, Any] = {"dense_sequences": ("G",), "beside": ("H",), "missing_dense": True}
    dataset = write_dataset(folder / "dataset", change=with_history, more=[history], **numbers)
    values = config_values(dataset)
    values |= {"sse": {"default": {"p0": 0.05}}}
    del values["model"]
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    return folder / "config.yaml"


def test_every_model_is_trained() -> None:
    of_one_label = [
        name for name, kind in MODELS.items() if issubclass(kind, FeatureVectorConfig) and kind.returns == "logits"
    ]
    assert set(MODEL_SETTINGS) == set(of_one_label)


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize(("name", "model_settings"), [*MODEL_SETTINGS.items(), *MORE_SETTINGS])
def test_two_ranks_train_as_one_and_a_resumed_run_as_an_uninterrupted_one(
    name: str, model_settings: str, config_with_history: Path, tmp_path: Path
) -> None:
    one, two, resumed = (tmp_path / run for run in ("one", "two", "resumed"))
    model = f"model={{name: {name}, {model_settings}}}"
    settings = (config_with_history, model, "train.max_steps=8", "train.checkpoint_every=3")
    call("train", *settings, "--run-dir", one)
    # draws of SSE depend on the rank, so two ranks are compared without it
    call("train", *settings, "sse.default.p0=0", "--run-dir", tmp_path / "no_sse")
    distembed("train", *settings, "sse.default.p0=0", "--run-dir", two, ranks=2)
    assert losses(two) == pytest.approx(losses(tmp_path / "no_sse"), rel=1e-5)
    assert losses(one) != losses(tmp_path / "no_sse")
    call("train", *settings, "--run-dir", stopped_at(3, one, resumed), "--resume")
    assert losses(resumed) == losses(one)
    plan = json.loads(call("plan", *settings[:3], "--nodes", "1", "--gpus", "2", "--gpu", "a100-40gb", "--json"))
    assert len(plan["ranks"]) == 2


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("finalmlp", ""),
        ("din", ""),
        ("din", ", history: transformer, history_length: 3"),
        ("din", ", history: mean, history_length: 2"),
        ("din", ", side_features: false"),
    ],
)
def test_exported_models_predict_as_the_run_does(
    name: str, more: str, config_with_history: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    model = f"model={{name: {name}, {MODEL_SETTINGS[name]}{more}}}"
    call("train", config_with_history, model, "train.max_steps=3", "--run-dir", run)
    call("export", run, "--output", tmp_path / "model", *["--compile"] * ("length" in more))
    parity = json.loads((tmp_path / "model" / "manifest.json").read_text())["parity"]
    assert parity["rows"] > 0
    assert parity["largest_difference"] < 1e-6
    assert parity["exported"] == pytest.approx(parity["trained"], abs=1e-6)
