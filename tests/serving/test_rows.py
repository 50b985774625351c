"""Raw rows in Python are scored as the prepared rows are, to the bit, whatever holds them."""

import re
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import distembed
from distembed import LoadedModel
from distembed.base.errors import UserError
from distembed.data.dataset.manifest import Manifest
from distembed.data.reader import BatchOrder, BatchReader
from distembed.data.table.raw_columns import TableColumns
from distembed.data.table.schema import TableSchema
from distembed.serving.rows.decoder import batches_of
from distembed.serving.rows.given import given_rows
from distembed.serving.rows.table_rows import TableRowDecoder
from tests.serving.arrow_rows import SCHEMA, draw_rows, prepare_table
from tests.serving.conftest import NUM_ROWS


@pytest.fixture(scope="module")
def model(table: Path) -> LoadedModel:
    return distembed.load(table / "run")


def test_bad_values_of_a_column_are_shown_without_reading_it_once_each() -> None:
    class Column(list[Any]):
        times_read = 0

        def __iter__(self) -> Iterator[Any]:
            self.times_read += 1
            return super().__iter__()

    columns = TableColumns(TableSchema.from_json({"categorical": {"site": {}}}, "the test"))
    one, many = Column([{}, *["a"] * 99]), Column([{}] * 50 + ["a"] * 50)
    found = [given_rows({"site": column}, columns) for column in (one, many)]
    assert [len(each.bad) for each in found] == [1, 50] and found[1].bad[49].text == b"{}"
    assert one.times_read == many.times_read


def test_rows_are_encoded_as_they_were_prepared(table: Path) -> None:
    manifest = Manifest.load(table / "away")
    decoder = TableRowDecoder(table / "run" / "dataset", Manifest.load(table / "run" / "dataset"), ("label", "weight"))
    decoded = decoder.decode(pa.Table.from_pylist(draw_rows(NUM_ROWS)))
    assert decoded.is_good.all()
    rows = 0
    for split in ("train", "validation", "test"):
        for written in BatchReader(table / "away", split, BatchOrder(10_000, shuffle=False)):
            own = np.arange(rows, rows + written["labels"].shape[0])
            (batch,) = batches_of(manifest.schema, decoded.block.gather(own), 10_000)
            rows += len(own)
            assert batch.fields.keys() == written.fields.keys()
            for name, field in written.fields.items():
                if name == "sparse_features":
                    assert batch[name].keys() == field.keys()
                    assert batch[name].lengths().equal(field.lengths()) and batch[name].values().equal(field.values())
                else:
                    assert batch[name].equal(field), name
    assert rows == NUM_ROWS


def as_texts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v if v is None or isinstance(v, list) else str(v) for k, v in row.items()} for row in rows]


def test_rows_are_scored_as_the_prepared_ones(table: Path, model: LoadedModel) -> None:
    (batch,) = BatchReader(table / "away", "test", BatchOrder(8192, shuffle=False))
    expected = model.predict(batch)
    rows = draw_rows(NUM_ROWS)[-len(expected) :]
    found = model.predict(rows)
    assert found.dtype == np.float32 and np.array_equal(found, expected)
    arrow = pa.Table.from_pylist(rows)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    for same in (arrow, arrow.combine_chunks().to_batches()[0], columns, tuple(rows)):
        assert np.array_equal(model.predict(same), expected)
    without_labels = [{k: v for k, v in row.items() if k not in ("click", "importance", "unused")} for row in rows]
    assert np.array_equal(model.predict(without_labels), expected)
    assert np.array_equal(model.predict(as_texts(rows)), expected)
    order = np.random.default_rng(1).permutation(len(rows))
    np.testing.assert_allclose(model.predict([rows[i] for i in order]), expected[order], rtol=1e-6)
    for some in (rows[:0], rows[:1], rows[:7]):
        np.testing.assert_allclose(model.predict(some), expected[: len(some)], rtol=1e-6)


def test_values_that_training_has_not_seen_are_those_out_of_the_vocabulary(model: LoadedModel) -> None:
    unseen, unknown = (
        {"site": "nowhere", "number": 5, "code": "123"},
        {"site": "elsewhere", "number": 77, "code": "124"},
    )
    rest = {"price": 1.0, "age": None, "rate": 0.0, "genres": None, "places": []}
    one, other = model.predict([{**rest, **unseen}, {**rest, **unknown}])
    assert not np.isnan(one) and abs(one - other) < 1  # but for the hash of the site, of which there are 11


def test_rows_that_can_not_be_scored_are_refused_by_name(model: LoadedModel) -> None:
    rows = as_texts(draw_rows(5))
    broken = [*rows, {**rows[0], "price": "much"}, {**rows[1], "number": "x1"}]
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: model.predict([{k: v for k, v in row.items() if k != "site"} for row in rows]), "no column 'site'"),
        (lambda: model.predict([{"sites": "a", **row} for row in [{}]]), "Did you mean 'sites' for 'site'"),
        (
            lambda: model.predict(broken),
            "2 of 7 rows are malformed: row 5, column 'price': 'much' is no finite number; row 6, column 'number'",
        ),
        (lambda: model.predict(broken, malformed="drop"), "malformed is 'drop'"),
        (lambda: model.predict("rows.csv"), "rows is of type str ('rows.csv')"),
        (lambda: model.predict([1, 2]), "row 0 is of type int (1)"),
        (lambda: model.predict(rows[0]), "a single row as a list of one dictionary"),
        (lambda: model.predict({"site": ["a"], "code": ["1", "2"]}), "site 1, code 2"),
        (lambda: model.predict([{3: 4}]), "a column is named 3"),
        (lambda: model.predict(pd.DataFrame([["a", "b"]], columns=["site", "site"])), "several columns named 'site'"),
        (lambda: model.predict([{}, {}]), "2 rows and not one column"),
        (lambda: model.predict([{**row, "site": ["a"]} for row in rows]), "row 0, column 'site': ['a'] is no text"),
        (lambda: model.predict(pa.table({k: [["a"]] for k in rows[0]})), "its type is list<"),
    ]
    for ask, said in cases:
        with pytest.raises(UserError, match=re.escape(said)):
            ask()
    found = model.predict(broken, malformed="null")
    assert np.isnan(found[5:]).all()
    np.testing.assert_allclose(found[:5], model.predict(rows), rtol=1e-6)


def test_raw_rows_with_labels_have_the_metrics_of_the_split(table: Path, model: LoadedModel, tmp_path: Path) -> None:
    rows = draw_rows(NUM_ROWS)[NUM_ROWS * 8 // 10 :]
    expected = distembed.load(table / "run", data=table / "away").evaluate("test")
    assert expected.pop("split") == "test" and expected["rows"] == len(rows)
    assert model.evaluate(rows) == expected
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert model.evaluate(tmp_path / "rows.parquet") == model.evaluate(str(tmp_path / "rows.parquet")) == expected
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: model.evaluate("test"), "say where it is with --data"),
        (
            lambda: model.evaluate([{**row, "click": 2} for row in rows]),
            "100 rows are malformed: row 0, column 'click': '2' is no label",
        ),
        (lambda: model.evaluate([{k: v for k, v in r.items() if k != "click"} for r in rows]), "no column 'click'"),
    ]
    for ask, said in cases:
        with pytest.raises(UserError, match=re.escape(said)):
            ask()


def test_criteos_rows_are_scored_as_prepared(criteo: Path) -> None:
    expected = pq.read_table(criteo / "expected.parquet")["prediction"].to_numpy()
    names = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    lines = (criteo / "many.tsv").read_text().splitlines()
    rows = [dict(zip(names, line.split("\t"), strict=True)) for line in lines]
    assert np.array_equal(distembed.load(criteo / "run").predict(rows), expected)


def test_vectors_of_raw_values_are_those_of_their_ids(table: Path, model: LoadedModel) -> None:
    manifest = Manifest.load(table / "away")
    for feature in ("site", "number", "code"):
        stored = pq.read_table(table / "away" / manifest.vocabularies[feature].file).slice(0, 3)
        keys = [f"{key:x}" for key in stored["key"].to_pylist()] if feature == "code" else stored["key"].to_pylist()
        ids = [*stored["id"].to_pylist(), 1, 0]
        unknown = {"site": "?", "number": 123, "code": "ffffffff"}[feature]
        found = model.embed(feature, values=[*keys, unknown, None])
        assert np.array_equal(found, model.embed(feature, ids=ids)), feature
        typed = pa.chunked_array([pa.array(keys).dictionary_encode()])
        assert np.array_equal(model.embed(feature, values=typed), found[:3])
        assert np.array_equal(model.embed(feature, values=["", float("nan")]), found[[-1, -1]])
    assert model.embed("hashed", values=["a", "b"]).shape == (2, 8)
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: model.embed("site", ids=[1], values=["a"]), "ids= or values="),
        (lambda: model.embed("site"), "ids= or values="),
        (lambda: model.embed("code", values=["zz"]), "value 0 ('zz')"),
        (lambda: model.embed("age_bin", values=[3.0]), "'age_bin'"),
        (lambda: model.embed("sight", values=["a"]), "Did you mean 'site'"),
        (lambda: model.embed("site", values="a"), "the one text 'a'"),
        (lambda: model.embed("site", values=[["a"]]), "of type list<"),
        (lambda: model.embed("number", values=[datetime(2026, 1, 1)]), "value 0 (datetime"),
        (lambda: model.embed("site", ids=1), "ids is 1; give a list"),  # type: ignore[arg-type]
    ]
    for ask, said in cases:
        with pytest.raises(UserError, match=re.escape(said)):
            ask()


def test_a_schema_without_a_label_predicts_too(tmp_path: Path) -> None:
    """Which no model is trained on, but the decoder reads."""
    schema = {key: value for key, value in SCHEMA.items() if key not in ("label", "weight")}
    prepare_table(draw_rows(50), tmp_path / "dataset", schema)
    decoder = TableRowDecoder(tmp_path / "dataset", Manifest.load(tmp_path / "dataset"))
    assert decoder.decode(pa.Table.from_pylist(draw_rows(3))).is_good.all()
