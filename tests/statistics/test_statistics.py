"""Statistics of a dataset, held against a plain computation over lists of rows."""

import dataclasses
import io
import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from distembed.base.errors import UserError
from distembed.commands import cli
from distembed.commands.shared import console
from distembed.data import CategoricalFeature, Schema, create_manifest
from distembed.data.dataset.manifest import Manifest
from distembed.data.prepare import CriteoOptions, prepare_criteo, synthesize_criteo
from distembed.data.prepare.pipeline import describe_dataset
from distembed.reports.statistics import DatasetStatistics, dataset, dataset_statistics
from distembed.reports.statistics.page import print_statistics, render_page
from distembed.reports.statistics.values import QUANTILES, TOP_SIZES
from tests.html_page import Page

SCHEMA = Schema(
    "clicked",
    ("x", "y"),
    (CategoricalFeature("id", 60), CategoricalFeature("tags", 9, multi_hot=True), CategoricalFeature("few", 3)),
    dense_sequences=("prices",),
    missing_dense=True,
    weight="weight",
    time="when",
)
SIZES = {"validation": 31, "train": 203, "test": 0}
DAY = 86_400


def draw_rows(count: int, draw: random.Random) -> list[dict[str, Any]]:
    """Returns rows, some of which are equal to others."""
    rows: list[dict[str, Any]] = []
    for _ in range(count):
        if rows and draw.random() < 0.2:
            rows.append({**draw.choice(rows), "when": draw.randrange(3 * DAY)})
            continue
        tags = [draw.randrange(9) for _ in range(draw.randrange(4))]
        rows.append(
            {
                "clicked": draw.randrange(2),
                "x": draw.choice([None, 0.0, 1.5, draw.random()]),
                "y": float(draw.randrange(5)),
                "id": int(60 * draw.random() ** 3),
                "tags": tags,
                "few": draw.randrange(2),
                "prices": [draw.random() for _ in tags],
                "weight": draw.choice([0.5, 1.0, 2.0]),
                "when": draw.randrange(3 * DAY),
            }
        )
    return rows


TYPES = pa.schema(
    {
        "clicked": pa.int8(),
        "x": pa.float32(),
        "y": pa.float64(),
        "id": pa.int32(),
        "tags": pa.list_(pa.int32()),
        "few": pa.uint8(),
        "prices": pa.list_(pa.float32()),
        "weight": pa.float32(),
        "when": pa.int64(),
    }
)


def write(folder: Path, schema: Schema, rows: dict[str, list[dict[str, Any]]]) -> Path:
    folder.mkdir()
    for name, own in rows.items():
        table = pa.Table.from_pylist(own, schema=TYPES)
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=17)
    create_manifest(folder, schema, {name: [f"{name}.parquet"] for name in rows})
    return folder


@pytest.fixture
def rows() -> dict[str, list[dict[str, Any]]]:
    draw = random.Random(1)
    return {name: draw_rows(count, draw) for name, count in SIZES.items()}


def label_rate(rows: list[dict[str, Any]]) -> float | None:
    weights = sum(row["weight"] for row in rows)
    return sum(row["weight"] * row["clicked"] for row in rows) / weights if rows else None


def test_rows_ids_and_numbers_are_those_of_a_plain_computation(
    tmp_path: Path, rows: dict[str, list[dict[str, Any]]]
) -> None:
    folder = write(tmp_path / "d", SCHEMA, rows)
    seen: list[tuple[int, int]] = []
    found = dataset_statistics(folder, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (sum(SIZES.values()), sum(SIZES.values()))
    assert found.train == "train" and list(found.splits) == ["train", "validation", "test"]
    for name, own in rows.items():
        assert found.splits[name].num_rows == len(own)
        assert found.splits[name].label_rate == (pytest.approx(label_rate(own)) if own else None)
    together = [row for own in rows.values() for row in own]
    for day in range(3):
        own = [row for row in together if row["when"] // DAY == day]
        period = found.periods[f"1970-01-0{day + 1}"]
        assert (period.num_rows, period.label_rate) == (len(own), pytest.approx(label_rate(own)))
    assert len(found.periods) == 3
    for feature in SCHEMA.categorical:
        check_feature(found, feature, rows)
    for column in ("x", "y", "prices"):
        for name, own in rows.items():
            check_column(found, column, name, own)
    check_equal_rows(found, rows)


def ids_of(row: dict[str, Any], feature: CategoricalFeature) -> list[int]:
    value = row[feature.name]
    return value if feature.multi_hot else [value]


def check_feature(found: DatasetStatistics, feature: CategoricalFeature, rows: dict[str, list[dict[str, Any]]]) -> None:
    statistics = found.features[feature.name]
    counts = Counter(number for row in rows["train"] for number in ids_of(row, feature))
    total, ordered = sum(counts.values()), sorted(counts.values(), reverse=True)
    assert (statistics.cardinality, statistics.sampled) == (len(counts), 1.0)
    assert statistics.top_shares == pytest.approx({size: sum(ordered[:size]) / total for size in TOP_SIZES})
    entropy = -sum(count / total * math.log2(count / total) for count in ordered)
    assert statistics.entropy_bits == pytest.approx(entropy)
    ranks = [2**power for power in range(20) if 2**power <= len(ordered)]
    assert statistics.counts_by_rank == {rank: ordered[rank - 1] for rank in ranks}
    if len(ordered) > 2:
        xs, ys = [math.log(rank) for rank in ranks], [math.log(ordered[rank - 1]) for rank in ranks]
        mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
        slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
        assert statistics.zipf_exponent == pytest.approx(-slope / sum((x - mean_x) ** 2 for x in xs))
    commonest = sorted(counts, key=lambda number: (-counts[number], number))[:10]
    assert [(each.id, each.count, each.value) for each in statistics.commonest] == [
        (number, counts[number], None) for number in commonest
    ]
    for each in statistics.commonest:
        labels = [row["clicked"] for row in rows["train"] for number in ids_of(row, feature) if number == each.id]
        assert each.label_rate == pytest.approx(sum(labels) / len(labels))
    for name, own in rows.items():
        if own:
            ids = [number for row in own for number in ids_of(row, feature)]
            split = statistics.splits[name]
            assert (split.num_ids, split.out_of_vocabulary) == (len(ids), 0.0)
            unseen = [number for number in ids if number not in counts]
            assert split.unseen == pytest.approx(len(unseen) / len(ids))
            assert split.distinct_unseen == len(set(unseen))
            empty = sum(not ids_of(row, feature) for row in own) / len(own)
            assert split.missing == pytest.approx(empty)


def check_column(found: DatasetStatistics, column: str, split: str, rows: list[dict[str, Any]]) -> None:
    statistics = found.columns[column][split]
    values = [value for row in rows for value in (row[column] if column == "prices" else [row[column]])]
    known = [np.float32(value).item() for value in values if value is not None]
    if not known:
        assert math.isnan(statistics.mean) and all(map(math.isnan, statistics.quantiles))
        return
    assert statistics.missing == pytest.approx(1 - len(known) / len(values))
    mean = sum(known) / len(known)
    assert statistics.mean == pytest.approx(mean)
    assert statistics.deviation == pytest.approx(math.sqrt(sum((v - mean) ** 2 for v in known) / len(known)), abs=1e-9)
    assert statistics.every == 1
    ordered = sorted(known)
    for quantile, value in zip(QUANTILES, statistics.quantiles, strict=True):
        place = quantile * (len(ordered) - 1)
        low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
        assert value == pytest.approx(low + (high - low) * (place - math.floor(place)))


def check_equal_rows(found: DatasetStatistics, rows: dict[str, list[dict[str, Any]]]) -> None:
    def key(row: dict[str, Any]) -> str:
        return json.dumps({name: value for name, value in row.items() if name != "when"})

    keys = [key(row) for own in rows.values() for row in own]
    trained = {key(row) for row in rows["train"]}
    assert found.equal_rows.repeated == len(keys) - len(set(keys)) > 20
    share = sum(key(row) in trained for row in rows["validation"]) / len(rows["validation"])
    assert found.equal_rows.in_training == {"validation": pytest.approx(share), "test": 0.0}
    assert found.equal_rows.sampled == 1.0


def test_rows_without_times_labels_and_weights_are_counted_by_tenths(
    tmp_path: Path, rows: dict[str, list[dict[str, Any]]]
) -> None:
    schema = dataclasses.replace(SCHEMA, label=None, weight=None, time=None)
    found = dataset_statistics(write(tmp_path / "d", schema, rows))
    assert all(each.label_rate is None for each in (*found.splits.values(), *found.periods.values()))
    assert [name for name in found.periods if name.startswith("train")] == [f"train {i + 1}/10" for i in range(10)]
    assert sum(each.num_rows for each in found.periods.values()) == sum(SIZES.values())
    sizes = [found.periods[f"train {i + 1}/10"].num_rows for i in range(10)]
    assert max(sizes) - min(sizes) <= 1
    assert all(each.label_rate is None for each in found.features["id"].commonest)


def test_what_is_estimated_is_near_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "MOST_HASHES", 2500)
    monkeypatch.setattr(dataset, "MOST_KEPT", 1500)
    generator = np.random.default_rng(0)
    num_rows, num_ids = 20_000, 50_000
    ids = (num_ids * generator.random(num_rows) ** 2).astype(np.int64)
    table = pa.table({"x": generator.normal(size=num_rows).astype(np.float32), "id": ids})
    table = pa.concat_tables([table, table.slice(0, num_rows // 4)])
    folder = tmp_path / "d"
    folder.mkdir()
    pq.write_table(table, folder / "a.parquet", row_group_size=999)
    pq.write_table(table.slice(0, 1000), folder / "b.parquet")
    schema = Schema(None, ("x",), (CategoricalFeature("id", num_ids),))
    create_manifest(folder, schema, {"train": ["a.parquet"], "test": ["b.parquet"]})
    found = dataset_statistics(folder, memory_bytes=1)
    feature = found.features["id"]
    assert feature.sampled == 1.0 and found.equal_rows.sampled == 1 / 11
    assert feature.cardinality == len(set(ids.tolist()))
    assert feature.splits["test"].unseen == 0.0
    assert found.equal_rows.repeated == pytest.approx(num_rows // 4 + 1000, rel=0.15)
    assert found.equal_rows.in_training == {"test": 1.0}
    column = found.columns["x"]["train"]
    assert column.every == 17 and column.quantiles[4] == pytest.approx(0, abs=0.1)
    assert column.quantiles[0] == pytest.approx(min(table["x"].to_pylist()))
    page = render_page(found)
    for text in ("about ", "one row in 17", "9.09% were compared"):
        assert text in page


def cells(page: str) -> set[str]:
    return {cell for table in Page(page).tables for row in table for cell in row}


def is_filled(found: DatasetStatistics, page: str) -> bool:
    """Returns whether numbers are said to be filled where they were missing, by what is printed and by the page."""
    terminal = Console(width=200, file=io.StringIO(), record=True)
    print_statistics(found, terminal)
    line = next(line for line in terminal.export_text().splitlines() if line.startswith("I1 "))
    assert ("filled" in line.split()) == ("filled" in cells(page))
    return "filled" in line.split()


@pytest.mark.thorough
def test_vocabularies_say_what_ids_stand_for_and_numbers_whether_they_were_filled(tmp_path: Path) -> None:
    source, folder = tmp_path / "rows.tsv", tmp_path / "criteo"
    synthesize_criteo(source, num_rows=1000, seed=0)
    prepare_criteo([source], folder, CriteoOptions(min_count=2))
    with console.capture() as captured:
        cli.app(["data", "stats", str(folder), "--output", str(tmp_path / "page.html")], standalone_mode=False)
    said, page = captured.get(), (tmp_path / "page.html").read_text()
    assert "C26" in said and "validation 10/10" in said and "I13" in said
    lines = [line.split("\t") for line in source.read_text().splitlines()[:800]]
    counts = Counter(line[14 + 2] for line in lines)
    missing, repeated = counts.pop(""), {value: count for value, count in counts.items() if count > 1}
    statistics = dataset_statistics(folder)
    assert list(statistics.as_json()["filled"]) == [f"I{number}" for number in range(1, 14)]
    assert is_filled(statistics, page)
    found = statistics.features["C3"]
    by_value = {each.value: each.count for each in found.commonest}
    unknown = by_value.pop("out of vocabulary", 0)
    assert by_value.pop("missing") == missing
    assert by_value and all(counts[value] == count for value, count in by_value.items())
    assert found.splits["train"].missing == pytest.approx(missing / 800)
    assert found.splits["train"].out_of_vocabulary * 800 == pytest.approx(unknown)
    assert found.cardinality == len(repeated)
    assert unknown == sum(counts.values()) - sum(repeated.values())
    assert page.count("<svg") == 4 and max(by_value, key=by_value.__getitem__) in page


def test_numbers_that_may_be_missing_are_not_said_to_be_filled(tmp_path: Path) -> None:
    synthesize_criteo(tmp_path / "rows.tsv", num_rows=100, seed=0)
    prepare_criteo([tmp_path / "rows.tsv"], tmp_path / "criteo", CriteoOptions(hash_size=9, missing="keep"))
    found = dataset_statistics(tmp_path / "criteo")
    assert not found.as_json()["filled"] and not is_filled(found, render_page(found))


@pytest.mark.parametrize("num_rows", [0, 3])
def test_lists_of_a_fixed_size_and_empty_datasets_have_a_page(tmp_path: Path, num_rows: int) -> None:
    ids = pa.array([[1, 2], [2, 4], [3, 1]][:num_rows], pa.list_(pa.int32(), 2))
    pq.write_table(pa.table({"id": ids}), tmp_path / "a.parquet")
    schema = Schema(None, (), (CategoricalFeature("id", 5, multi_hot=True),))
    create_manifest(tmp_path, schema, {"train": ["a.parquet"]})
    found = dataset_statistics(tmp_path)
    assert found.features["id"].cardinality == (4 if num_rows else 0)
    assert ("<svg" in render_page(found)) == (num_rows > 0), "no frame is empty"


def test_json_and_refusals(tmp_path: Path, rows: dict[str, list[dict[str, Any]]], capsys: Any) -> None:
    folder = write(tmp_path / "d", SCHEMA, rows)
    cli.app(["data", "stats", str(folder), "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(dataset_statistics(folder).as_json()))
    rows["train"][3]["id"] = 60
    with pytest.raises(UserError, match=r"train.parquet, row group 0, column 'id' has the id 60: ids are in \[0, 60\)"):
        dataset_statistics(write(tmp_path / "wrong", SCHEMA, rows))
    create_manifest(tmp_path, SCHEMA, {})
    with pytest.raises(UserError, match="has no splits"):
        dataset_statistics(tmp_path)


@pytest.mark.thorough
def test_rates_say_whether_they_are_weighted(tmp_path: Path, rows: dict[str, list[dict[str, Any]]]) -> None:
    """Those of rows in the terminal and on the page, those of ids, and what is said after preparing."""
    words = {"weighted": ("weighted label rate", "unweighted label rate"), "plain": ("label rate", "label rate")}
    for name, (of_rows, of_ids) in words.items():
        schema = SCHEMA if name == "weighted" else dataclasses.replace(SCHEMA, weight=None)
        folder = write(tmp_path / name, schema, rows)
        found = dataset_statistics(folder)
        assert found.is_weighted == (name == "weighted") == found.as_json()["is_weighted"]
        said = io.StringIO()
        print_statistics(found, Console(file=said, width=200))
        assert any(line.split() == ["rows", "number", *of_rows.split()] for line in said.getvalue().splitlines())
        assert {of_rows, of_ids} <= cells(render_page(found))
        plain = sum(row["clicked"] for row in rows["train"]) / len(rows["train"])
        assert f"train: {len(rows['train'])} rows, {of_ids} {plain:.4f}" in " ".join(
            describe_dataset(Manifest.load(folder), folder)
        )


def test_a_number_between_those_that_are_kept_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "MOST_KEPT", 2)
    counter = dataset.NumberCounter(6)
    counter.add(np.array([np.nan, 4.0, np.nan, np.nan, 6.0, np.nan], np.float32))  # every third is kept for quantiles
    found = counter.result()
    assert (found.missing, found.mean, found.deviation) == (pytest.approx(4 / 6), 5.0, 1.0)
    assert (found.quantiles[0], found.quantiles[-1]) == (4.0, 6.0) and math.isnan(found.quantiles[4])
