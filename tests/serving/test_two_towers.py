"""A loaded run of two towers: its vectors, its recommendations by exact search, and predictions of raw rows."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import distembed
from distembed.base.errors import UserError
from distembed.serving.item_search import ItemSearch
from tests.small_runs import call
from tests.small_runs import distembed as forked
from tests.tasks.retrieval_rows import NUM_ITEMS, prepare_rows, write_config

USER_COLUMNS = ("user", "country", "history", "age")


def trained(folder: Path) -> Path:
    """Returns a run of three steps, with its raw rows beside it."""
    dataset = prepare_rows(folder)
    config = write_config(folder / "config.yaml", dataset, task={"exclude_seen": True})
    call("train", config, "train.max_steps=3", "--run-dir", folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("towers"))


def raw_rows(run: Path) -> list[dict[str, Any]]:
    """Returns the raw rows of the dataset, a text or None in each column."""
    options = pa.csv.ConvertOptions(
        column_types={name: pa.string() for name in (*USER_COLUMNS, "film")}, strings_can_be_null=True, null_values=[""]
    )
    rows: list[dict[str, Any]] = pa.csv.read_csv(run.parent / "rows.csv", convert_options=options).to_pylist()
    return rows


def seen_films(run: Path, user: str) -> set[str]:
    rows = [row for row in raw_rows(run) if row["split"] != "test" and row["click"] and row["user"] == user]
    return {row["film"] for row in rows}


def test_recommendations_are_the_best_inner_products(run: Path) -> None:
    model = distembed.load(run)
    asked = [{name: row[name] for name in USER_COLUMNS} for row in raw_rows(run)[-9:]]
    users, items = model.user_vectors(asked), model.item_vectors()
    assert users.shape == (9, 6) and items.vectors.shape == (NUM_ITEMS, 6)
    np.testing.assert_allclose(np.linalg.norm(items.vectors, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(users, axis=1) * 0.3, 1, rtol=1e-5)
    assert items.table().column_names == ["id", "item", "vector"] and items.table()["item"].to_pylist()[0][0] == "f"
    names = items.values.to_pylist()
    found = model.recommend(asked, k=5)
    predicted = model.predict(asked)
    for row, (query, own) in enumerate(zip(asked, found.to_pylist(), strict=True)):
        scores = items.vectors.astype(np.float64) @ users[row].astype(np.float64)
        is_seen = np.isin(names, list(seen_films(run, query["user"])))
        order = np.argsort(-np.where(is_seen, -np.inf, scores))[:5]
        assert own["items"] == [names[place] for place in order]
        np.testing.assert_allclose(own["scores"], scores[order], rtol=1e-6)
        assert own["items"] == [predicted[f"item_{place}"][row].as_py() for place in range(1, 6)]
        assert predicted["user"][row].as_py() == query["user"]
    assert model.recommend([], k=5).num_rows == 0 and model.user_vectors([]).shape == (0, 6)
    everything = model.recommend(asked[:1], k=NUM_ITEMS)["items"][0].as_py()
    assert len(everything) == NUM_ITEMS - len(seen_films(run, asked[0]["user"]))
    with pytest.raises(UserError, match="from 1 to 40"):
        model.recommend(asked, k=0)
    with pytest.raises(UserError, match="age"):
        model.recommend([{**asked[0], "age": "old"}])


def test_threads_share_one_search_and_predictions_read_no_catalogue(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ItemSearch] = []
    start, both = ItemSearch.__init__, threading.Barrier(2)

    def slow_start(search: ItemSearch, *arguments: Any) -> None:
        made.append(search)
        time.sleep(0.2)
        start(search, *arguments)

    def predict(row: dict[str, Any]) -> Any:
        both.wait()
        return model.predict([row])

    monkeypatch.setattr(ItemSearch, "__init__", slow_start)
    monkeypatch.delattr("distembed.serving.item_search.take_values")
    model = distembed.load(run)
    asked = [{name: row[name] for name in USER_COLUMNS} for row in raw_rows(run)[-2:]]
    with ThreadPoolExecutor(2) as threads:
        assert [len(table) for table in threads.map(predict, asked)] == [1, 1]
    assert len(made) == 1


@pytest.mark.thorough
def test_rows_without_a_user_are_predicted_and_recommended_alike(run: Path, tmp_path: Path) -> None:
    arguments = ("task.user=null", "task.exclude_seen=false", "train.max_steps=3")
    call("train", run.parent / "config.yaml", *arguments, "--run-dir", tmp_path / "run")
    call("predict", tmp_path / "run", "--output", tmp_path / "split.parquet")
    split = pq.read_table(tmp_path / "split.parquet")
    clicks = [row for row in raw_rows(run) if row["split"] == "test" and row["click"]]
    assert len(split) == len(clicks) and split.column_names[0] == "item_1" and "user" not in split.column_names
    asked = [{name: row[name] for name in USER_COLUMNS} for row in clicks]
    pq.write_table(pa.Table.from_pylist(asked), tmp_path / "rows.parquet")
    call("predict", tmp_path / "run", "--input", tmp_path / "rows.parquet", "--output", tmp_path / "raw.parquet")
    assert pq.read_table(tmp_path / "raw.parquet").select(split.column_names).equals(split)
    model = distembed.load(tmp_path / "run")
    names = [f"item_{place}" for place in range(1, 11)]
    best = [list(row.values()) for row in split.select(names).to_pylist()]
    assert model.recommend(asked, k=10)["items"].to_pylist() == best
    hits = [row["film"] in own for row, own in zip(clicks, best, strict=True)]
    assert model.evaluate("test")["recall@10"] == pytest.approx(np.mean(hits))
    assert len(model.recommend(asked[:1], k=NUM_ITEMS)["items"][0]) == NUM_ITEMS  # nothing is left out


@pytest.mark.thorough
@pytest.mark.distributed
def test_raw_rows_and_a_split_get_equal_items_on_any_number_of_ranks(run: Path, tmp_path: Path) -> None:
    call("predict", run, "--output", tmp_path / "split.parquet")
    expected = pq.read_table(tmp_path / "split.parquet")
    first_rows: dict[str, dict[str, Any]] = {}
    for row in raw_rows(run):
        if row["split"] == "test" and row["click"]:
            first_rows.setdefault(row["user"], {name: row[name] for name in USER_COLUMNS})
    queries = [first_rows[user] for user in expected["user"].to_pylist()]
    assert len(queries) == len(first_rows)
    pq.write_table(pa.Table.from_pylist(queries), tmp_path / "rows.parquet")
    arguments = ("predict", run, "--input", tmp_path / "rows.parquet")
    forked(*arguments, "--output", tmp_path / "raw.parquet", ranks=2)
    found = pq.read_table(tmp_path / "raw.parquet")
    assert found.select(["user", "item_1", "item_10"]).equals(expected.select(["user", "item_1", "item_10"]))
    metrics = distembed.load(run).evaluate("test")
    assert metrics["rows"] == len(queries) and 0 < metrics["recall@10"] < 1


def test_other_models_have_no_vectors_of_users_and_items(run: Path, tmp_path: Path) -> None:
    arguments = ("task={name: click}", "model={name: deepfm, deep: [4]}", "train.max_steps=1")
    call("train", run.parent / "config.yaml", *arguments, "--run-dir", tmp_path / "click")
    with pytest.raises(UserError, match="task is 'click'.*retrieval"):
        distembed.load(tmp_path / "click").item_vectors()
