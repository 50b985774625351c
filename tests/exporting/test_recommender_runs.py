"""Runs that recommend items, exported: against the run's own predictions and metrics; and what a check finds."""

import contextlib
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import distembed
from distembed.base.errors import RunError, UserError
from distembed.data.dataset.schema import ITEM
from distembed.serving.export.export_run import ExportOptions, export_run, exportable
from distembed.serving.export.parity import RecommendedCheck, SplitRows, require_close_metric
from distembed.serving.export.table_groups import ExportStorage
from distembed.serving.model_folder.manifest import ExportManifest
from distembed.serving.model_folder.programs import Program, load_programs
from distembed.serving.model_folder.reading import read_manifest, require_sample, require_unchanged
from distembed.serving.whole_model import load_whole_model
from distembed.training.trained_run import find_trained_run
from tests.serving.test_recommender_rows import session_datasets, session_run
from tests.small_runs import call
from tests.training.test_recommenders import write_config

BEST = 10


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs by their kinds; the model of sequences has a table of its own for outputs."""
    datasets = session_datasets(tmp_path_factory)
    folder = tmp_path_factory.mktemp("untied")
    untied = {"model": {"name": "sasrec", "dropout": 0.0, "tied": False}}
    call("train", write_config(folder / "untied.yaml", "softmax", datasets, **untied), "--run-dir", folder / "run")
    return {
        "ranking": session_run(tmp_path_factory, "ranking"),
        "softmax": folder / "run",
        "ratings": datasets["ratings"],
    }


def export(run: Path, output: Path, **options: Any) -> ExportManifest:
    return export_run(find_trained_run(run, None), output, ExportOptions(**options))


def values(folder: Path, manifest: ExportManifest, feature: str) -> list[str]:
    """Returns the raw values of a feature by their ids, as whoever has the folder alone reads them."""
    file = next(each.vocabulary for each in manifest.features if each.name == feature)
    assert file is not None
    return ["", "", *map(json.loads, (folder / file).read_text().splitlines())]


def recommend(program: Program, lists: list[list[list[int]]]) -> Any:
    """Returns items and scores of rows, of which each feature has a list of ids."""
    flat = [each for feature in lists for row in feature for each in row]
    lengths = torch.tensor([[len(row) for row in feature] for feature in lists])
    with torch.inference_mode():
        return program(torch.tensor(flat, dtype=torch.int64), lengths)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["softmax", pytest.param("binary", marks=pytest.mark.slow)])
def test_exported_sequences_get_the_items_that_the_run_predicts(
    runs: dict[str, Path], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    run = runs.get(kind) or session_run(tmp_path_factory, kind)
    manifest = export(run, tmp_path / "model", materialise="always")
    assert read_manifest(tmp_path / "model").recommends == manifest.recommends
    require_unchanged(tmp_path / "model", manifest)
    assert {table.form for table in manifest.tables} == {"materialised"}
    assert manifest.network.outputs == ("items", "scores") and manifest.recommends is not None
    assert (manifest.recommends.feature, manifest.recommends.num_best) == (ITEM, BEST)
    assert manifest.parity.metric == "ndcg@10"
    model = distembed.load(run)
    assert manifest.parity.trained == pytest.approx(model.evaluate("test")["ndcg@10"], abs=1e-6)
    assert manifest.parity.exported == pytest.approx(manifest.parity.trained, abs=1e-6)
    items, program = values(tmp_path / "model", manifest, ITEM), load_programs(tmp_path / "model", manifest)
    assert require_sample(tmp_path / "model", manifest, program) < 1e-6
    ids = [[3], [7, 2, 9], list(range(2, 21))]
    predicted = model.predict([{"item": [items[each] for each in row]} for row in ids])
    found, scores = recommend(program, [ids])
    for row, own in enumerate(found.tolist()):
        assert [items[each] for each in own] == [predicted[f"item_{place}"][row].as_py() for place in range(1, 11)]
        expected = [predicted[f"score_{place}"][row].as_py() for place in range(1, 11)]
        np.testing.assert_allclose(scores[row], expected, rtol=1e-6, atol=1e-6)


def test_tables_are_not_divided(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="more than --server-memory, and those of a model that recommends items are"):
        export(runs["ranking"], tmp_path / "model", server_bytes=100)
    assert not (tmp_path / "model").exists()


def check_of(run: Path) -> tuple[RecommendedCheck, SplitRows]:
    """Returns the check of a run's program, and the rows to check it on."""
    found = find_trained_run(run, None)
    whole = load_whole_model(found, torch.device("cpu"))
    model: Any = exportable(whole, found.manifest, BEST)
    rows = SplitRows.find(found.config.data.require_path())
    assert rows is not None
    return RecommendedCheck(whole, model, model.whole_program(ExportStorage()), "fp32"), rows


@pytest.mark.parametrize("kind", ["ranking", "softmax"])
def test_other_items_or_scores_are_found(runs: dict[str, Path], kind: str) -> None:
    check, rows = check_of(runs[kind])
    assert check.on_sample(check.sample(rows, 20)).largest_difference < 1e-5
    assert check.on_sample(check.sample(None, 20)).rows == 20
    metric, exported, trained = check.on_split(rows, 1000)
    assert metric == "ndcg@10" and exported == trained > 0
    changes: list[Any] = [
        lambda items, scores: (items.roll(1, 0), scores),
        lambda items, scores: (items.flip(1), scores),
        lambda items, scores: (items, scores * 1.0001 + 1e-4),
        lambda items, scores: (torch.full_like(items, 5), scores),
        lambda items, scores: (items, scores.index_fill(1, torch.tensor([3]), torch.nan)),
        lambda items, scores: (items, scores.index_fill(1, torch.tensor([9]), -torch.inf)),
    ]
    program = check.program
    for change in changes:
        wrong = dataclasses.replace(check, program=lambda *inputs, own=change: own(*program(*inputs)))
        with pytest.raises(RunError, match="recommends otherwise than the trained one|are no numbers"):
            wrong.on_sample(wrong.sample(rows, 20))
    wrong = dataclasses.replace(check, program=lambda *inputs: tuple(each.roll(1, 0) for each in program(*inputs)))
    with pytest.raises(RunError, match=r"NDCG@10 on test is \d.*, and the trained one's .* apart, so that nothing was"):
        wrong.on_split(rows, 1000)


@pytest.mark.parametrize(
    ("exported", "trained", "is_close"),
    [
        (0.5, 0.5004, True),
        (math.nan, math.nan, True),
        (math.nan, 0.5, False),
        (0.5, math.nan, False),
        (0.5, 0.6, False),
    ],
)
def test_a_metric_that_one_model_alone_has_is_another(exported: float, trained: float, is_close: bool) -> None:
    """Scores that are no numbers have no metric; that of rows of one class is not defined for either model."""
    with contextlib.nullcontext() if is_close else pytest.raises(RunError, match="nothing was written"):
        require_close_metric("AUC", "test", (exported, trained), "int8")
