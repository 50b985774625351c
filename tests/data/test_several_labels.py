"""Datasets with several labels: a batch has each row's labels beside its features, NaN where the row lacks one."""

import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from distembed.base.errors import UserError
from distembed.data import CategoricalFeature, Label, Manifest, Schema, create_manifest
from distembed.data.reader import Batch, BatchOrder, BatchReader
from distembed.tasks import ClickConfig, NextItemConfig, RankingConfig, RatingConfig, batch_schema

NAN = math.nan
LABELS = (Label("click"), Label("buy"), Label("stars", "number"))
SCHEMA = Schema(None, ("x",), (CategoricalFeature("row", 10_000),), weight="importance", labels=LABELS)


def labels_of(row: int) -> list[float]:
    """Returns a row's labels: no row 7k lacks its click, every third its purchase, every other its stars."""
    click = float(row % 2)
    return [click, NAN if row % 3 == 0 else float(row % 5 == 0), NAN if row % 2 else row / 4 - 10]


def make_dataset(folder: Path, num_rows: int, schema: Schema = SCHEMA) -> Manifest:
    folder.mkdir(exist_ok=True)
    rows = range(num_rows)
    click, buy, stars = zip(*map(labels_of, rows), strict=True)
    table = pa.table(
        {
            "stars": pa.array(stars, pa.float64()),  # whose missing values are NaN in the file
            "row": pa.array(rows, pa.int32()),
            "click": pa.array([bool(value) for value in click]),
            "x": pa.array([row / 2 for row in rows], pa.float32()),
            "importance": pa.array([1.0 + row % 4 for row in rows], pa.float32()),
            "buy": pa.array([None if math.isnan(value) else int(value) for value in buy], pa.int8()),
        }
    )
    pq.write_table(table, folder / "rows.parquet", row_group_size=13)
    return create_manifest(folder, schema, {"all": ["rows.parquet"]})


def assert_each_row_has_its_labels(batch: Batch) -> list[int]:
    rows = batch["sparse_features"]["row"].values().tolist()
    labels = batch["labels"]
    assert isinstance(labels, torch.Tensor)
    assert labels.dtype == torch.float32 and labels.shape == (len(rows), 3)
    expected = torch.tensor([labels_of(row) for row in rows], dtype=torch.float32).reshape(len(rows), 3)
    torch.testing.assert_close(labels, expected, rtol=0, atol=0, equal_nan=True)
    assert batch["dense_features"].tolist() == [[row / 2] for row in rows]
    assert batch["weights"].tolist() == [1.0 + row % 4 for row in rows]
    return rows


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_rank_reads_the_labels_of_its_rows(tmp_path: Path, shuffle: bool) -> None:
    make_dataset(tmp_path, 101)
    rows: list[int] = []
    for rank in range(3):
        reader = BatchReader(tmp_path, "all", BatchOrder(10, shuffle, seed=5), rank=rank, world_size=3)
        rows += [row for batch in reader for row in assert_each_row_has_its_labels(batch)]
    assert sorted(rows) == list(range(101))


def test_a_manifest_tells_how_many_rows_have_each_label(tmp_path: Path) -> None:
    make_dataset(tmp_path, 60)
    split = Manifest.load(tmp_path).splits["all"]
    assert split.label_rate is None and split.labels is not None
    for name, column in zip(SCHEMA.label_names, np.array([labels_of(row) for row in range(60)]).T, strict=True):
        assert split.labels[name].num_rows == np.count_nonzero(~np.isnan(column))
        assert split.labels[name].mean == pytest.approx(np.nanmean(column), rel=1e-12)


def test_a_schema_survives_json() -> None:
    assert Schema.from_json(json.loads(json.dumps(SCHEMA.to_json()))) == SCHEMA
    assert SCHEMA.to_json()["labels"] == [{"name": "click"}, {"name": "buy"}, {"name": "stars", "kind": "number"}]
    assert "labels" not in Schema("click", ("x",), ()).to_json()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"label": "seen", "labels": LABELS}, "both the label 'seen' and labels"),
        ({"label": None, "labels": LABELS[:1]}, "labels has one label, 'click'"),
        ({"label": None, "labels": LABELS, "label_kind": "number"}, "label_kind is 'number' beside labels"),
        ({"label": None, "labels": (*LABELS, Label("x"))}, "more than once: x"),
    ],
)
def test_a_schema_has_one_label_or_several(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Schema(dense=("x",), categorical=(), **settings)  # type: ignore[arg-type]


def test_a_label_is_of_a_known_kind() -> None:
    with pytest.raises(UserError, match="kind of the label 'a' is 'numbers': give one of binary, number"):
        Label("a", "numbers")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "wrong", "law"),
    [("click", 2.0, "a label is 0 or 1, unless .* the kind 'number'"), ("stars", math.inf, "must be a finite number")],
)
def test_a_wrong_label_is_refused(tmp_path: Path, name: str, wrong: float, law: str) -> None:
    columns = {column: [0.0, NAN, 1.0] for column in ("click", "buy", "stars")}
    columns |= {name: [0.0, NAN, wrong], "x": [0.0] * 3, "importance": [1.0] * 3}
    pq.write_table(pa.table({**columns, "row": [0, 1, 2]}), tmp_path / "rows.parquet")
    create_manifest(tmp_path, SCHEMA, {"all": ["rows.parquet"]})
    with pytest.raises(UserError, match=f"column '{name}': row 2 is .*{law}"):
        list(BatchReader(tmp_path, "all", BatchOrder(3)))


@pytest.mark.parametrize("task", [ClickConfig(), RatingConfig(), RankingConfig(), NextItemConfig()])
def test_a_task_of_one_label_refuses_several(task: object) -> None:
    schema = Schema(None, ("x",), SCHEMA.categorical, labels=LABELS)
    with pytest.raises(UserError, match=r"several: click, buy, stars.*task=\{name: multi\}.*`label: \{column: "):
        batch_schema(task, schema)  # type: ignore[arg-type]
