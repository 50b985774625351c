"""Exported runs of two towers: programs and the index against the loaded run, the server, and FAISS."""

import builtins
import json
import runpy
import signal
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import distembed
from distembed.base.errors import RunError, UserError
from distembed.serving.export.export_run import ExportOptions, export_run
from distembed.serving.model_folder.manifest import ExportManifest
from distembed.serving.model_folder.programs import load_program, load_programs
from distembed.serving.model_folder.reading import read_manifest, require_sample, require_unchanged
from distembed.serving.server.scoring import RowRequest, Scorer
from distembed.training.trained_run import find_trained_run
from tests.server.asgi import post, served
from tests.server.processes import serving
from tests.serving.test_two_towers import USER_COLUMNS, raw_rows, seen_films, trained
from tests.small_runs import call
from tests.tasks.retrieval_rows import NUM_ITEMS


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("towers"))


@pytest.fixture(scope="module")
def model(run: Path) -> Path:
    call("export", run, "--output", run.parent / "model", "--num-best", "7")
    return run.parent / "model"


def queries(run: Path) -> list[dict[str, Any]]:
    return [{name: row[name] for name in USER_COLUMNS} for row in raw_rows(run)[-9:]]


def test_the_network_recommends_as_the_run(run: Path, model: Path) -> None:
    manifest = read_manifest(model)
    require_unchanged(model, manifest)
    program = load_programs(model, manifest)
    assert require_sample(model, manifest, program) < 1e-6
    assert manifest.recommends is not None and manifest.recommends.num_best == 7
    assert manifest.parity.metric == "ndcg@7" and manifest.parity.exported is not None
    assert manifest.parity.exported == pytest.approx(manifest.parity.trained, abs=1e-6)
    assert [each.name for each in manifest.numbers] == ["age"]
    loaded, asked = distembed.load(run), queries(run)
    expected = loaded.recommend(asked, k=7).to_pylist()
    rows = [{**row, "film": sorted(seen_films(run, row["user"]))} for row in asked]
    scorer = Scorer(model, manifest, program, 4)
    answers = scorer.score([RowRequest(rows[:5]), RowRequest(rows[5:])])
    items = [own for answer in answers for own in answer.outputs["items"].to_pylist()]
    scores = [own for answer in answers for own in answer.outputs["scores"].to_pylist()]
    assert not any(answer.bad for answer in answers) and items == [row["items"] for row in expected]
    np.testing.assert_allclose(scores, [row["scores"] for row in expected], rtol=1e-6)
    (answer,) = scorer.score([RowRequest(asked[:1])])  # without items to leave out
    vectors, user = loaded.item_vectors(), loaded.user_vectors(asked[:1])[0]
    best = np.argsort(-(vectors.vectors @ user))[:7]
    assert answer.outputs["items"].to_pylist() == [[vectors.values[int(place)].as_py() for place in best]]


def test_towers_and_the_index_have_the_vectors_of_the_run(run: Path, model: Path) -> None:
    manifest, loaded = read_manifest(model), distembed.load(run)
    assert manifest.index is not None and (manifest.index.num_items, manifest.index.dim) == (NUM_ITEMS, 6)
    index, items = pq.read_table(model / manifest.index.file), loaded.item_vectors()
    assert index.equals(items.table())
    user, item = (load_program(model / tower.program.file) for tower in manifest.towers)
    asked = queries(run)
    sample = json.loads((model / "sample.json").read_text())
    num_rows, names = len(sample["rows"]), [each.name for each in manifest.features]
    assert names == [*(each.name for each in manifest.towers[0].features), "film"]
    assert all(0 <= tower.largest_difference < 1e-6 for tower in manifest.towers)
    lengths = torch.tensor(sample["lengths"])
    values = torch.tensor(sample["values"]).split(lengths.sum(1).tolist())
    found = user(torch.cat(values[:-1]), lengths[:-1], torch.tensor(sample["dense"]))
    np.testing.assert_allclose(found, loaded.user_vectors(_raw(sample["rows"])), rtol=1e-5, atol=1e-6)
    assert len(found) == num_rows and len(asked) == 9
    batch = loaded._model.task.item_batch(np.arange(NUM_ITEMS))  # type: ignore[attr-defined]
    ids, dense = batch["sparse_features"], batch["dense_features"]
    lists = [ids[each.name] for each in manifest.towers[1].features]
    columns = [("age", "price").index(each.name) for each in manifest.towers[1].numbers]
    assert len(columns) == 1 and all((model / str(each.vocabulary)).exists() for each in manifest.towers[1].features)
    lengths = torch.stack([each.lengths().long() for each in lists])
    vectors = item(torch.cat([each.values() for each in lists]), lengths, dense[:, columns])
    np.testing.assert_allclose(vectors, items.vectors, rtol=1e-5, atol=1e-6)


def test_the_serving_example_recommends_as_the_run(run: Path, model: Path) -> None:
    score = runpy.run_path(str(model / "serving_example.py"), run_name="__main__")["score"]  # which checks its sample
    asked = queries(run)
    items, scores = score([{**row, "film": sorted(seen_films(run, row["user"]))} for row in asked])
    loaded = distembed.load(run)
    expected, index = loaded.recommend(asked, k=7).to_pylist(), loaded.item_vectors()
    values = dict(zip(index.ids.tolist(), index.values.to_pylist(), strict=True))
    assert [[values[item] for item in row] for row in items.tolist()] == [row["items"] for row in expected]
    np.testing.assert_allclose(scores, [row["scores"] for row in expected], rtol=1e-5)


@pytest.mark.thorough
def test_the_server_recommends_as_the_run(run: Path, model: Path, tmp_path: Path) -> None:
    asked = queries(run)
    rows = [{**row, "film": sorted(seen_films(run, row["user"]))} for row in asked]
    expected = distembed.load(run).recommend(asked, k=7).to_pylist()
    with serving(model, tmp_path / "server") as server:
        status, found = server.ask(rows)
        assert status == 200 and found["items"] == [row["items"] for row in expected]
        np.testing.assert_allclose(found["scores"], [row["scores"] for row in expected], rtol=1e-5)
        stranger = {**asked[0], "user": "nobody"}
        status, found = server.ask([stranger])
        assert status == 200 and found["items"] == distembed.load(run).recommend([stranger], k=7)["items"].to_pylist()
        status, found = server.ask([rows[0], {**rows[1], "age": "old"}])
        assert status == 422 and [(each["row"], each["field"]) for each in found["rows"]] == [(1, "age")]
        assert server.end(signal.SIGINT) == 0


@pytest.mark.thorough
def test_rows_without_a_user_are_served_as_recommended(run: Path, tmp_path: Path) -> None:
    arguments = ("task.user=null", "task.exclude_seen=false", "train.max_steps=3")
    call("train", run.parent / "config.yaml", *arguments, "--run-dir", tmp_path / "run")
    call("export", tmp_path / "run", "--output", tmp_path / "model", "--num-best", "5")
    manifest, asked = read_manifest(tmp_path / "model"), queries(run)
    assert manifest.recommends is not None and not manifest.recommends.excludes_seen
    expected = distembed.load(tmp_path / "run").recommend(asked, k=5).to_pylist()
    answer = post(served(tmp_path / "model"), asked)
    assert answer.status == 200 and answer.json()["items"] == [row["items"] for row in expected]


def _raw(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**{name: row[name] for name in USER_COLUMNS}, "history": "|".join(row["history"])} for row in rows]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("factor", "index_rows", "message"), [(1.001, 40, "user.pt2 gives"), (1.0, 39, "items.parquet")]
)
def test_programs_and_an_index_of_other_vectors_are_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float, index_rows: int, message: str
) -> None:
    write = pq.write_table
    monkeypatch.setattr(pq, "write_table", lambda table, file: write(table.slice(0, index_rows), file))
    monkeypatch.setattr(
        "distembed.serving.export.parity.load_program",
        lambda file: lambda *inputs: load_program(file)(*inputs) * factor,
    )
    with pytest.raises(RunError, match=message):
        export_run(find_trained_run(run, None), tmp_path / "model", ExportOptions())
    assert not (tmp_path / "model").exists()


@pytest.mark.thorough
def test_users_of_numbers_alone_are_refused(run: Path, tmp_path: Path) -> None:
    features = "model.item_features=[genres,price,user,country,history]"
    arguments = ("task.user=null", "task.exclude_seen=false", "train.max_steps=1")
    call("train", run.parent / "config.yaml", features, *arguments, "--run-dir", tmp_path / "run")
    assert distembed.load(tmp_path / "run").user_vectors([{"age": 3.0}, {"age": None}]).shape == (2, 6)
    with pytest.raises(UserError, match=r"users have numbers alone \(age\)"):
        call("export", tmp_path / "run", "--output", tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_small_precisions_keep_the_metric(run: Path, tmp_path: Path, precision: Any) -> None:
    manifest: ExportManifest = export_run(
        find_trained_run(run, None), tmp_path / "model", ExportOptions(precision, num_best=NUM_ITEMS)
    )
    assert manifest.parity.exported == pytest.approx(manifest.parity.trained, abs=5e-4)
    with pytest.raises(UserError, match="--num-best is 41"):
        export_run(find_trained_run(run, None), tmp_path / "other", ExportOptions(num_best=41))


def test_faiss_is_asked_for_where_it_is_missing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "faiss", raising=False)
    real = builtins.__import__

    def without_faiss(name: str, *arguments: Any) -> Any:
        if name == "faiss":
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without_faiss)
    with pytest.raises(UserError, match=r"pip install 'distembed\[faiss\]'"):
        call("export", run, "--output", tmp_path / "model", "--faiss", "flat")
    assert not (tmp_path / "model").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_a_faiss_index_finds_the_items_of_exact_search(run: Path, tmp_path: Path, kind: Any) -> None:
    faiss = pytest.importorskip("faiss", reason="faiss-cpu is an extra that is not installed")
    assert isinstance(faiss, types.ModuleType)
    loaded, asked = distembed.load(run), queries(run)
    items = loaded.item_vectors()
    call("export", run, "--output", tmp_path / "model", "--faiss", kind)
    index = read_manifest(tmp_path / "model").index
    assert index is not None and index.faiss == "index/items.faiss"
    scores, places = faiss.read_index(str(tmp_path / "model" / index.faiss)).search(loaded.user_vectors(asked), 5)
    expected = np.sort(loaded.user_vectors(asked) @ items.vectors.T)[:, ::-1][:, :5]
    np.testing.assert_allclose(scores, expected, rtol=1e-5)
    assert places.shape == (9, 5)
