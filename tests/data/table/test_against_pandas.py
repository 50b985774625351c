"""Avazu's, MovieLens' and Criteo's rows by their shipped schemas, held against what pandas makes of the same files."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from distembed.data import Manifest
from distembed.data.prepare import ResourceLimits
from distembed.data.prepare.table import TableOptions, prepare_table
from distembed.data.table.schema import TableSchema
from distembed.data.table.schema_files import load_schema
from distembed.errors import UserError

AVAZU_HEXADECIMAL = (
    *("site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category"),
    *("device_id", "device_ip", "device_model"),
)
AVAZU_INTEGER = ("C1", "banner_pos", "device_type", "device_conn_type", *(f"C{i}" for i in range(14, 22)))
CRITEO = ("label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27)))
GENRES = ("Action", "Film-Noir", "Children's", 'the "others"', "Sci, Fi", "動画")


def avazu(rng: random.Random, num_rows: int) -> pd.DataFrame:
    """Returns click logs, of which the hour is such as 14102107, in no order."""
    columns: dict[str, list[object]] = {"id": [10**18 + i for i in range(num_rows)]}
    columns["click"] = [rng.randrange(2) for _ in range(num_rows)]
    columns["hour"] = [f"1410{rng.randrange(21, 31)}{rng.randrange(24):02d}" for _ in range(num_rows)]
    for name in AVAZU_HEXADECIMAL:
        columns[name] = [None if rng.random() < 0.05 else f"{rng.randrange(40) * 97:08x}" for _ in range(num_rows)]
    for name in AVAZU_INTEGER:
        columns[name] = [str(rng.choice([-1, 0, 1002, 1005, 2**40])) for _ in range(num_rows)]
    return pd.DataFrame(columns).astype(str).where(lambda frame: frame != "None")


def movielens(rng: random.Random, num_rows: int) -> pd.DataFrame:
    """Returns ratings with the titles and genres of their films: quotes, commas, lists, missing values."""
    genres = ["|".join(rng.sample(GENRES, rng.randrange(4))) for _ in range(60)]
    movies = [rng.randrange(60) for _ in range(num_rows)]
    return pd.DataFrame(
        {
            "userId": [str(rng.randrange(1, 30)) for _ in range(num_rows)],
            "movieId": [None if rng.random() < 0.02 else str(movie) for movie in movies],
            "rating": [str(rng.choice([0.5, 3.5, 4.0, 5.0])) for _ in range(num_rows)],
            "timestamp": [str(rng.randrange(10**9, 10**9 + 500)) for _ in range(num_rows)],
            "title": [f'Film "{movie}", The' for movie in movies],
            "genres": [genres[movie] or None for movie in movies],
        }
    )


def criteo(rng: random.Random, num_rows: int) -> pd.DataFrame:
    """Returns Criteo's columns as a table with a header."""
    columns: dict[str, list[object]] = {"label": [str(rng.randrange(2)) for _ in range(num_rows)]}
    for name in CRITEO[1:14]:
        columns[name] = [None if rng.random() < 0.2 else str(rng.randrange(-2, 10**6)) for _ in range(num_rows)]
    for name in CRITEO[14:]:
        columns[name] = [None if rng.random() < 0.1 else f"{rng.randrange(50) * 10**7:08x}" for _ in range(num_rows)]
    return pd.DataFrame(columns)


def seconds(frame: pd.DataFrame, schema: TableSchema) -> pd.Series:
    """Returns the times of rows in seconds since 1970."""
    assert schema.time is not None
    texts = frame[schema.time.column]
    if schema.time.format == "seconds":
        return texts.astype("int64")
    return (pd.to_datetime(texts, format=schema.time.format) - pd.Timestamp("1970-01-01")) // pd.Timedelta(seconds=1)


def split_rows(frame: pd.DataFrame, schema: TableSchema) -> dict[str, pd.DataFrame]:
    """Returns the rows of each split: eight, one and one tenth in the order of time, or of the file."""
    places = [len(frame) * 8 // 10, len(frame) * 9 // 10]
    if schema.time is None:
        order, cuts = pd.Series(np.arange(len(frame))), places
    else:
        order = seconds(frame, schema)
        cuts = [np.sort(order.to_numpy())[place] for place in places]
    return {
        "train": frame[(order < cuts[0]).to_numpy()],
        "validation": frame[((order >= cuts[0]) & (order < cuts[1])).to_numpy()],
        "test": frame[(order >= cuts[1]).to_numpy()],
    }


def numbers_of(values: pd.Series, kind: str) -> pd.Series:
    """Returns the values as what is counted: numbers, or texts."""
    if kind == "string":
        return values
    return values.map(lambda text: int(text, 16 if kind == "hexadecimal" else 10), na_action="ignore")


def ids_of_numbers(train: pd.Series, min_count: int) -> dict[object, int]:
    """Returns the id of each number: from 2 on, the commonest first, equally common ones in ascending order."""
    counts = train.dropna().value_counts()
    kept = counts[counts >= min_count].rename_axis("value").reset_index(name="count")
    kept = kept.sort_values(["count", "value"], ascending=[False, True])
    return {value: number for number, value in enumerate(kept["value"], start=2)}


def ids_of_texts(train: pd.Series, vocabulary: Path, min_count: int) -> dict[object, int]:
    """Returns the id of each text by the vocabulary, once it is found to be the texts by their counts."""
    counts = train.dropna().value_counts()
    stored = pd.DataFrame(pq.read_table(vocabulary).to_pydict())
    assert dict(zip(stored["key"], stored["count"], strict=True)) == counts[counts >= min_count].to_dict()
    assert stored["count"].is_monotonic_decreasing and stored["id"].tolist() == list(range(2, 2 + len(stored)))
    return dict(zip(stored["key"], stored["id"], strict=True))


def require_equal(dataset: Path, frame: pd.DataFrame, schema: TableSchema) -> None:
    """Makes sure that a dataset has, value for value, what pandas makes of the rows."""
    manifest = Manifest.load(dataset)
    splits = split_rows(frame, schema)
    written = {
        name: pq.read_table([dataset / file.path for file in manifest.splits[name].files]).to_pydict()
        for name in splits
    }
    for split, rows in splits.items():
        assert schema.label is not None
        labels = rows[schema.label.column].astype(float)
        if schema.label.at_least is not None:
            labels = labels >= schema.label.at_least
        assert written[split][schema.label.name] == labels.astype(int).tolist()
        for name in schema.dense:
            values = rows[name].astype(float)
            expected = np.log1p(values.clip(lower=0)).fillna(0).to_numpy()
            np.testing.assert_allclose(written[split][name], expected, rtol=3e-7)
    for name, column in schema.categorical.items():
        lists = {
            split: rows[column.column or name].str.split(column.separator or "\n") for split, rows in splits.items()
        }
        values = {split: numbers_of(each.explode(), column.kind) for split, each in lists.items()}
        least = column.min_count or schema.min_count
        file = dataset / manifest.vocabularies[name].file
        by_value = (
            ids_of_texts(values["train"], file, least)
            if column.kind == "string"
            else ids_of_numbers(values["train"], least)
        )
        for split, each in values.items():
            ids = [0 if pd.isna(value) else by_value.get(value, 1) for value in each]
            if column.separator is None:
                assert written[split][name] == ids, (split, name)
            else:
                of_rows = pd.Series(ids, each.index)[each.notna().to_numpy()].groupby(level=0).agg(list)
                rows = [of_rows.get(row, []) for row in splits[split].index]
                assert written[split][name] == rows, (split, name)


def write_csv(frame: pd.DataFrame, path: Path) -> None:
    frame.to_csv(path, index=False)


def write_parquet(frame: pd.DataFrame, path: Path) -> None:
    frame.to_parquet(path, row_group_size=300)


@pytest.mark.parametrize("write", [write_csv, write_parquet], ids=["csv", "parquet"])
@pytest.mark.parametrize("name, make", [("avazu", avazu), ("movielens", movielens), ("criteo", criteo)])
def test_shipped_schemas_give_what_pandas_gives(
    name: str,
    make: Callable[[random.Random, int], pd.DataFrame],
    write: Callable[[pd.DataFrame, Path], None],
    tmp_path: Path,
) -> None:
    frame = make(random.Random(5), 1001)
    schema = load_schema(name)
    if name == "criteo":  # as published it has no header
        schema = with_header(schema)
    path = tmp_path / f"rows.{'csv' if write is write_csv else 'parquet'}"
    write(frame, path)
    prepare_table([path], tmp_path / "dataset", schema, limits=ResourceLimits(threads=1))
    require_equal(tmp_path / "dataset", frame, schema)


def with_header(schema: TableSchema) -> TableSchema:
    """Returns Criteo's schema for tables whose files name their columns and separate them by commas."""
    return TableSchema.from_json({**schema.to_json(), "text": {}, "parser": "table"}, "the test")


def test_the_schema_is_that_of_the_dataset_whose_ids_are_applied(tmp_path: Path) -> None:
    for name, seed in (("days.csv", 5), ("next.csv", 6)):
        write_csv(avazu(random.Random(seed), 301), tmp_path / name)
    one_thread = ResourceLimits(threads=1)
    prepare_table([tmp_path / "days.csv"], tmp_path / "days", "avazu", limits=one_thread)
    known = TableOptions(vocabulary=tmp_path / "days", split="test")
    told = prepare_table([tmp_path / "next.csv"], tmp_path / "told", "avazu", known, one_thread)
    taken = prepare_table([tmp_path / "next.csv"], tmp_path / "taken", options=known, limits=one_thread)
    assert taken == told and taken.splits["test"].num_rows == 301
    with pytest.raises(UserError, match=r"schema \(--schema\) is missing"):
        prepare_table([tmp_path / "next.csv"], tmp_path / "other")
