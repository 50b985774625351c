"""Raw users and sequences get items that a computation of its own recommends, as raw values."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import distembed
from distembed import LoadedModel
from distembed.base.errors import UserError
from distembed.data.dataset.manifest import Manifest
from tests.in_process import in_this_process as command
from tests.interactions import prepare
from tests.server.exported_models import once
from tests.small_runs import distembed as forked
from tests.training.test_recommenders import write_config


def session_datasets(factory: pytest.TempPathFactory) -> dict[str, Path]:
    def make() -> dict[str, Path]:
        folder = factory.mktemp("recommenders")
        ratings = prepare("ratings", folder, "--split", "random:0.7,0.1,0.2")
        return {"ratings": ratings, "sequences": prepare("sequences", folder)}

    return once("recommenders", make)


def session_run(factory: pytest.TempPathFactory, kind: str) -> Path:
    """Returns a run of a kind, two steps long."""
    datasets = session_datasets(factory)
    folder = datasets["ratings"].parent

    def make() -> Path:
        config = write_config(folder / f"{kind}.yaml", kind, datasets)
        command("train", config, "train.max_steps=2", "--run-dir", folder / kind)
        return folder / kind

    return once(kind, make)


@pytest.fixture
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of datasets and of runs named after their kinds."""
    for kind in ("rating", "ranking", "softmax"):
        session_run(tmp_path_factory, kind)
    return session_datasets(tmp_path_factory)["ratings"].parent


def values(dataset: Path, feature: str) -> list[str | None]:
    manifest = Manifest.load(dataset)
    keys = pq.read_table(dataset / manifest.vocabularies[feature].file)["key"].to_pylist()
    return [None, None, *keys]


def rows_of(dataset: Path, split: str) -> list[dict[str, Any]]:
    files = Manifest.load(dataset).splits[split].files
    return pa.concat_tables([pq.read_table(dataset / file.path) for file in files]).to_pylist()


def taken_items(ratings: Path) -> dict[int, set[int]]:
    """Returns the items of users in the splits before the test, by ids; candidates of the test are without them."""
    taken: dict[int, set[int]] = {}
    for split in ("train", "validation"):
        for row in rows_of(ratings, split):
            taken.setdefault(row["user"], set()).add(row["item"])
    return taken


def test_raw_pairs_are_rated_as_the_split(runs: Path, tmp_path: Path) -> None:
    command("predict", runs / "rating", "--output", tmp_path / "split.parquet")
    expected = pq.read_table(tmp_path / "split.parquet")["prediction"].to_numpy()
    users, items = values(runs / "ratings", "user"), values(runs / "ratings", "item")
    rows = [{"user": users[row["user"]], "item": items[row["item"]]} for row in rows_of(runs / "ratings", "test")]
    assert np.array_equal(distembed.load(runs / "rating").predict(rows), expected)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    arguments = ("--input", tmp_path / "rows.parquet", "--key", "item", "--output", tmp_path / "raw.parquet")
    command("predict", runs / "rating", *arguments)
    found = pq.read_table(tmp_path / "raw.parquet")
    assert found.column_names == ["item", "prediction"] and np.array_equal(found["prediction"].to_numpy(), expected)


def scores(model: LoadedModel, queries: np.ndarray, num_items: int, bias: bool) -> np.ndarray:
    vectors = model.embed("item", ids=range(num_items)).astype(np.float64)
    return queries[:, :-1] @ vectors[:, :-1].T + vectors[:, -1] if bias else queries @ vectors.T


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2])
def test_users_get_the_best_items_that_they_do_not_have(runs: Path, tmp_path: Path, ranks: int) -> None:
    model, dataset = distembed.load(runs / "ranking"), runs / "ratings"
    users, items = values(dataset, "user"), values(dataset, "item")
    has = taken_items(dataset)
    asked = [5, 2, 31]
    # the last number of a vector is the bias, of users too
    queries = model.embed("user", ids=asked).astype(np.float64)
    expected = scores(model, queries, len(items), bias=True) + queries[:, -1:]
    for row, user in enumerate(asked):
        expected[row, [0, 1, *has[user]]] = -np.inf
    rows = [{"user": users[user]} for user in asked]
    (tmp_path / "users.csv").write_text("".join(f"{name}\n" for name in ["user", *(row["user"] for row in rows)]))
    output = tmp_path / "found.parquet"
    forked("predict", runs / "ranking", "--input", tmp_path / "users.csv", "--output", output, ranks=ranks)
    for found in (model.predict(rows), pq.read_table(output)):
        assert found["user"].to_pylist() == [row["user"] for row in rows]
        for row in range(len(asked)):
            order = np.argsort(-expected[row], kind="stable")[:10]
            shown = [found[f"item_{place}"][row].as_py() for place in range(1, 11)]
            of_user = [found[f"score_{place}"][row].as_py() for place in range(1, 11)]
            num_left = int(np.isfinite(expected[row]).sum())
            assert shown[:num_left] == [items[item] for item in order][:num_left]
            assert shown[num_left:] == [None] * (10 - num_left) if num_left < 10 else True
            np.testing.assert_allclose(of_user[:num_left], expected[row, order][:num_left], rtol=1e-5, atol=1e-6)
    with pytest.raises(UserError, match="1 of 2 rows are malformed: row 1, column 'user': 'nobody' is no user"):
        model.predict([rows[0], {"user": "nobody"}])
    assert model.predict([{"user": "nobody"}], malformed="null")["item_1"].to_pylist() == [None]


@pytest.mark.parametrize(
    ("kind", "rows", "reason"),
    [("ranking", ["user", "{user}", "ghost", ""], "user 1"), ("softmax", ["item", "{item}", "?", '""'], "sequence 2")],
)
def test_files_may_have_rows_of_which_nothing_is_known(
    runs: Path, tmp_path: Path, kind: str, rows: list[str], reason: str
) -> None:
    user, item = values(runs / "ratings", "user")[5], values(runs / "sequences", "item")[5]
    (tmp_path / "rows.csv").write_text("".join(f"{row.format(user=user, item=item)}\n" for row in rows if row))
    arguments = ("predict", runs / kind, "--input", tmp_path / "rows.csv", "--output", tmp_path / "found.parquet")
    said = command(*arguments, "--max-rejected", "0.9")
    assert f"are null for malformed rows ({reason})" in said.stdout
    found = pq.read_table(tmp_path / "found.parquet")["item_1"].to_pylist()
    assert found[0] is not None and set(found[1:]) == {None}
    refused = command(*arguments[:-1], tmp_path / "refused.parquet", code=2)
    assert f"rows are malformed ({reason})" in refused.stderr and "Traceback" not in refused.stderr
    assert not (tmp_path / "refused.parquet").exists()


def test_ids_are_written_where_they_are_asked_for(runs: Path, tmp_path: Path) -> None:
    command("predict", runs / "ranking", "--output", tmp_path / "values.parquet")
    command("predict", runs / "ranking", "--ids", "--output", tmp_path / "ids.parquet")
    raw, ids = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("values", "ids"))
    for column, feature in (("user", "user"), ("item_1", "item"), ("item_10", "item")):
        keys = values(runs / "ratings", feature)
        shown = [None if value < 0 else keys[value] for value in ids[column].to_pylist()]
        assert raw[column].to_pylist() == shown
