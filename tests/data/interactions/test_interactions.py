"""Prepared ratings and sequences against loops over the same interactions, written here by hand."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import Manifest
from distembed.data.prepare.count import Database
from distembed.data.prepare.interactions import (
    InteractionColumns,
    InteractionFiles,
    Preparation,
    RatingOptions,
    SequenceOptions,
    prepare_ratings,
    prepare_sequences,
)
from distembed.data.prepare.interactions.preparation import select
from distembed.data.prepare.interactions.tables import evaluation_windows, training_windows

TIMED = InteractionColumns(rating="rating", time="time")


def some_rows(num_rows: int, seed: int = 0) -> list[tuple[str, str, int, int]]:
    """Returns distinct pairs of a user and an item, with a rating and a time of which some are equal."""
    rng = np.random.default_rng(seed)
    pairs = {(f"u{u}", f"i {i}\tx") for u, i in rng.integers(0, (30, 40), (num_rows, 2)).tolist()}
    return [(u, i, int(rng.integers(1, 6)), int(rng.integers(0, 50))) for u, i in sorted(pairs)]


def write_rows(
    path: Path, rows: list[tuple[Any, ...]], names: tuple[str, ...] = ("user", "item", "rating", "time")
) -> Path:
    table = pa.table({name: [row[column] for row in rows] for column, name in enumerate(names)})
    pq.write_table(table, path) if path.suffix == ".parquet" else pcsv.write_csv(table, path)
    return path


def read(dataset: Path, split: str) -> list[dict[str, Any]]:
    """Returns the rows of a split, with raw users and items for their ids."""
    manifest = Manifest.load(dataset)
    tables = [pq.read_table(dataset / file.path) for file in manifest.split(split).files]
    rows = [row for table in tables for row in table.to_pylist()]
    for name in manifest.vocabularies:
        keys = vocabulary(dataset, name)
        for row in rows:
            row[name] = [keys[id_] for id_ in row[name]] if isinstance(row[name], list) else keys[row[name]]
    return rows


def vocabulary(dataset: Path, name: str) -> dict[int, str | None]:
    table = pq.read_table(dataset / Manifest.load(dataset).vocabularies[name].file)
    return {0: None, **dict(zip(table["id"].to_pylist(), table["key"].to_pylist(), strict=True))}


def by_user(rows: list[tuple[str, str, int, int]]) -> dict[str, list[str]]:
    """Returns each user's items in the order of time, equal times in the order of the input."""
    users: dict[str, list[tuple[int, str]]] = {}
    for user, item, _, time in rows:
        users.setdefault(user, []).append((time, item))
    return {user: [item for _, item in sorted(entries, key=lambda entry: entry[0])] for user, entries in users.items()}


@pytest.mark.parametrize("split", ["random:0.7,0.2,0.1", "random:1/2,1/2", "time:0.8,0.1,0.1", "last-one", "last-two"])
def test_every_rating_is_in_exactly_one_split(tmp_path: Path, split: str) -> None:
    rows = some_rows(300)
    source = write_rows(tmp_path / ("rows.csv" if split.startswith("random") else "rows.parquet"), rows)
    manifest = prepare_ratings(
        InteractionFiles([source]), Preparation(tmp_path / "out"), TIMED, RatingOptions(split=split)
    )
    found = [
        (row["user"], row["item"], row["rating"]) for part in manifest.splits for row in read(tmp_path / "out", part)
    ]
    assert sorted(found) == sorted((user, item, float(rating)) for user, item, rating, _ in rows)
    assert ("validation" in manifest.splits) == (split not in ("random:1/2,1/2", "last-one"))
    train = manifest.splits["train"]
    assert train.label_rate == pytest.approx(np.mean([row["rating"] for row in read(tmp_path / "out", "train")]))
    assert manifest.schema.label == "rating" and manifest.schema.label_kind == "number"


def test_ids_are_by_frequency_over_all_splits(tmp_path: Path) -> None:
    rows = some_rows(300)
    prepare_ratings(InteractionFiles([write_rows(tmp_path / "rows.csv", rows)]), Preparation(tmp_path / "out"), TIMED)
    for column, name in enumerate(("user", "item")):
        counts = Counter(row[column] for row in rows)
        wanted = sorted(counts, key=lambda key: (-counts[key], key))
        assert vocabulary(tmp_path / "out", name) == {0: None, **dict(enumerate(wanted, start=2))}


@pytest.mark.parametrize(
    ("split", "max_length"),
    [("last-two", 1), ("last-two", 50), ("last-one", 3), ("time:0.6,0.2,0.2", 3), ("time:0.6,0.2,0.2", 50)],
)
def test_each_item_but_a_users_first_is_predicted_once(tmp_path: Path, split: str, max_length: int) -> None:
    rows = some_rows(300)
    source = write_rows(tmp_path / "rows.csv", rows)
    options = SequenceOptions(split=split, max_length=max_length, windows="all")
    manifest = prepare_sequences(
        InteractionFiles([source]), Preparation(tmp_path / "out"), InteractionColumns(time="time"), options
    )
    histories = by_user(rows)
    predicted = []
    for row in read(tmp_path / "out", "train"):
        assert 2 <= len(row["item"]) <= max_length + 1
        predicted += [(row["user"], item) for item in row["item"][1:]]
    for part in manifest.splits:
        for row in [] if part == "train" else read(tmp_path / "out", part):
            history = histories[row["user"]]
            assert row["item"] == history[: len(row["item"])]
            predicted.append((row["user"], row["item"][-1]))
    assert sorted(predicted) == sorted((user, item) for user, items in histories.items() for item in items[1:])


def test_the_last_two_items_are_tested_and_validated(tmp_path: Path) -> None:
    rows = some_rows(200)
    source = write_rows(tmp_path / "rows.csv", rows)
    prepare_sequences(
        InteractionFiles([source]),
        Preparation(tmp_path / "out"),
        InteractionColumns(time="time"),
        SequenceOptions(max_length=3),
    )
    histories = {user: items for user, items in by_user(rows).items() if len(items) > 2}
    found = {
        part: {row["user"]: row["item"] for row in read(tmp_path / "out", part)} for part in ("validation", "test")
    }
    assert found["test"] == histories
    assert found["validation"] == {user: items[:-1] for user, items in histories.items()}
    for row in read(tmp_path / "out", "train"):
        history = by_user(rows)[row["user"]]
        trained = history if len(history) == 2 else history[:-2]
        assert row["item"] == trained[-4:]


def test_times_stand_beside_the_items_where_they_are_an_attribute_too(tmp_path: Path) -> None:
    """Sequences have the exact time since the user's first interaction, of numbers that float32 does not resolve."""
    rows = [(user, item, rating, 1_700_000_000 + time) for user, item, rating, time in some_rows(200)]
    files = InteractionFiles([write_rows(tmp_path / "rows.csv", rows)])
    columns = InteractionColumns(time="time", dense=("time",))
    prepare_sequences(files, Preparation(tmp_path / "out"), columns, SequenceOptions())
    times = {(user, item): time for user, item, _, time in rows}
    for row in read(tmp_path / "out", "test"):
        assert row["item"] == by_user(rows)[row["user"]]
        own = [times[row["user"], item] for item in row["item"]]
        assert row["time"] == [time - own[0] for time in own]


def naive_core(pairs: list[tuple[int, int]], k: int) -> list[int]:
    """Returns the places of what is left when one user or item with fewer than k is taken away at a time."""
    places = list(range(len(pairs)))
    while True:
        for side in (0, 1):
            counts = Counter(pairs[place][side] for place in places)
            rare = [value for value, count in counts.items() if count < k]
            if rare:
                places = [place for place in places if pairs[place][side] != rare[0]]
                break
        else:
            return places


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=60), st.integers(1, 5))
@settings(max_examples=15)
def test_core_is_the_naive_fixed_point(pairs: list[tuple[int, int]], k: int) -> None:
    wanted = naive_core(pairs, k)
    rows = {"place": range(len(pairs)), **{f"k{side}": [pair[side] for pair in pairs] for side in (0, 1)}}
    batch = pa.record_batch([pa.array(values, pa.int64()) for values in rows.values()], names=list(rows))
    with Database(Path("unused"), 64 << 20) as database:
        database.add("rows", [batch], batch.schema)
        with nullcontext() if wanted else pytest.raises(UserError, match="no interaction is left"):
            select(database, RatingOptions(k_core=k, duplicates="keep"), "place")
        left = [row["place"] for found in database.batches("select place from rows") for row in found.to_pylist()]
    assert sorted(left) == wanted


@given(st.lists(st.integers(1, 12), max_size=8), st.integers(1, 5), st.randoms(use_true_random=False))
@settings(max_examples=30)
def test_windows_cover_what_trains(lengths: list[int], max_length: int, random: Any) -> None:
    users = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    parts = np.concatenate([sorted(random.choices(range(3), k=length)) for length in lengths] or [[]]).astype(np.uint8)
    seen: list[int] = []
    every, latest = (training_windows(users, parts, max_length, windows) for windows in ("all", "latest"))
    for start, stop in zip(every.starts, every.stops, strict=True):
        assert 2 <= stop - start <= max_length + 1 and len(set(users[start:stop])) == 1
        seen += range(start + 1, stop)
    first = np.flatnonzero(np.diff(users, prepend=-1)).tolist()
    assert seen == [row for row in np.flatnonzero(parts == 0).tolist() if row not in first]
    for part in (1, 2):
        seen += (evaluation_windows(users, parts, part).stops - 1).tolist()
    assert sorted(seen) == [row for row in range(len(users)) if row not in first]
    windows = set(zip(every.starts.tolist(), every.stops.tolist(), strict=True))
    assert windows >= set(zip(latest.starts.tolist(), latest.stops.tolist(), strict=True))
    assert len(latest) == len(set(users[every.starts]))


def folder(name: str) -> Path:
    path = os.environ.get(name)
    if not path:
        pytest.skip(f"{name} is unset: it names the folder of the data")
    return Path(path)


def lines(text: Iterator[str]) -> dict[str, list[str]]:
    return {words[0]: words[1:] for words in map(str.split, text)}


@pytest.mark.thorough
def test_sequences_of_beauty_are_those_of_the_file(tmp_path: Path) -> None:
    import gzip

    source = folder("DISTEMBED_BEAUTY") / "amazon_beauty_sequences.txt.gz"
    manifest = prepare_sequences(
        InteractionFiles([source]), Preparation(tmp_path / "out"), options=SequenceOptions(format="lists")
    )
    with gzip.open(source, "rt") as text:
        histories = lines(iter(text))
    assert {row["user"]: row["item"] for row in read(tmp_path / "out", "test")} == histories
    assert {row["user"]: row["item"] for row in read(tmp_path / "out", "train")} == {
        user: items[:-2][-51:] for user, items in histories.items()
    }
    assert [feature.num_embeddings for feature in manifest.schema.categorical] == [22_363 + 2, 12_101 + 2]


def test_ratings_of_movielens_keep_the_authors_split(tmp_path: Path) -> None:
    source = folder("DISTEMBED_MOVIELENS_MF")
    train, test = (source / f"movielens1m_mf_{part}.csv.gz" for part in ("train", "test"))
    columns = InteractionColumns(rating="3", has_header=False)
    files = InteractionFiles([train], test=[test])
    manifest = prepare_ratings(files, Preparation(tmp_path / "out"), columns, RatingOptions(split="files"))
    assert {name: split.num_rows for name, split in manifest.splits.items()} == {"train": 299_200, "test": 338_787}
    names = pcsv.ReadOptions(column_names=["user", "item", "rating"])
    raw = pcsv.read_csv(test, names)
    users, items = (vocabulary(tmp_path / "out", name) for name in ("user", "item"))
    found = pa.concat_tables([pq.read_table(tmp_path / "out" / file.path) for file in manifest.splits["test"].files])
    assert [int(users[id_] or 0) for id_ in found["user"].to_pylist()] == raw["user"].to_pylist()
    assert [int(items[id_] or 0) for id_ in found["item"].to_pylist()] == raw["item"].to_pylist()
    assert found["rating"].to_pylist() == raw["rating"].to_pylist()
