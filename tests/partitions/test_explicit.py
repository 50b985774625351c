"""Explicit partitions: given as arrays or as Parquet columns, checked by looking at every id."""

import datetime
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distembed.base.errors import UserError
from distembed.partitions import Explicit, explicit

# section 3 of the paper: {0}, {1,3,4}, {2}; {0,1,3}, {2,4}; {0,3}, {1,2,4}
PAPER = [[0, 1, 2, 1, 1], [0, 0, 1, 0, 1], [0, 1, 1, 0, 1]]


def test_the_papers_example_is_complementary_and_not_every_two_of_it_are() -> None:
    partition = Explicit(5, PAPER)
    assert partition.num_rows == (3, 2, 2) and partition.is_complementary()
    assert partition.rows(torch.arange(5)).tolist() == PAPER
    with pytest.raises(UserError, match=r"ids 1 and 3 have the same rows, \(1, 0\)"):
        Explicit(5, PAPER[:2])
    with pytest.raises(UserError, match="ids 1 and 4"):
        Explicit(5, [PAPER[0], PAPER[2]])


@settings(max_examples=60)
@given(
    data=st.data(),
    n=st.integers(1, 60),
    num_rows=st.lists(st.sampled_from([1, 2, 5, 8, 2**40]), min_size=1, max_size=4),
)
def test_a_collision_is_found_exactly_where_there_is_one(data: st.DataObject, n: int, num_rows: list[int]) -> None:
    columns = [data.draw(st.lists(st.integers(0, min(m, 9) - 1), min_size=n, max_size=n)) for m in num_rows]
    tuples = list(zip(*columns, strict=True))
    partition = Explicit(n, columns, num_rows, allow_collisions=True)
    pair = partition.colliding_ids()
    assert partition.ids_per_row == n / len(set(tuples))
    if pair is not None:
        with pytest.raises(UserError, match=f"ids {pair[0]} and {pair[1]} .* allow_collisions=True"):
            Explicit(n, columns, num_rows)
    if pair is None:
        assert len(set(tuples)) == n
        assert Explicit(n, columns, num_rows).inverse(torch.tensor(columns)).tolist() == list(range(n))
    else:
        assert pair[0] < pair[1] < n and tuples[pair[0]] == tuples[pair[1]]


@pytest.mark.parametrize("num_rows", [(1000, 1000), (2**40, 2**40)])
def test_one_collision_among_many_ids_is_found(num_rows: tuple[int, int]) -> None:
    n = 1_000_000
    order = np.random.default_rng(0).permutation(n)
    assignments = [order % 1000, order // 1000]
    assert Explicit(n, assignments, num_rows).is_complementary()
    for assigned in assignments:
        assigned[777_777] = assigned[5]
    with pytest.raises(UserError, match="ids 5 and 777777 have the same rows"):
        Explicit(n, assignments, num_rows)


def test_tuples_beyond_63_bits_are_told_apart() -> None:
    assert Explicit(50, [np.arange(50)] * 2, [2**40, 2**40]).is_complementary()
    for last in range(1, 50):
        ids = np.arange(50)
        ids[last] = 0
        assert Explicit(50, [ids] * 2, [2**40, 2**40], allow_collisions=True).colliding_ids() == (0, last)


def test_fewer_tuples_than_ids_collide_at_once() -> None:
    with pytest.raises(UserError, match="2 x 3 rows are not complementary for num_embeddings=1000") as error:
        Explicit(1000, [np.arange(1000) % 2, np.arange(1000) % 3])
    first, second = map(int, re.findall(r"ids (\d+) and (\d+)", str(error.value))[0])
    assert first < second and (second - first) % 6 == 0


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint32, np.uint64])
def test_integers_of_any_width_are_taken_and_copied(dtype: Any) -> None:
    given_array = np.arange(100, dtype=dtype)
    for assigned in (given_array, torch.from_numpy(given_array)):
        partition = Explicit(100, [assigned])
        given_array[0] = 5
        assert partition.rows(torch.arange(100)).tolist() == [list(range(100))]
        given_array[0] = 0


def test_rows_are_stored_at_the_smallest_width() -> None:
    ids = np.arange(300)
    stored = Explicit(300, [ids % 256, ids, ids, ids], num_rows=[256, 300, 2**31, 2**31 + 1]).assignments
    assert [rows.dtype for rows in stored] == [torch.uint8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize(
    "assignments, num_rows, message",
    [
        ([], None, "no assignments"),
        ([[0, 1]], None, r"assignments\[0\] has the shape \(2,\).*num_embeddings=3"),
        ([[[0], [1], [2]]], None, r"shape \(3, 1\)"),
        ([[0, 1, 2], [0, -1, 2]], None, r"assignments\[1\]\[1\] is -1"),
        ([[-1, -1, -1]], None, r"assignments\[0\]\[0\] is -1"),
        ([[0, 1, 2]], [2], r"assignments\[0\]\[2\] is 2; rows lie between 0 and 1 \(num_rows\[0\]=2\)"),
        ([[0, 1, 2]], [0], r"num_rows\[0\] is 0"),
        ([[0, 1, 2]], [3, 3], "1 assignments and 2 numbers in num_rows"),
        ([[0.0, 1.0, 2.0]], None, "float64"),
        ([[True, False, True]], None, "bool"),
        ([["a", "b", "c"]], None, "array of integers"),
    ],
)
def test_assignments_that_do_not_fit_are_refused_by_value(
    assignments: list[Any], num_rows: list[int] | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Explicit(3, assignments, num_rows)


def write(path: Path, **columns: Sequence[Any] | pa.Array) -> str:
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return str(path)


def test_cars_by_make_year_and_type(tmp_path: Path) -> None:
    path = write(
        tmp_path / "cars.parquet",
        make=["volvo", "audi", None, "audi", "volvo"],
        year=[1990, 2020, 1990, 1990, 2020],
        kind=pa.array(["van", "van", "van", "bus", "bus"]).dictionary_encode(),
    )
    partition = Explicit.from_parquet(5, path, ["make", "year", "kind"])
    # by ascending value, null last
    assert partition.rows(torch.arange(5)).tolist() == [[1, 0, 2, 0, 1], [0, 1, 0, 0, 1], [1, 1, 1, 0, 0]]
    assert partition.num_rows == (3, 2, 2)
    with pytest.raises(UserError, match="ids 1 and 3 have the same rows"):
        Explicit.from_parquet(5, path, ["make"])
    assert not Explicit.from_parquet(5, path, ["make"], allow_collisions=True).is_complementary()


DAY = datetime.date(2020, 1, 1)


@pytest.mark.parametrize(
    "values",
    [
        pa.array([2, 1, None, 1], pa.int8()),
        pa.array([2**64 - 1, 1, None, 1], pa.uint64()),
        pa.array([True, False, None, False]),
        pa.array([float("inf"), 0.5, None, 0.5]),
        pa.array([b"b", b"a", None, b"a"]),
        pa.array([DAY, datetime.date(1960, 1, 1), None, datetime.date(1960, 1, 1)]),
        pa.array([datetime.datetime(2020, 1, 2), datetime.datetime(2020, 1, 1), None, datetime.datetime(2020, 1, 1)]),
        pa.array(["ä", "a", None, "a"], pa.large_string()),
        pa.array([2, 1, None, 1], pa.decimal128(5, 2)),
    ],
    ids=lambda values: str(values.type),
)
def test_columns_of_any_plain_type_are_numbered(tmp_path: Path, values: pa.Array) -> None:
    path = write(tmp_path / "table.parquet", column=values)
    partition = Explicit.from_parquet(4, path, ["column"], allow_collisions=True)
    assert partition.rows(torch.arange(4)).tolist() == [[1, 0, 2, 0]]


def test_a_column_of_nothing_is_one_row(tmp_path: Path) -> None:
    path = write(tmp_path / "table.parquet", nothing=pa.nulls(3), id=[0, 1, 2])
    assert Explicit.from_parquet(3, path, ["nothing", "id"]).num_rows == (1, 3)


def test_a_column_read_in_many_batches_is_numbered_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explicit, "_BATCH_ROWS", 7)
    words = [f"word {i * i % 97}" for i in range(500)]
    path = tmp_path / "table.parquet"
    pq.write_table(pa.table({"word": words, "id": np.arange(500)}), path, row_group_size=50)
    partition = Explicit.from_parquet(500, str(path), ["word", "id"])
    numbered = sorted(set(words))
    assert partition.rows(torch.arange(500))[0].tolist() == [numbered.index(word) for word in words]


@pytest.mark.parametrize(
    "n, columns, message",
    [
        (3, ["colour"], "column is 'colour'.*Known: make, tags, year"),
        (3, ["maek"], "Did you mean 'make'"),
        (3, [], r"columns is \[\]"),
        (3, "make", "columns is 'make'"),
        (3, ["make", "year", "make"], "'make' twice"),
        (3, ["tags"], "'tags' has the nested type list"),
        (4, ["make"], "has 3 rows, for num_embeddings=4"),
        (0, ["make"], "num_embeddings is 0"),
    ],
)
def test_columns_that_cannot_be_used_are_refused_by_name(tmp_path: Path, n: int, columns: Any, message: str) -> None:
    path = write(tmp_path / "table.parquet", make=["a", "b", "c"], tags=[[1], [2], [3]], year=[1, 2, 3])
    with pytest.raises(UserError, match=message):
        Explicit.from_parquet(n, path, columns)


def test_a_damaged_column_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    pq.write_table(pa.table({"id": np.arange(5000), "make": np.arange(5000)}), path, use_dictionary=False)
    column = pq.read_metadata(path).row_group(0).column(1)
    content = bytearray(path.read_bytes())
    middle = column.data_page_offset + column.total_compressed_size // 2
    for i in range(middle, middle + 500):
        content[i] ^= 0xFF
    path.write_bytes(content)
    assert Explicit.from_parquet(5000, str(path), ["id"]).num_rows == (5000,)
    with pytest.raises(UserError, match="table.parquet': column 'make' cannot be read"):
        Explicit.from_parquet(5000, str(path), ["id", "make"])


def test_files_that_are_no_parquet_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no file"):
        Explicit.from_parquet(3, str(tmp_path / "missing.parquet"), ["make"])
    with pytest.raises(UserError, match="is no file"):
        Explicit.from_parquet(3, str(tmp_path), ["make"])
    (tmp_path / "text.parquet").write_text("make\nvolvo\n")
    with pytest.raises(UserError, match="cannot be read as a Parquet file"):
        Explicit.from_parquet(3, str(tmp_path / "text.parquet"), ["make"])
