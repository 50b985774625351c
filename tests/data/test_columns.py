"""Labels that are numbers or not there, numbers that may be missing, and lists of numbers beside lists of ids.

What batches hold is compared with the rows of the files as pyarrow reads them.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.data import CategoricalFeature, Manifest, Schema, create_manifest
from distembed.data.dataset.row_groups import verify_dataset
from distembed.data.prepare.pipeline import dataset_warnings, describe_dataset
from distembed.data.reader import Batch
from distembed.planning.fake_batches import typical_batch
from tests.data.small_dataset import SCHEMA, open_reader

USER, ITEM = CategoricalFeature("user", 100), CategoricalFeature("item", 50, multi_hot=True, mean_ids_per_row=2.5)
HOUR = CategoricalFeature("hour", 24, multi_hot=True, mean_ids_per_row=2.5)
SEQUENCES = Schema(None, (), (USER, ITEM, HOUR), ("price", "dwell"))


def sequence_rows(num_rows: int) -> dict[str, pa.Array]:
    """Returns rows with lists of 0 to 5 entries, in no order of their values; every seventh row's lists are null."""
    drawn = np.random.default_rng(5)
    columns: dict[str, list] = {"user": list(range(num_rows)), "item": [], "hour": [], "price": [], "dwell": []}
    for row in range(num_rows):
        length = int(drawn.integers(0, 6))
        columns["item"].append(None if row % 7 == 0 else drawn.integers(0, 50, length).tolist())
        columns["hour"].append(None if row % 7 == 0 else drawn.integers(0, 24, length).tolist())
        columns["price"].append(None if row % 7 == 0 else drawn.normal(size=length).astype(np.float32).tolist())
        columns["dwell"].append([] if row % 7 == 0 else drawn.integers(0, 9, length).tolist())
    types = {"user": pa.int32(), "item": pa.list_(pa.int32()), "hour": pa.list_(pa.int8())}
    return {name: pa.array(values, types.get(name, pa.list_(pa.float32()))) for name, values in columns.items()}


def write(folder: Path, schema: Schema, columns: dict, group_rows: int = 11) -> Path:
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), folder / "a.parquet", row_group_size=group_rows)
    create_manifest(folder, schema, {"all": ["a.parquet"]})
    return folder


def lists(features: KeyedJaggedTensor, name: str) -> list[list]:
    """Returns a column's lists, cut by its lengths."""
    ends = [0, *features[name].lengths().cumsum(0).tolist()]
    return [features[name].values()[start:end].tolist() for start, end in pairwise(ends)]


def rows_of(batches: Sequence[Batch]) -> dict[int, tuple[list, ...]]:
    """Returns the lists of each row by its user."""
    rows: dict[int, tuple[list, ...]] = {}
    for batch in batches:
        ids, numbers = batch["sparse_features"], batch["dense_sequences"]
        assert ids.stride() == numbers.stride() and numbers.values().dtype == torch.float32
        columns = (lists(ids, "item"), lists(ids, "hour"), lists(numbers, "price"), lists(numbers, "dwell"))
        rows |= dict(zip(ids["user"].values().tolist(), zip(*columns, strict=True), strict=True))
    return rows


@pytest.mark.parametrize(("shuffle", "batch_size", "world_size"), [(False, 40, 1), (True, 7, 1), (True, 13, 3)])
def test_sequences_keep_their_order(tmp_path: Path, shuffle: bool, batch_size: int, world_size: int) -> None:
    folder = write(tmp_path, SEQUENCES, sequence_rows(61))
    read = [
        rows_of(list(open_reader(folder, batch_size, shuffle=shuffle, rank=rank, world_size=world_size)))
        for rank in range(world_size)
    ]
    table = pq.read_table(folder / "a.parquet").to_pylist()
    names = ("item", "hour", "price", "dwell")
    expected = {row["user"]: tuple(list(row[name] or []) for name in names) for row in table}
    assert sum(map(len, read)) == 61 and {user: rows for part in read for user, rows in part.items()} == expected


def test_a_rank_without_rows(tmp_path: Path) -> None:
    folder = write(tmp_path, SEQUENCES, sequence_rows(1))
    parts = [list(open_reader(folder, 8, rank=rank, world_size=3)) for rank in range(3)]
    assert sorted(batch["sparse_features"].stride() for (batch,) in parts) == [0, 0, 1]
    for (batch,) in parts:
        assert set(batch.fields) == {"dense_features", "sparse_features", "dense_sequences"}
        assert batch["dense_sequences"].keys() == ["price", "dwell"]
        assert batch["dense_sequences"].values().dtype == torch.float32


def test_nothing_but_lists(tmp_path: Path) -> None:
    columns = {"item": [[3, 1], [], [2]], "price": [[0.5, 0.25], [], [1.0]]}
    folder = write(tmp_path, Schema(None, (), (ITEM,), ("price",)), columns)
    (batch,) = open_reader(folder, shuffle=False)
    assert lists(batch["sparse_features"], "item") == columns["item"]
    assert lists(batch["dense_sequences"], "price") == columns["price"]
    assert batch["dense_features"].shape == (3, 0)


def test_numbers_are_as_long_as_their_own_list_and_lists_are_cut_to_the_last_ids(tmp_path: Path) -> None:
    item = CategoricalFeature("item", 50, True, 2.0, max_ids_per_row=2)
    columns = {
        "item": [[3, 1, 4], [], [2, 7]],
        "hour": [[5], [6, 1, 1, 2], []],
        "price": [[0.5, 0.25, 1.5], [], [1.0, 3.0]],
        "share": [[1.0], [2.0, 3.0, 4.0, 5.0], []],
    }
    schema = Schema(None, (), (item, HOUR), ("price", "share"), beside=("item", "hour"))
    assert Schema.from_json(schema.to_json()) == schema
    (batch,) = open_reader(write(tmp_path, schema, columns), shuffle=False)
    ids, numbers = batch["sparse_features"], batch["dense_sequences"]
    assert lists(ids, "item") == [[1, 4], [], [2, 7]] and lists(ids, "hour") == columns["hour"]
    assert lists(numbers, "price") == [[0.25, 1.5], [], [1.0, 3.0]] and lists(numbers, "share") == columns["share"]
    wrong = write(tmp_path / "wrong", schema, columns | {"share": [[1.0], [2.0], []]})
    with pytest.raises(UserError, match="row group 0, column 'share': row 1 has 1 numbers, and 'hour' has 4 values"):
        list(open_reader(wrong))
    typical = typical_batch(schema, 100)
    assert typical["dense_sequences"].length_per_key() == typical["sparse_features"].length_per_key()
    with pytest.raises(UserError, match="beside is item, user: name one of the list columns"):
        Schema(None, (), (USER, item, HOUR), ("price", "share"), beside=("item", "user"))


@pytest.mark.parametrize("is_wide", [False, True])
def test_ratings(tmp_path: Path, is_wide: bool) -> None:
    """Any finite number is a label, and a column of another feature's table is read as any other."""
    size = 2**33 if is_wide else 100
    features = (CategoricalFeature("user", size), CategoricalFeature("friend", size, table="user"))
    schema = Schema("rating", ("age",), features, label_kind="number")
    columns = {
        "rating": [3.5, -1.0, 5.0, 2.25],
        "age": [1, 2, 3, 4],
        "user": [size - 1, 0, 7, 8],
        "friend": [1, 2, size - 2, 3],
    }
    folder = write(tmp_path, schema, columns)
    (batch,) = open_reader(folder, shuffle=False)
    table = pq.read_table(folder / "a.parquet").to_pydict()
    assert batch["labels"].tolist() == table["rating"]
    assert {name: batch["sparse_features"][name].values().tolist() for name in ("user", "friend")} == {
        name: table[name] for name in ("user", "friend")
    }
    manifest = Manifest.load(folder)
    assert manifest.schema == schema and manifest.splits["all"].label_rate == np.mean(columns["rating"])
    assert list(describe_dataset(manifest, folder))[0] == "all: 4 rows, mean label 2.4375"


def test_a_dataset_without_labels(tmp_path: Path) -> None:
    folder = write(tmp_path, SEQUENCES, sequence_rows(20))
    manifest = Manifest.load(folder)
    assert manifest.splits["all"].num_rows == 20 and manifest.splits["all"].label_rate is None
    assert list(describe_dataset(manifest, folder))[0] == "all: 20 rows"
    assert not verify_dataset(folder).problems
    splits = {"train": manifest.splits["all"]}
    assert not list(dataset_warnings(Manifest(manifest.schema, splits)))


def test_missing_numbers(tmp_path: Path) -> None:
    columns = {
        "y": [0, 1, 0],
        "a": pa.array([1, None, 3], pa.int64()),
        "b": [float("nan"), 2.0, None],
        "item": [[1], [2, 3], []],
        "price": [[None], [float("nan"), 2.0], []],
    }
    schema = Schema("y", ("a", "b"), (ITEM,), ("price",), missing_dense=True)
    (batch,) = open_reader(write(tmp_path, schema, columns), shuffle=False)
    nan = float("nan")
    expected = torch.tensor([[1.0, nan], [nan, 2.0], [3.0, nan]])
    assert torch.equal(batch["dense_features"].isnan(), expected.isnan())
    assert torch.equal(batch["dense_features"].nan_to_num(), expected.nan_to_num())
    assert batch["dense_sequences"].values().isnan().tolist() == [True, True, False]


CLICK_ROWS = {
    "clicked": [0, 1, 0],
    "x": [1.0] * 3,
    "y": [1] * 3,
    "row": [1, 2, 3],
    "tags": [[1]] * 3,
    "bucket": [1] * 3,
}
RATINGS = Schema("rating", ("age",), (ITEM,), ("price",), label_kind="number", missing_dense=True)
RATING_ROWS = {"rating": [1.0, 2.0, 3.0], "age": [1.0] * 3, "item": [[1, 2], [], [3]], "price": [[1.0, 2.0], [], [3.0]]}


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("clicked", [0.0, None, 1.0], "1 values are null"),
        ("clicked", [0.0, float("nan"), 1.0], "row 1 is nan"),
        ("clicked", [0.0, 1.0, 5.0], "row 2 is 5.0; a label is 0 or 1"),
        ("x", [0.0, float("inf"), 1.0], "row 1 is inf"),
        ("row", [1, 10_000, 2], r"id 10000 is outside \[0, 10000\)"),
        ("row", [1, -1, 2], "id -1 is outside"),
        ("row", [1, 2**40, 2], "id 1099511627776 is outside"),
        ("row", [1, None, 2], "1 rows have no id"),
        ("tags", [[1], [50], []], "id 50 is outside"),
        ("tags", [[1], [None], []], "a list holds a null"),
        ("rating", [1.0, None, 2.0], "1 values are null; leave such rows out"),
        ("rating", [1.0, 2.0, float("inf")], "row 2 is inf; every value must be a finite number"),
        ("rating", [1.0, float("nan"), 0.0], "row 1 is nan; .* leave such rows out"),
        ("age", [1.0, float("-inf"), 0.0], "row 1 is -inf"),
        ("age", [1.0, 1e300, 0.0], "row 1 is inf"),
        ("price", [[1.0, 2.0], [], [float("inf")]], "row 2 is inf"),
        ("price", [[1.0], [], [1.0]], "row 0 has 1 numbers, and 'item' has 2 values there"),
        ("price", [[1.0, 2.0], [0.5], [1.0]], "row 1 has 1 numbers, and 'item' has 0 values"),
        ("price", [[1.0, 2.0], None, None], "row 2 has 0 numbers, and 'item' has 1 values there"),
    ],
)
def test_impossible_values(tmp_path: Path, column: str, values: list, message: str) -> None:
    schema, rows = (SCHEMA, CLICK_ROWS) if column in CLICK_ROWS else (RATINGS, RATING_ROWS)
    folder = write(tmp_path, schema, rows | {column: values})
    for prefetch_batches in (0, 4):
        with pytest.raises(UserError, match=f"a.parquet, row group 0, column {column!r}: {message}"):
            list(open_reader(folder, prefetch_batches=prefetch_batches))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"price": [[1.0], [None]]}, "column 'price': 1 values are null; fill them in, .* set missing_dense"),
        ({"age": [1.0, float("nan")]}, "column 'age': row 1 is nan; .* fill them in, .* set missing_dense"),
        ({"y": [0.0, 3.5]}, "column 'y': row 1 is 3.5; a label is 0 or 1, unless .* label_kind 'number'"),
    ],
)
def test_values_that_another_schema_allows(tmp_path: Path, changes: dict, message: str) -> None:
    columns = {"y": [0, 1], "age": [1.0, 2.0], "item": [[1], [2]], "price": [[1.0], [2.0]]}
    folder = write(tmp_path, Schema("y", ("age",), (ITEM,), ("price",)), columns | changes)
    with pytest.raises(UserError, match=message):
        list(open_reader(folder))


def test_the_row_of_an_error_is_counted_in_its_row_group(tmp_path: Path) -> None:
    """Lanes read parts of row groups; an error counts rows from the row group's first."""
    prices = [[1.0] for _ in range(30)]
    prices[25] = [1.0, 2.0]
    columns = {"item": [[1]] * 30, "price": prices}
    folder = write(tmp_path, Schema(None, (), (ITEM,), ("price",)), columns, group_rows=20)
    with pytest.raises(UserError, match="row group 1, column 'price': row 5 has 2 numbers"):
        list(open_reader(folder, 4))


@pytest.mark.parametrize("values", [[1.0, 2.0], [["a"], ["b"]]])
def test_columns_that_are_no_lists_of_numbers(tmp_path: Path, values: list) -> None:
    with pytest.raises(UserError, match="column 'price': its type is .*; a dense sequence is a list of numbers"):
        write(tmp_path, Schema(None, (), (ITEM,), ("price",)), {"item": [[1], [2]], "price": values})


def test_batches_of_lists_are_written(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", SEQUENCES, sequence_rows(9))
    (batch,) = open_reader(folder, shuffle=False)
    batch.write(tmp_path / "rows.npz")
    rows = np.load(tmp_path / "rows.npz")
    assert rows["feature_names"].tolist() == ["user", "item", "hour"]
    assert rows["ids"].tolist() == batch["sparse_features"].values().tolist()
    assert rows["dense_sequences_names"].tolist() == ["price", "dwell"]
    assert rows["dense_sequences"].tolist() == batch["dense_sequences"].values().tolist()
    assert rows["dense_sequences_lengths"].tolist() == batch["dense_sequences"].lengths().tolist()


def test_an_estimates_batch_is_as_a_readers(tmp_path: Path) -> None:
    """A network is estimated on a batch of the same fields, keys and types."""
    (read,) = open_reader(write(tmp_path, SEQUENCES, sequence_rows(9)), shuffle=False)
    empty = typical_batch(SEQUENCES, 10)
    assert set(empty.fields) == set(read.fields)
    for name in ("sparse_features", "dense_sequences"):
        assert empty[name].keys() == read[name].keys() and empty[name].values().dtype == read[name].values().dtype
    assert empty["dense_sequences"].length_per_key() == [30, 30]
