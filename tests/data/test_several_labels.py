"""Datasets with several labels: a batch has each row's labels beside its features, NaN where the row lacks one."""

import csv
import dataclasses
import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from distembed.base.errors import UserError
from distembed.data import CategoricalFeature, Label, Manifest, Schema, create_manifest
from distembed.data.dataset.kept import require_grown_from
from distembed.data.dataset.manifest import LabelSummary
from distembed.data.prepare import ResourceLimits
from distembed.data.prepare.pipeline import dataset_warnings, describe_dataset
from distembed.data.prepare.table import TableOptions, prepare_table
from distembed.data.prepare.table.inputs import find_inputs
from distembed.data.prepare.table.source import TableSource
from distembed.data.reader import Batch, BatchOrder, BatchReader
from distembed.data.table.columns import TextFormat
from distembed.data.table.schema import TableSchema
from distembed.reports.statistics import dataset_statistics
from distembed.reports.statistics.page import commonest_table, render_page, rows_table
from distembed.reports.statistics.values import LabelStatistics
from distembed.serving.export.parity import made_up_batch
from distembed.serving.rows.decoder import batches_of
from distembed.serving.rows.given import given_rows
from distembed.serving.rows.table_rows import TableRowDecoder
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


TABLE = TableSchema.from_json(
    {
        "labels": {
            "click": {},
            "conversion": {"column": "buy"},
            "liked": {"column": "rating", "at_least": 4},
            "rating": {"kind": "number"},
        },
        "weight": {"column": "importance"},
        "dense": {"x": {}},
        "categorical": {"row": {"kind": "integer", "min_count": 1}},
        "split": "0.6,0.2,0.2",
        "text": {"missing_values": ["", "none"]},
    },
    "the test",
)
NAMES = ("click", "conversion", "liked", "rating")
ONE_THREAD, TWO_THREADS = (ResourceLimits(memory_limit_bytes=1 << 30, threads=threads) for threads in (1, 2))


def raw_rows(num_rows: int) -> list[dict[str, Any]]:
    """Returns raw rows, some of whose outcomes are missing."""
    rng = random.Random(7)
    return [
        {
            "click": rng.choice([0, 1, None]),
            "buy": rng.choice(["true", "False", "1", "0.0", "none", None]),
            "rating": rng.choice([1.5, 3, 4, 5, None]),
            "importance": rng.choice([0.5, 2.0]),
            "x": row / 4,
            "row": row,
        }
        for row in range(num_rows)
    ]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)


def outcome(text: str, at_least: float | None = None) -> float:
    """Returns a label of a text in a CSV file; NaN for a missing one."""
    if text in ("", "none"):
        return NAN
    number = {"true": 1.0, "False": 0.0}.get(text)
    number = float(text) if number is None else number
    return number if at_least is None else float(number >= at_least)


def labels_of_csv(path: Path) -> dict[int, list[float]]:
    """Returns the labels of each row of a CSV file, read with the csv module, in the order of NAMES."""
    with path.open(newline="") as file:
        return {
            int(row["row"]): [
                *(outcome(row[name]) for name in ("click", "buy")),
                *(outcome(row["rating"], 4), outcome(row["rating"])),
            ]
            for row in csv.DictReader(file)
        }


def read_labels(dataset: Path, split: str) -> dict[int, list[float]]:
    """Returns the labels that batches have of each row of a split, by the row's number."""
    vocabulary = pq.read_table(dataset / Manifest.load(dataset).vocabularies["row"].file).to_pydict()
    row_of_id = dict(zip(vocabulary["id"], vocabulary["key"], strict=True))
    rows = {}
    for batch in BatchReader(dataset, split, BatchOrder(16, shuffle=True, seed=3)):
        ids, labels, x = batch["sparse_features"]["row"].values(), batch["labels"], batch["dense_features"]
        for id_, row_labels, numbers in zip(ids.tolist(), labels.tolist(), x.tolist(), strict=True):
            number = int(numbers[0] * 4)
            assert row_of_id.get(id_, number) == number  # rows of other splits are out of the vocabulary
            rows[number] = row_labels
    return rows


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl", "rows.parquet"])
def test_a_table_keeps_the_labels_of_its_rows(tmp_path: Path, name: str) -> None:
    rows = raw_rows(300)
    write_rows(tmp_path / "plain.csv", rows)
    write_rows(tmp_path / name, rows)
    manifest = prepare_table([tmp_path / name], tmp_path / "dataset", TABLE, limits=TWO_THREADS)
    kinds = ("binary", "binary", "binary", "number")
    assert manifest.schema.labels == tuple(map(Label, NAMES, kinds)) and manifest.schema.label is None
    expected = labels_of_csv(tmp_path / "plain.csv")
    found = [read_labels(tmp_path / "dataset", split) for split in ("train", "validation", "test")]
    assert [sorted(labels) for labels in found] == [list(range(180)), list(range(180, 240)), list(range(240, 300))]
    for split, labels in zip(("train", "validation", "test"), found, strict=True):
        numbers = list(labels)
        np.testing.assert_array_equal([labels[row] for row in numbers], [expected[row] for row in numbers])
        summaries = manifest.splits[split].labels
        assert summaries is not None
        for label, column in zip(NAMES, np.array([expected[row] for row in numbers]).T, strict=True):
            assert summaries[label].num_rows == np.count_nonzero(~np.isnan(column))
            assert summaries[label].mean == pytest.approx(np.nanmean(column), rel=1e-12)


def test_a_missing_label_is_null_in_the_file(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.csv", raw_rows(50))
    prepare_table([tmp_path / "rows.csv"], tmp_path / "dataset", TABLE, limits=ONE_THREAD)
    file = pq.read_table(tmp_path / "dataset" / "train" / "part-00000.parquet")
    assert file.column_names[:4] == list(NAMES)
    assert [file.schema.field(name).type for name in NAMES] == [pa.int8()] * 3 + [pa.float32()]
    expected = labels_of_csv(tmp_path / "rows.csv")
    for place, name in enumerate(NAMES):
        column = [expected[row][place] for row in range(30)]
        assert file[name].to_pylist() == [None if math.isnan(value) else value for value in column]


@pytest.mark.parametrize(
    ("column", "value"), [("click", "2"), ("click", "yes"), ("buy", "0.5"), ("rating", "inf"), ("rating", "good")]
)
def test_a_row_with_a_malformed_label_is_left_out(tmp_path: Path, column: str, value: str) -> None:
    rows = raw_rows(20)
    rows[4] |= {"click": "0", "buy": "0", "rating": "3", column: value}
    write_rows(tmp_path / "rows.csv", rows)
    options = TableOptions(max_rejected=0.1)
    manifest = prepare_table([tmp_path / "rows.csv"], tmp_path / "dataset", TABLE, options, ONE_THREAD)
    assert manifest.rejected.by_reason == {"label": 1}
    numbers = [number for split in manifest.splits for number in read_labels(tmp_path / "dataset", split)]
    assert sorted(numbers) == [number for number in range(20) if number != 4]


def test_a_split_says_how_many_rows_lack_a_label(tmp_path: Path) -> None:
    rows = [{"click": row % 2, "buy": None if row < 15 else 1, "rating": 5, "x": 0, "row": row} for row in range(20)]
    schema = dataclasses.replace(TABLE, weight=None, split="1,0,0")
    write_rows(tmp_path / "rows.csv", rows)
    manifest = prepare_table([tmp_path / "rows.csv"], tmp_path / "dataset", schema, limits=ONE_THREAD)
    first = next(iter(describe_dataset(manifest, tmp_path / "dataset")))
    assert first == (
        "train: 20 rows, label rate of click 0.5000, label rate of conversion 1.0000 (15 missing), "
        "label rate of liked 1.0000, mean label of rating 5.0000"
    )
    warnings = list(dataset_warnings(manifest))
    assert [name for name in NAMES if any(f"every label '{name}' is 1" in text for text in warnings)] == [
        "conversion",
        "liked",
    ]


ONE_LABEL = TableSchema.from_json(
    {
        "label": {"column": "bought", "name": "buy"},
        "weight": {"column": "importance"},
        "time": {"column": "at", "format": "seconds"},
        "dense": {"age": {"missing": "keep"}, "price": {"transform": "standardize"}},
        "categorical": {
            "site": {"min_count": 1},
            "tags": {"separator": "|"},
            "bin": {"column": "price", "kind": "quantile_bins", "num_bins": 3},
        },
        "split": "time:0.6,0.2,0.2",
    },
    "the test",
)


def one_label_lines() -> Iterator[str]:
    yield "bought,importance,at,age,price,site,tags"
    for row in range(90):
        label = "maybe" if row % 31 == 30 else "" if row % 40 == 39 else row % 3 % 2
        numbers = f"{1 + row % 4},{row * 7 % 90},{'' if row % 5 == 0 else row},{row % 11 / 2}"
        yield f"{label},{numbers},s{row % 6},{'|'.join('abc'[: row % 4])}"


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl", "rows.parquet"])
def test_a_label_that_no_row_has_is_missing_everywhere(tmp_path: Path, name: str) -> None:
    write_rows(tmp_path / name, [row | {"buy": None} for row in raw_rows(40)])
    manifest = prepare_table([tmp_path / name], tmp_path / "dataset", TABLE, limits=ONE_THREAD)
    for split in manifest.splits.values():
        assert split.labels is not None and split.labels["conversion"] == LabelSummary(0, None)
    assert all(math.isnan(labels[1]) for labels in read_labels(tmp_path / "dataset", "train").values())
    assert "no row has the label 'conversion': a model learns nothing of it" in dataset_warnings(manifest)
    assert dataset_statistics(tmp_path / "dataset").splits["train"].labels["conversion"] == LabelStatistics(None, 24)


def test_later_rows_get_the_labels_of_the_schema_of_the_first_day(tmp_path: Path) -> None:
    write_rows(tmp_path / "first.csv", raw_rows(60))
    write_rows(tmp_path / "second.csv", raw_rows(80)[50:])
    first = prepare_table([tmp_path / "first.csv"], tmp_path / "a", TABLE, limits=ONE_THREAD)
    options = TableOptions(vocabulary=tmp_path / "a", grow=True)
    second = prepare_table([tmp_path / "second.csv"], tmp_path / "b", None, options, ONE_THREAD)
    assert second.schema.labels == first.schema.labels
    require_grown_from(tmp_path / "a", first, tmp_path / "b", second)
    expected = labels_of_csv(tmp_path / "second.csv")
    for split in second.splits:
        for row, labels in read_labels(tmp_path / "b", split).items():
            np.testing.assert_array_equal(labels, expected[row])
    other = dataclasses.replace(second, schema=dataclasses.replace(second.schema, labels=second.schema.labels[:2]))
    require_grown_from(tmp_path / "a", first, tmp_path / "b", other)  # a task says which labels are learned


def test_raw_rows_have_labels_for_metrics_and_need_none_for_predictions(tmp_path: Path) -> None:
    rows = raw_rows(40)
    write_rows(tmp_path / "rows.csv", rows)
    manifest = prepare_table([tmp_path / "rows.csv"], tmp_path / "dataset", TABLE, limits=ONE_THREAD)
    expected = labels_of_csv(tmp_path / "rows.csv")
    for names in ((), ("label", "weight")):
        decoder = TableRowDecoder(tmp_path / "dataset", manifest, names)
        given = [row if names else {"x": row["x"], "row": row["row"]} for row in rows]
        decoded = decoder.decode(given_rows(given, decoder.columns).table)
        assert not decoded.rejected and len(decoded.block.records) == 40
        (batch,) = batches_of(manifest.schema, decoded.block, 40)
        labels = batch["labels"]
        assert isinstance(labels, torch.Tensor) and labels.shape == (40, 4)
        known = [expected[row] if names else [NAN] * 4 for row in range(40)]
        np.testing.assert_array_equal(labels.numpy(), known)
        assert batch["weights"].tolist() == [row["importance"] if names else 1.0 for row in rows]
    decoder = TableRowDecoder(tmp_path / "dataset", manifest, ("label",), labels=("liked",))
    given = [{"x": row["x"], "row": row["row"], "rating": row["rating"]} for row in rows]
    (batch,) = batches_of(manifest.schema, decoder.decode(given_rows(given, decoder.columns).table).block, 40)
    liked = NAMES.index("liked")
    known = [expected[row][liked] for row in range(40)]
    np.testing.assert_array_equal(batch["labels"].numpy()[:, liked], known)  # type: ignore[union-attr]


def test_rows_without_a_header_may_lack_their_labels_all_together(tmp_path: Path) -> None:
    names = ["click", "buy", "rating", "importance", "x", "row"]
    text = TextFormat(header=False, columns=names)
    schema = dataclasses.replace(TABLE, text=text, labels=TABLE.labels, weight=None)
    (tmp_path / "rows.csv").write_text("0.5,3\n0.25,4\n")
    unlabelled = dataclasses.replace(schema, labels={})
    source = TableSource(find_inputs([tmp_path / "rows.csv"]), unlabelled, may_lack={*names[:4]})
    (part,) = source.parts(1 << 20)
    (block,) = (source.parse(raw) for raw in source.open(part, 1 << 20).raw_blocks())
    assert not block.rejected and block.num_rows == 2
    assert [column.tolist() for column in block.numbers] == [[0.5, 0.25]]


def test_a_made_up_batch_has_the_shape_of_a_read_one(tmp_path: Path) -> None:
    make_dataset(tmp_path, 8)
    (read,) = BatchReader(tmp_path, "all", BatchOrder(8))
    made_up = made_up_batch(SCHEMA, 8)
    for name in ("labels", "weights", "dense_features"):
        values = made_up[name]
        assert isinstance(values, torch.Tensor) and values.shape == read[name].shape  # type: ignore[union-attr]


def test_statistics_have_the_rate_of_each_label_and_its_missing_rows(tmp_path: Path) -> None:
    make_dataset(tmp_path, 101)
    found = dataset_statistics(tmp_path)
    columns, weights = (
        np.array([labels_of(row) for row in range(101)]).T,
        np.array([1.0 + row % 4 for row in range(101)]),
    )
    assert found.labels == SCHEMA.label_names and found.splits["all"].label_rate is None
    for name, column in zip(SCHEMA.label_names, columns, strict=True):
        has_label = ~np.isnan(column)
        rate = np.average(column[has_label], weights=weights[has_label])
        assert found.splits["all"].labels[name].rate == pytest.approx(rate, rel=1e-12)
        assert found.splits["all"].labels[name].missing == 101 - np.count_nonzero(has_label)
        assert sum(rows.labels[name].missing for rows in found.periods.values()) == 101 - np.count_nonzero(has_label)
    table = rows_table(found, found.splits)
    assert table.headings[2:6] == ["weighted mean of click", "missing", "weighted mean of buy", "missing"]
    assert table.lines[0][1] == "101" and table.lines[0][5] == "34"
    assert commonest_table(found, "row").headings == ["id", "value", "count"]
    assert json.loads(json.dumps(found.as_json()))["splits"]["all"]["labels"]["buy"]["missing"] == 34


@pytest.mark.thorough
def test_the_page_of_statistics_shows_each_label(tmp_path: Path) -> None:
    make_dataset(tmp_path, 101)
    page = render_page(dataset_statistics(tmp_path))
    assert re.search(r"<th[^>]*>weighted mean of stars</th><th[^>]*>missing</th>", page)
    # labels of other units are in figures of their own
    assert page.count("<b>Label rate of") == 3 and page.count("<svg") >= 4


def test_a_dataset_of_one_label_knows_nothing_of_several(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("\n".join([*one_label_lines(), ""]))
    folder = tmp_path / "dataset"
    manifest = prepare_table([tmp_path / "rows.csv"], folder, ONE_LABEL, TableOptions(max_rejected=0.1), ONE_THREAD)
    assert manifest.rejected.by_reason == {"label": 4}
    assert '"labels"' not in (folder / "manifest.json").read_text()
    assert manifest.schema.label == "buy" and manifest.schema.labels == ()
    num_rows = 0
    for split in manifest.splits.values():
        table = pa.concat_tables(pq.read_table(folder / file.path) for file in split.files)
        ages, labels = table["age"].to_pylist(), table["buy"].to_pylist()
        assert split.labels is None and split.label_rate == pytest.approx(np.mean(labels))
        assert all(
            label in (0, 1) if age is None else label == age % 3 % 2 for age, label in zip(ages, labels, strict=True)
        )
        num_rows += len(labels)
    assert num_rows == 86
