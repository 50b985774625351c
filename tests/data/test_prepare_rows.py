"""Preparing rows of any columns, against a computation that goes row by row in plain Python."""

import math
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.row_groups import verify_dataset
from distembed.data.prepare import PrepareOptions, ResourceLimits, prepare_rows, write_parquet
from distembed.data.prepare.options import SPLIT_NAMES
from distembed.data.reader import BatchOrder, BatchReader
from distembed.data.table import vocabulary
from distembed.data.table.blocks import BlockLayout, KeyColumn, NumberColumn
from tests.data import any_rows
from tests.data.any_rows import FLOAT32, INT64, LAYOUT, PythonRows, Row, random_rows, read_split, read_vocabulary
from tests.data.reference import folder_bytes

KEYS = {column.name: column for column in LAYOUT.ids if column.role == "feature"}
NUMBERS = {column.name: column for column in LAYOUT.numbers}


def check_against_reference(dataset: Path, splits: dict[str, list[Row]]) -> Manifest:
    """Checks every value of every split, and what the manifest and the vocabularies say."""
    manifest, train = Manifest.load(dataset), splits["train"]
    assert list(manifest.splits) == list(splits)
    values = {name: any_rows.vocabulary(train, column) for name, column in KEYS.items()}
    edges, (mean, std) = any_rows.edges(train, NUMBERS["size"]), any_rows.moments(train, NUMBERS["age"])
    for name, rows in splits.items():
        found = read_split(dataset, name)
        assert len(found) == len(rows)
        for row, got in zip(rows, found, strict=True):
            assert got["clicked"] == row["clicked"] and got["importance"] == row["importance"]
            assert got["at"] == row["at"] and got["price"] == (row["price"] or 0)
            age = 0 if row["age"] is None else (row["age"] - mean) / std
            assert got["age"] == pytest.approx(age, rel=1e-6, abs=1e-7)
            size = 0 if row["size"] is None else 1 + sum(edge <= row["size"] for edge in edges)
            assert got["size"] == size
            for feature, column in KEYS.items():
                assert got[feature] == any_rows.ids(row, column, values[feature]), feature
        if rows:
            assert manifest.splits[name].label_rate == pytest.approx(np.mean([row["clicked"] for row in rows]))
    for feature, column in KEYS.items():
        check_vocabulary(dataset, manifest, column, train, values[feature])
    assert manifest.preparation["learnt"]["size"]["edges"] == edges
    assert manifest.preparation["learnt"]["age"]["mean"] == pytest.approx(mean)
    return manifest


def check_vocabulary(dataset: Path, manifest: Manifest, column: KeyColumn, train: list[Row], values: list[Any]) -> None:
    counts = Counter(value for row in train for value in any_rows.values_of(row, column))
    assert read_vocabulary(dataset, column.name) == [
        (place, value, counts[value]) for place, value in enumerate(values, start=2)
    ]
    feature = next(each for each in manifest.schema.categorical if each.name == column.name)
    assert feature.num_embeddings == 2 + len(values) and feature.multi_hot == column.is_list
    assert feature.max_ids_per_row == column.max_length
    if column.is_list:
        assert feature.mean_ids_per_row == pytest.approx(np.mean([len(row[column.name]) for row in train]))
    rare = [value for value in counts if value is not None and value not in values]
    entry = manifest.vocabularies[column.name]
    missing = sum(not row[column.name] for row in train) if column.is_list else counts[None]
    dropped = sum(counts[value] for value in rare)
    assert (entry.num_ids, entry.num_dropped, entry.rows_dropped, entry.rows_missing) == (
        len(values),
        len(rare),
        dropped,
        missing,
    )


@pytest.mark.parametrize("count", [2, 3, 251])
def test_every_kind_of_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(write_parquet, "ROW_GROUP_ROWS", 64)
    rows = random_rows(count, count)
    third = count // 3
    source = PythonRows(LAYOUT, [rows[:third], [], rows[third:]])
    prepare_rows(source, tmp_path / "out", PrepareOptions("1/2,1/4,1/4"))
    stops = [count // 2, count * 3 // 4]
    manifest = check_against_reference(
        tmp_path / "out", {"train": rows[: stops[0]], "validation": rows[stops[0] : stops[1]], "test": rows[stops[1] :]}
    )
    assert not verify_dataset(tmp_path / "out").problems
    assert (manifest.schema.weight, manifest.schema.time, manifest.schema.label) == ("importance", "at", "clicked")
    assert [each.num_rows for each in manifest.sources] == [third, 0, count - third]


def test_batches_have_all_columns(tmp_path: Path) -> None:
    rows = random_rows(60, 3)
    manifest = prepare_rows(PythonRows(LAYOUT, [rows]), tmp_path / "out", PrepareOptions("none"))
    (batch,) = BatchReader(tmp_path / "out", "train", BatchOrder(100, False, 0, False))
    assert batch["weights"].tolist() == [row["importance"] for row in rows]
    assert batch["labels"].tolist() == [row["clicked"] for row in rows]
    assert batch["sparse_features"]["genres"].lengths().tolist() == [len(row["genres"]) for row in rows]
    assert list(manifest.splits) == ["train"]


@pytest.mark.parametrize(("part_rows", "split"), [(9, "time:0.7,0.1,0.2"), (70, "column:part")])
def test_bytes_depend_on_rows_and_options_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_rows: int | None, split: str
) -> None:
    monkeypatch.setattr(write_parquet, "ROW_GROUP_ROWS", 64)
    rows: list[Row | str] = [*random_rows(150, 1)]
    rows[3:3] = rows[100:100] = ["odd\tone"]
    options = PrepareOptions(split, max_rejected=0.1)
    prepare_rows(PythonRows(LAYOUT, [rows]), tmp_path / "once", options)
    monkeypatch.setattr(ResourceLimits, "counting_bytes", 1)
    limits = ResourceLimits(threads=3)
    source = PythonRows(LAYOUT, [rows], block_rows=13, part_rows=part_rows)
    prepare_rows(source, tmp_path / "out", options, limits)
    assert folder_bytes(tmp_path / "once") == folder_bytes(tmp_path / "out")


def test_malformed_rows_are_listed_in_the_order_of_the_input(tmp_path: Path) -> None:
    rows: list[Row | str] = [*random_rows(40, 1)]
    for place in (33, 20, 0):
        rows.insert(place, f"odd {place}\nand more")
    source = PythonRows(LAYOUT, [rows[:25], rows[25:]], block_rows=4, part_rows=9)
    manifest = prepare_rows(source, tmp_path / "out", PrepareOptions(max_rejected=0.5))
    places = [line for line, row in enumerate(rows) if isinstance(row, str)]
    names = [("in0", place + 1) if place < 25 else ("in1", place - 24) for place in places]
    lines = (tmp_path / "out" / "rejected.tsv").read_text().split("\n")
    expected = [f"{name}\t{line}\todd\t{rows[place]}" for (name, line), place in zip(names, places, strict=True)]
    assert lines == ["file\tline\treason\trow", *(text.replace("\n", "\\n") for text in expected), ""]
    assert manifest.rejected.by_reason == {"odd": 3}
    assert [each.num_rejected for each in manifest.sources] == [2, 1]
    assert sum(split.num_rows for split in manifest.splits.values()) == 40
    with pytest.raises(UserError, match=r"3 of 43 rows are malformed(.|\n)*place/in0:1: odd: 'odd 0"):
        prepare_rows(source, tmp_path / "few", PrepareOptions(max_rejected=0.01))


PLAIN = BlockLayout(LAYOUT.numbers[2:4], (LAYOUT.ids[-1],), ())
"""Of :data:`LAYOUT`, the columns that tell rows apart and say their split."""


def check_splits(folder: Path, rows: list[Row], split: str, expected: dict[str, list[Row]]) -> None:
    """Prepares rows, and checks which of them are in which split."""
    manifest = prepare_rows(PythonRows(PLAIN, [rows]), folder / "out", PrepareOptions(split))
    assert list(manifest.splits) == list(expected)
    assert {path.name for path in (folder / "out").iterdir() if path.is_dir()} == set(expected)
    for name, own in expected.items():
        found = [(row["at"], row["price"]) for row in read_split(folder / "out", name)]
        assert found == [(row["at"], row["price"] or 0) for row in own]


@pytest.mark.parametrize(
    ("text", "num_rows"),
    # floating point would make 6 rows of 0.7
    [
        ("0.8,0.1,0.1", 200),
        ("0.5,0,0.5", 200),
        ("0.3,0.7,0", 200),
        ("1,0,0", 200),
        ("0.7,0.2,0.1", 10),
        ("0.8,0.1,0.1", 2),
    ],
)
@pytest.mark.parametrize("by_time", [False, True])
def test_shares(tmp_path: Path, text: str, num_rows: int, by_time: bool) -> None:
    """Rows of a time are all in one split; a split without a share is left out."""
    rows, shares = random_rows(num_rows, 5), [Fraction(share) for share in text.split(",")]
    places = [row["at"] for row in rows] if by_time else list(range(num_rows))
    names = [name for name, share in zip(SPLIT_NAMES, shares, strict=True) if share]
    stops = [int(num_rows * sum(shares[: k + 1])) for k, share in enumerate(shares) if share][:-1]
    begins = [sorted(places)[stop] for stop in stops]
    splits: dict[str, list[Row]] = {name: [] for name in names}
    for row, place in zip(rows, places, strict=True):
        splits[names[sum(place >= begin for begin in begins)]].append(row)
    check_splits(tmp_path, rows, f"time:{text}" if by_time else text, splits)
    if by_time and (text, num_rows) == ("0.8,0.1,0.1", 200):  # ids are those of the rows that train
        prepare_rows(PythonRows(LAYOUT, [rows]), tmp_path / "all", PrepareOptions(f"time:{text}"))
        check_against_reference(tmp_path / "all", splits)


@pytest.mark.parametrize(
    ("split", "begins"),
    [
        ("time:1970-01-01", [0]),
        ("time:-36000,7200", [-36000, 7200]),
        ("time:1969-12-31T14:00:00,1970-01-01T02:00:00", [-36000, 7200]),
        ("time:1969-12-31T16:00:00+02:00", [-36000]),
    ],
)
def test_times(tmp_path: Path, split: str, begins: list[int]) -> None:
    rows = random_rows(150, 6)
    names = SPLIT_NAMES if len(begins) == 2 else ("train", "test")
    parts = [names[sum(row["at"] >= begin for begin in begins)] for row in rows]
    expected = {name: [row for row, part in zip(rows, parts, strict=True) if part == name] for name in names}
    check_splits(tmp_path, rows, split, expected)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ({}, "column:part"),
        ({"train": "a", "validation": "b", "test": "ß"}, "column:part=a,b,ß"),
        ({"validation": "test"}, "column:part=train,test"),
    ],
)
def test_a_column_says_the_split(tmp_path: Path, words: dict[str, str], named: str) -> None:
    rows = random_rows(120, 7)
    for row in rows:
        row["part"] = words.get(row["part"], row["part"])
    spoken = {words.get(name, name): name for name in SPLIT_NAMES if words.get(name) != "test"}
    expected = {name: [row for row in rows if row["part"] == word] for word, name in spoken.items()}
    check_splits(tmp_path, rows, named, expected)


@pytest.mark.parametrize(
    ("split", "said"),
    [
        ("time:0.5,0.5,0.5", "three shares that add up to 1"),
        ("time:2,1", "in rising order"),
        ("time:yesterday", "in rising order"),
        ("time:1,2,3,4", "in rising order"),
        ("column:", "name of a column"),
        ("column:a=x", "name of a column"),
        ("column:a=x,x", "name of a column"),
        ("column:site", "which the rows do not have"),
        ("0,0.5,0.5", "three shares"),
        ("tomorrow", "'days'; 'none'"),
    ],
)
def test_impossible_splits(tmp_path: Path, split: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        prepare_rows(PythonRows(LAYOUT, [random_rows(9, 1)]), tmp_path / "out", PrepareOptions(split))


def test_splits_that_rows_do_not_have(tmp_path: Path) -> None:
    unknown: list[list[Row]] = [[{**row, "part": value} for row in random_rows(9, 7)] for value in ("dev", None)]
    timeless, price = BlockLayout((NumberColumn("price", "dense", FLOAT32),), (), ()), [{"price": 1.0}] * 9
    for rows, layout, split, said in [
        (unknown[0], LAYOUT, "column:part", "in0: the column 'part' has 'dev' in some row.*train, validation, test"),
        (unknown[1], LAYOUT, "column:part", "in0: the column 'part' has no value in some row.*train, validation, test"),
        (price, timeless, "time:0.5,0,0.5", "rows have no time column"),
    ]:
        with pytest.raises(UserError, match=said):
            prepare_rows(PythonRows(layout, [rows]), tmp_path / "out", PrepareOptions(split))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("keeps", [(True, True), (True, False), (False, False)])
def test_missing_numbers(tmp_path: Path, keeps: tuple[bool, bool]) -> None:
    """They are null where they are kept; of the other columns they are 0, which is the mean once standardised."""
    plain = NumberColumn("plain", "dense", FLOAT32, keeps_missing=keeps[0])
    scaled = NumberColumn("scaled", "dense", FLOAT32, "standardize", keeps_missing=keeps[1])
    layout = BlockLayout((plain, scaled), (), ())
    rows = [{"plain": value, "scaled": value} for value in (1.0, None, 3.0, None)]
    manifest = prepare_rows(PythonRows(layout, [rows]), tmp_path / "out", PrepareOptions("none"))
    found = read_split(tmp_path / "out", "train")
    assert manifest.schema.missing_dense == any(keeps) and manifest.schema.label is None
    for name, kept, known in (("plain", keeps[0], (1, 3)), ("scaled", keeps[1], (-1, 1))):
        missing = None if kept else 0
        assert [row[name] for row in found] == [known[0], missing, known[1], missing]


def test_columns_without_any_value(tmp_path: Path) -> None:
    layout = BlockLayout(
        (
            NumberColumn("scaled", "dense", FLOAT32, "standardize"),
            NumberColumn("bin", "bins", FLOAT32, "quantile_bins", num_bins=5),
        ),
        (KeyColumn("text", "feature", "string"), KeyColumn("list", "feature", "integer", is_list=True)),
        ("bin", "text", "list"),
    )
    rows: list[Row] = [{"scaled": None, "bin": None, "text": None, "list": []}] * 5
    manifest = prepare_rows(PythonRows(layout, [rows]), tmp_path / "out", PrepareOptions("none"))
    assert read_split(tmp_path / "out", "train") == [{"scaled": 0.0, "bin": 0, "text": 0, "list": []}] * 5
    assert [feature.num_embeddings for feature in manifest.schema.categorical] == [2, 2, 2]


def test_hashed_values(tmp_path: Path) -> None:
    """Equal values have equal ids, whatever else there is; lists and texts too."""
    layout = BlockLayout(
        (NumberColumn("price", "dense", FLOAT32),),
        (
            KeyColumn("text", "feature", "string", hash_size=1000, hash_seed=3),
            KeyColumn("list", "feature", "integer", is_list=True, hash_size=1000),
        ),
        ("text", "list"),
    )
    rows: list[Row] = [{"price": 1.0, "text": f"v{i % 7}", "list": [-i, i % 3][: i % 3]} for i in range(50)]
    rows += [{"price": 1.0, "text": None, "list": [None]}]
    for name, given in (("all", rows), ("some", rows[:10])):
        manifest = prepare_rows(PythonRows(layout, [given]), tmp_path / name, PrepareOptions("none"))
        assert not manifest.vocabularies and not (tmp_path / name / "vocabulary").exists()
    found = read_split(tmp_path / "all", "train")
    assert found[:10] == read_split(tmp_path / "some", "train")
    assert found[-1] == {"price": 1.0, "text": 0, "list": [0]}
    by_value: dict[Any, set[int]] = {}
    for row, got in zip(rows, found, strict=True):
        by_value.setdefault(row["text"], set()).add(got["text"])
        assert len(got["list"]) == len(row["list"])
    assert all(len(seen) == 1 for seen in by_value.values()) and len(set.union(*by_value.values())) == 8


def test_two_texts_with_one_key_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = BlockLayout((NumberColumn("at", "time", INT64),), (KeyColumn("text", "feature", "string"),), ("text",))
    monkeypatch.setattr(vocabulary, "text_keys", lambda texts: np.full(len(texts), 42, np.uint64))
    rows = [{"at": 0, "text": text} for text in ("same", "same", "other")]
    prepare_rows(PythonRows(layout, [rows[:2]], block_rows=1), tmp_path / "fine", PrepareOptions("none"))
    with pytest.raises(UserError, match="'same' and 'other' of column 'text' have the same 64-bit key"):
        prepare_rows(PythonRows(layout, [rows], block_rows=1), tmp_path / "out", PrepareOptions("none"))


def test_deviations_are_exact_over_huge_and_tiny_numbers(tmp_path: Path) -> None:
    layout = BlockLayout((NumberColumn("x", "dense", FLOAT32, "standardize"),), (), ())
    rows = [{"x": value} for value in (1e30, -1e30, 1.0, 2.0)] * 3
    for name, order in (("a", rows), ("b", rows[::-1])):
        manifest = prepare_rows(PythonRows(layout, [order], block_rows=2), tmp_path / name, PrepareOptions("none"))
        learnt = manifest.preparation["learnt"]["x"]
        assert learnt["mean"] == 0.75 and math.isfinite(learnt["std"])
