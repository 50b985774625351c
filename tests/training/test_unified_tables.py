"""A run with a unified table from end to end: trained on ranks, planned, predicted, exported, served and compressed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import distembed
from distembed.base.errors import UserError
from distembed.data.dataset.manifest import Manifest
from distembed.embedding.occurrences import id_occurrences
from distembed.models import ModelInputs
from distembed.partitions import MultiHash
from distembed.serving.convert import StockCheckpoint
from distembed.training.config import load_config
from distembed.training.describe import describe
from tests.in_process import in_this_process as command
from tests.server.asgi import post, served
from tests.server.exported_models import exported, json_rows, trained_run

FEATURES = ["genres", "site", "number"]  # the first is a list
STORE = {"partition": "multi_hash", "num_buckets": 20, "composition": "concat", "force": True, "features": FEATURES}
EMBEDDING = {"default": {"embedding_dim": 8}, "tables": {"store": STORE}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_run(tmp_path_factory.mktemp("unified"), embedding=EMBEDDING)


def first_ids(run: Path) -> tuple[dict[str, int], int]:
    """Returns the sum of the sizes of earlier features, and of all sizes."""
    sizes = {each.name: each.num_embeddings for each in Manifest.load(str(run.parent / "dataset")).schema.categorical}
    firsts, total = {}, 0
    for name in FEATURES:
        firsts[name], total = total, total + sizes[name]
    return firsts, total


def predictions(run: Path, name: str) -> np.ndarray:
    command("predict", run, "--output", run.parent / f"{name}.parquet")
    return pq.read_table(run.parent / f"{name}.parquet")["prediction"].to_numpy()


def saved(run: Path) -> StockCheckpoint:
    return StockCheckpoint(max((run / "checkpoints").glob("step-*")))


def test_description_and_plan_have_the_bytes_that_the_checkpoint_has(run: Path) -> None:
    firsts, num_ids = first_ids(run)
    (store,) = [each for each in describe(load_config(run / "config.yaml")).tables if each.config.name == "store"]
    assert (store.config.first_ids, store.config.num_embeddings) == (firsts, num_ids)
    assert f"id + {firsts['site']} of site, id + {firsts['number']} of number" in store.partitions
    weights = {key: value for key, value in saved(run).items() if "store__p" in key}
    num_bytes = sum(value.nbytes for key, value in weights.items() if not key.startswith("optimizer"))
    assert store.config.memory_bytes == num_bytes == 4 * 2 * 20 * 4
    settings = ("train.sparse_optimizer={name: adagrad, learning_rate: 0.1}", "--gpus", "2", "--json")
    planned = json.loads(command("plan", run / "config.yaml", *settings).stdout)
    (table,) = [each for each in planned["tables"] if each["name"] == "store"]
    assert table["bytes_of_one_copy"] == 2 * num_bytes  # Adagrad has a number for each number


@pytest.mark.thorough
def test_an_export_serves_the_scores_of_the_run(run: Path) -> None:
    expected = predictions(run, "predicted")
    for materialise in ("never", "always"):
        folder = exported(run, run.parent / f"model_{materialise}", materialise=materialise)
        sample = json.loads((folder / "sample.json").read_text())  # the test split
        assert np.allclose(sample["outputs"]["prediction"], expected, atol=1e-6)
        rows = json_rows(20, seed=5)
        rows[0] |= {"site": "never seen", "genres": "never seen|nor this"}  # unknown values of each feature
        reply = post(served(folder), rows)
        assert reply.status == 200
        scores = distembed.load(run).predict(rows)
        assert np.allclose(reply.json()["prediction"], scores, atol=1e-6)


@pytest.mark.thorough
def test_vectors_are_asked_for_by_feature(run: Path) -> None:
    model, (firsts, num_ids) = distembed.load(run), first_ids(run)
    weights = [saved(run)[f"model.model.embeddings.embedding_bags.store__p{j}.weight"] for j in (0, 1)]
    rows = MultiHash(num_ids, num_buckets=20, hash_key="store").rows(torch.arange(num_ids))
    vectors = torch.cat([weight[own] for weight, own in zip(weights, rows, strict=True)], dim=1).numpy()
    for feature, first in firsts.items():
        ids = np.array([1, 0, 2])
        assert np.array_equal(model.embed(feature, ids=ids), vectors[first + ids])
    with pytest.raises(UserError, match=r"table is 'store', which is not known.*genres"):
        model.embed("store", ids=[0])
    output = run.parent / "vectors"
    command("materialise", run, "--output", output)
    assert {path.stem for path in output.iterdir()} >= set(FEATURES)
    ends = [*list(firsts.values())[1:], num_ids]
    for (feature, first), end in zip(firsts.items(), ends, strict=True):
        table = pq.read_table(output / f"{feature}.parquet")
        assert table["id"].to_pylist() == list(range(end - first))
        assert np.array_equal(np.array(table["vector"].to_pylist(), np.float32), vectors[first:end])


def test_counts_are_those_of_the_features_one_after_another(run: Path) -> None:
    dataset = str(run.parent / "dataset")
    manifest = Manifest.load(dataset)
    (store,) = [each.config for each in describe(load_config(run / "config.yaml")).tables if each.config.first_ids]
    counts, end = id_occurrences(dataset, manifest, manifest.schema, [store])["store"].tolist(), 0
    for feature in FEATURES:
        vocabulary = manifest.vocabularies[feature]
        counted = pq.read_table(Path(dataset) / vocabulary.file)["count"].to_pylist()
        missing = 0 if feature == "genres" else vocabulary.rows_missing  # a list without values looks nothing up
        start, end = end, end + 2 + len(counted)
        assert counts[start:end] == [missing, vocabulary.rows_dropped, *counted]
    assert end == len(counts)


@pytest.mark.thorough
def test_a_run_becomes_full_tables_and_codes(run: Path) -> None:
    expected, folder = predictions(run, "expected"), run.parent
    full = ("embedding.tables.store.partition=naive", "embedding.tables.store.num_buckets=null")
    command("convert", run, *full, "--output", folder / "full")
    assert np.allclose(predictions(folder / "full", "of_full"), expected, atol=1e-6)
    command("compress", folder / "full", folder / "codes", "--to", "codes", "--bits-per-id", "4")
    tables = load_config(folder / "codes" / "config.yaml").embedding.tables
    assert (tables["store"].features, tables["store"].partition) == (FEATURES, "explicit")
    assert len(pq.read_table(folder / "codes" / "codes" / "store.parquet")) == first_ids(run)[1]
    assert np.abs(predictions(folder / "codes", "of_codes") - expected).max() < 0.05


@pytest.mark.parametrize("sections", [{"dense_tables": ("site",)}, {"scored_tables": ("site",)}])
def test_a_task_that_scores_all_items_refuses_them_in_a_unified_table(run: Path, sections: dict[str, Any]) -> None:
    schema, embedding = Manifest.load(str(run.parent / "dataset")).schema, load_config(run / "config.yaml").embedding
    with pytest.raises(UserError, match=r"tables\.store\.features has 'site'.*take it out of the unified table"):
        ModelInputs.from_config(schema, embedding, **sections)
    with pytest.raises(UserError, match=r"tables\.store\.features has 'site'.*take it out of the unified table"):
        ModelInputs.from_config(schema, embedding).pooled_embeddings(["site"])
