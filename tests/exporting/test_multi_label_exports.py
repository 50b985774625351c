"""A run on several labels, exported, loaded, served and compiled: each gives one number for each label of a row."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import distembed
from distembed.serving.model_folder.reading import read_manifest
from distembed.serving.server.app import ARROW_TYPE
from tests.in_process import in_this_process
from tests.server.asgi import post, served, stream
from tests.server.exported_models import exported, json_rows, trained_run
from tests.serving.arrow_rows import SCHEMA, draw_rows

LABELS = {
    "click": {"column": "click"},
    "cheap": {"column": "price", "at_least": 50},
    "stars": {"column": "rate", "kind": "number"},
}
NAMES = list(LABELS)
ROWS = 300


def train(folder: Path, **sections: Any) -> Path:
    schema = {name: value for name, value in SCHEMA.items() if name != "label"} | {"labels": LABELS}
    schema["dense"] = {"age": schema["dense"]["age"]}
    schema["categorical"] = {
        name: value for name, value in schema["categorical"].items() if value.get("column") != "price"
    }
    return trained_run(folder, schema, draw_rows(ROWS), **sections)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = {"name": "ple", "deep": [16], "tower": [8]}
    return train(tmp_path_factory.mktemp("labels"), task={"name": "multi"}, model=model)


@pytest.fixture(scope="module")
def model(run: Path) -> Path:
    return exported(run, run.parent / "model")


def columns(table: pa.Table) -> np.ndarray:
    assert table.column_names == NAMES
    return np.stack([table[name].to_numpy() for name in NAMES], axis=1)


@pytest.mark.thorough
def test_a_loaded_run_the_command_and_the_server_give_the_same_numbers(run: Path, model: Path, tmp_path: Path) -> None:
    rows = [{name: value for name, value in row.items() if name != "genres"} for row in json_rows(20, seed=3)]
    rows = [{**row, "genres": "g1|g2"} for row in rows]
    loaded = distembed.load(run)
    expected = columns(loaded.predict(rows))
    assert np.isfinite(expected).all() and (0 < expected[:, :2]).all() and (expected[:, :2] < 1).all()
    assert len(np.unique(expected[:, 2])) > 10  # numbers are no probabilities
    app = served(model)
    answer = post(app, {"rows": rows}).json()
    assert list(answer) == NAMES
    np.testing.assert_allclose(np.stack([answer[name] for name in NAMES], 1), expected, atol=2e-6)
    reply = post(app, stream(pa.Table.from_pylist(rows)), content_type=ARROW_TYPE)
    np.testing.assert_allclose(columns(pa.ipc.open_stream(reply.body).read_all()), expected, atol=2e-6)
    # a malformed row has null in each column, and the others keep theirs
    malformed = [*rows[:2], {**rows[0], "age": "old"}]
    answer = post(app, {"rows": malformed}, "?malformed=null").json()
    table = loaded.predict(malformed, malformed="null")
    for name in NAMES:
        assert answer[name][2] is None and table[name][2].as_py() is None
        np.testing.assert_allclose(answer[name][:2], table[name][:2].to_numpy(), atol=2e-6)
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "predictions.parquet"
    in_this_process("predict", run, "--input", lines, "--output", output)
    np.testing.assert_allclose(columns(pq.read_table(output)), expected, atol=1e-6)
    assert loaded.predict([]).num_rows == 0
    assert loaded.describe()["predicts"] == [*NAMES, *(f"{name}.label" for name in NAMES)]


@pytest.mark.thorough
def test_raw_rows_with_labels_are_evaluated(run: Path) -> None:
    loaded, rows = distembed.load(run), draw_rows(50, seed=5)
    metrics = loaded.evaluate(rows)
    predicted = columns(loaded.predict([{**row, "click": None} for row in rows]))
    stars = np.array([np.nan if row["rate"] is None else row["rate"] for row in rows])
    assert metrics["rows"] == 50 and metrics["stars.rows"] == np.count_nonzero(~np.isnan(stars))
    weights = np.array([row["importance"] for row in rows])
    is_there = ~np.isnan(stars)
    squared = np.average((predicted[:, 2] - stars)[is_there] ** 2, weights=weights[is_there])
    assert metrics["stars.rmse"] == pytest.approx(squared**0.5, rel=1e-5)
    assert loaded.evaluate("test") == json.loads(in_this_process("evaluate", run, "--json").stdout)


@pytest.mark.thorough
def test_the_exported_model_has_the_metric_of_the_trained_one_and_checks_itself(run: Path, model: Path) -> None:
    manifest = read_manifest(model)
    assert manifest.task == "multi" and list(manifest.network.outputs) == NAMES
    assert manifest.parity.metric == "click.auc" and manifest.parity.largest_difference < 1e-6
    assert manifest.parity.exported == pytest.approx(manifest.parity.trained, abs=1e-6)
    assert list(json.loads((model / "sample.json").read_text())["outputs"]) == NAMES
    subprocess.run([sys.executable, model / "serving_example.py"], check=True)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["mmoe", "esmm"])
def test_every_model_is_exported_and_served(name: str, tmp_path: Path) -> None:
    labels = {"click": {}, "cheap": {"after": "click"}}
    run = train(tmp_path, task={"name": "multi", "labels": labels}, model={"name": name, "deep": [16]})
    model = exported(run, tmp_path / "model")
    parity = read_manifest(model).parity
    assert parity.largest_difference < 1e-6 and parity.exported == pytest.approx(parity.trained, abs=1e-6)
    rows = json_rows(20, seed=3)
    expected = distembed.load(run).predict(rows)
    assert expected.column_names == ["click", "cheap"]
    answer = post(served(model), {"rows": rows}).json()
    for label in labels:
        np.testing.assert_allclose(answer[label], expected[label].to_numpy(), atol=2e-6)
    if name == "esmm":  # a conversion is no more probable than its click
        assert (np.array(answer["cheap"]) <= answer["click"]).all()


@pytest.mark.thorough
def test_shards_of_tables_give_the_numbers_of_one_program(run: Path, model: Path) -> None:
    shards = exported(run, run.parent / "shards", server_bytes=2000, materialise="never")
    assert len(read_manifest(shards).shards) > 1
    rows = json_rows(10)
    whole, divided = (post(served(folder), {"rows": rows}).json() for folder in (model, shards))
    for name in NAMES:
        np.testing.assert_allclose(divided[name], whole[name], atol=1e-6)
