"""Codes of items made of their features: files of vectors and texts, and runs that are trained with the codes."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import Manifest
from distembed.data.table.vocabulary import raw_values
from distembed.serving.convert.item_features import ItemFeatures
from distembed.serving.convert.table_codes import CodeShape
from tests.serving.test_recommender_rows import session_run
from tests.small_runs import call

VALUES = pa.array([None, None, "7", "a", "0012", "b", "c"])
KEYS = ["c", "0012", "not among the values", "7", "a"]
VECTORS = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)


def write(file: Path, columns: dict[str, Any]) -> Path:
    table = pa.table(columns)
    (pq.write_table if file.suffix == ".parquet" else pa.csv.write_csv)(table, file)
    return file


@pytest.mark.parametrize("kind", ["list.parquet", "columns.parquet", "columns.csv", "arrays.npz"])
def test_vectors_are_those_of_the_keys(tmp_path: Path, kind: str) -> None:
    file = tmp_path / kind
    if kind == "arrays.npz":
        np.savez(file, key=np.array(KEYS), vectors=VECTORS)
    elif kind == "list.parquet":
        write(file, {"item": KEYS, "vector": VECTORS.tolist()})
    else:
        write(file, {"x0": VECTORS[:, 0], "key": KEYS, "x1": VECTORS[:, 1], "x2": VECTORS[:, 2]})
    features = ItemFeatures.read(file, "item", VALUES)
    assert features.num_ids == 7 and features.ids.tolist() == [2, 3, 4, 6]  # "b" is not in the file
    assert features.vectors.numpy() == pytest.approx(VECTORS[[3, 4, 1, 0]], rel=1e-5)


def test_texts_have_the_products_of_their_weighted_words(tmp_path: Path) -> None:
    """With as many singular vectors as texts, products of rows are those of the TF-IDF matrix itself."""
    texts = ["Red shoe, red", "(blue shoe)", "???", "Blue HAT", "green hat été"]
    file = write(tmp_path / "items.csv", {"item": KEYS, "title": texts, "brand": ["x", "x", "", "y", "y"]})
    features = ItemFeatures.read(file, "item", VALUES)
    words = [["blue", "hat", "y"], ["green", "hat", "été", "y"], ["blue", "shoe", "x"], ["red", "shoe", "red", "x"]]
    names = sorted({word for own in words for word in own})
    counts = np.array([[own.count(name) for name in names] for own in words])
    weighted = counts * np.log(len(words) / (counts > 0).sum(0))
    weighted /= np.linalg.norm(weighted, axis=1, keepdims=True)
    assert (features.vectors @ features.vectors.T).numpy() == pytest.approx(weighted @ weighted.T, abs=1e-5)


@pytest.mark.parametrize("scheme, parts", [("one", 1), ("product", 2), ("residual", 3)])
def test_code_0_is_of_the_ids_without_features_alone(scheme: Any, parts: int) -> None:
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(np.flatnonzero(rng.random(200) < 0.8))
    features = ItemFeatures(200, ids, torch.from_numpy(rng.normal(size=(len(ids), 6)).astype(np.float32)))
    codes = features.codes(CodeShape(scheme, parts, 8), torch.rand(200).double() + 0.1, 0, 1.5, torch.device("cpu"))
    assert len(codes) == parts
    for own in codes:
        known = own[ids]
        assert (own == 0).sum() == 200 - len(ids) and known.min() == 1 and own.max() < 8
        assert np.bincount(known)[1:].max() <= -(-1.5 * len(ids) // (own.max() - 0))


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"item": ["a", "a"], "x": [1.0, 2.0]}, "has the key 'a' in several rows"),
        ({"item": ["y", "z"], "x": [1.0, 2.0]}, "has none of the values of 'item', such as '7', 'a', '0012'"),
        ({"name": ["a", "b"], "x": [1.0, 2.0]}, "columns name, x; give a column 'item' or 'key'"),
        ({"item": ["a", "b"]}, "has the columns item; give"),
        ({"item": ["a", "b"], "x": [1.0, 2.0], "t": ["u", "v"]}, "has columns of double, string; give numbers"),
        ({"item": ["a", "b"], "x": [[1.0], [1.0, 2.0]]}, "has lists of \\[1, 2\\] numbers"),
        ({"item": ["a", "b"], "x": [1.0, np.inf]}, "numbers that are not finite"),
    ],
)
def test_unusable_files_are_refused(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ItemFeatures.read(write(tmp_path / "items.parquet", columns), "item", VALUES)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "items.npz").write_bytes(b"none")
    np.savez(tmp_path / "fewer.npz", key=np.array(["a", "b", "c"]), vectors=np.zeros((2, 4)))
    unequal = r"3 keys, and vectors of shape \[2, 4\]"
    for name, message in {
        "items.npz": "cannot be read",
        "fewer.npz": unequal,
        "items.json": "known: .parquet, .csv, .npz",
    }.items():
        with pytest.raises(UserError, match=message):
            ItemFeatures.read(tmp_path / name, "item", VALUES)


@pytest.mark.thorough
def test_a_run_is_trained_with_codes_of_features_and_keeps_them(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    run = session_run(tmp_path_factory, "rating")
    values = raw_values(run / "dataset", Manifest.load(run / "dataset"), "item")
    clump = np.arange(len(values) - 2) % 3  # items of three kinds
    vectors = np.eye(3, dtype=np.float32)[clump][:-4]
    file = write(tmp_path / "items.parquet", {"key": values[2:-4], "vector": vectors.tolist()})
    made = ("compress", run, tmp_path / "codes", "--features", f"item={file}", "--bits-per-id", "2")
    found = {table["table"]: table for table in json.loads(call(*made, "--json"))["tables"]}
    assert found["item"]["codes"] == "one 1 x 4" and found["user"]["kept"] == "no --features"
    random = write(tmp_path / "r.parquet", {"key": values[2:], "x": np.random.default_rng(0).random(len(values) - 2)})
    call(*made[:2], tmp_path / "large", "--features", f"item={random}", "--bits-per-id", "128")
    assert re.search(r"item: its codes take .*, more than the full table's", capsys.readouterr().err)
    codes = pq.read_table(tmp_path / "codes" / "codes" / "item.parquet")["p0"].to_numpy()
    assert (codes[:2] == 0).all() and (codes[-4:] == 0).all()
    for kind in range(3):
        assert len(set(codes[2:-4][clump[:-4] == kind].tolist())) == 1
    assert set(codes.tolist()) == {0, 1, 2, 3}
    config = tmp_path / "codes" / "config.yaml"
    for name, start in (("scratch", ()), ("further", ("--init-from", tmp_path / "codes"))):
        call("train", config, "train.max_steps=2", *start, "--run-dir", tmp_path / name)
    shutil.rmtree(tmp_path / "codes")
    for name in ("scratch", "further"):
        shutil.move(tmp_path / name, tmp_path / f"{name}-moved")
        assert np.isfinite(json.loads(call("evaluate", tmp_path / f"{name}-moved", "--json"))["rmse"])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--features", "item", "--bits-per-id", "4"], "--features is 'item'; give TABLE=FILE"),
        (["--features", "item=x.csv", "--budget", "1kB"], "--features makes codes .*; give --bits-per-id"),
        (["--features", "item=x.csv", "--bits-per-id", "4", "--min-count", "9"], "--min-count is 9, but --features"),
        (["--features", "items=x.csv", "--bits-per-id", "4"], "--features is 'items'.*Did you mean 'item'"),
        (["--features", "item=x.csv", "--bits-per-id", "4"], "x.csv cannot be read"),
        (["--balance", "0.9", "--bits-per-id", "4"], "--balance is 0.9; give 1 or more"),
        (["--device", "tpu", "--bits-per-id", "4"], "--device is 'tpu'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, arguments: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        call("compress", session_run(tmp_path_factory, "rating"), tmp_path / "codes", *arguments)
    assert not list(tmp_path.iterdir())
