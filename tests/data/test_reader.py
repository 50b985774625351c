"""Laws of the reader: each row once, the same global order on any number of ranks, resumable anywhere."""

import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from distembed.data import CategoricalFeature, Manifest, Schema, create_manifest
from distembed.data.reader import Batch, BatchOrder, BatchReader, order, reader
from distembed.errors import UserError

SCHEMA = Schema(
    label="clicked",
    dense=("x", "y"),
    categorical=(
        CategoricalFeature("row", 10_000),
        CategoricalFeature("tags", 50, multi_hot=True, mean_ids_per_row=2.0),
        CategoricalFeature("bucket", 7),
    ),
)
SINGLE = Schema("clicked", ("x", "y"), (SCHEMA.categorical[0], SCHEMA.categorical[2]))


def tags_of(row: int) -> list[int] | None:
    """Row 0 has a null list, others 0 to 4 ids."""
    return None if row % 11 == 0 else [(row * 7 + i) % 50 for i in range(row % 5)]


def make_dataset(folder: Path, num_rows: int, *, schema: Schema = SCHEMA, files: int = 2, group_rows: int = 13) -> Path:
    folder.mkdir(exist_ok=True)
    rows = np.arange(num_rows)
    table = pa.table(
        {
            "x": pa.array(rows * 0.5, pa.float64()),
            "row": pa.array(rows, pa.int32()),
            "tags": pa.array([tags_of(row) for row in rows.tolist()], pa.list_(pa.int64())),
            "unused": pa.array(["text"] * num_rows),
            "clicked": pa.array(rows % 3 == 0),
            "bucket": pa.array(rows % 7, pa.uint8()),
            "y": pa.array(rows - 5, pa.int64()),
        }
    )
    names = []
    for index, part in enumerate(np.array_split(rows, files)):
        names.append(f"part{index}.parquet")
        start = int(part[0]) if len(part) else 0
        pq.write_table(table.slice(start, len(part)), folder / names[-1], row_group_size=group_rows)
    create_manifest(folder, schema, {"all": names})
    return folder


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few hundred rows make many windows and many chunks."""
    monkeypatch.setattr(order, "WINDOW_ROWS", 40)
    monkeypatch.setattr(reader, "_ROWS_AT_ONCE", 24)


def open_reader(
    folder: Path,
    batch_size: int = 10,
    *,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    **settings: int,
) -> BatchReader:
    return BatchReader(folder, "all", BatchOrder(batch_size, shuffle, seed, drop_last), **settings)


def rows_of(batch: Batch) -> list[int]:
    """The rows of a batch, after checking that every column says the same."""
    rows = batch["sparse_features"]["row"].values().tolist()
    assert batch["labels"].tolist() == [float(row % 3 == 0) for row in rows]
    assert batch["dense_features"].tolist() == [[row * 0.5, row - 5.0] for row in rows]
    assert batch["sparse_features"]["bucket"].values().tolist() == [row % 7 for row in rows]
    assert batch["sparse_features"].stride() == len(rows)
    assert batch["sparse_features"].values().dtype == torch.int64
    if "tags" in batch["sparse_features"].keys():  # noqa: SIM118 (a method of TorchRec's)
        tags = batch["sparse_features"]["tags"].to_dense()
        assert [ids.tolist() for ids in tags] == [tags_of(row) or [] for row in rows]
    return rows


def take(batches: Iterator[Batch], count: int) -> list[list[int]]:
    return [rows_of(batch) for batch in itertools.islice(batches, count)]


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("schema", [SCHEMA, SINGLE], ids=["multi_hot", "single"])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("batch_size", [1, 7, 64, 1000])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_each_row_once_and_the_same_global_batches_on_any_number_of_ranks(
    tmp_path: Path, schema: Schema, shuffle: bool, batch_size: int, world_size: int
) -> None:
    folder = make_dataset(tmp_path / "d", 313, schema=schema)
    alone = open_reader(folder, batch_size, shuffle=shuffle, seed=5)
    ranks = [open_reader(folder, batch_size, rank=r, world_size=world_size, shuffle=shuffle, seed=5)
             for r in range(world_size)]  # fmt: skip
    for _ in range(2):
        whole = [rows_of(batch) for batch in alone]
        assert sorted(sum(whole, [])) == list(range(313))
        assert len(whole) == alone.batches_per_epoch == -(-313 // batch_size)
        parts = [list(each) for each in ranks]
        assert {len(part) for part in parts} == {len(whole)}
        for step, rows in enumerate(whole):
            assert sum((rows_of(part[step]) for part in parts), []) == rows
            assert {part[step].global_batch_size for part in parts} == {len(rows)}
            sizes = [len(part[step]["labels"]) for part in parts]
            assert max(sizes) - min(sizes) <= 1
    if not shuffle:
        assert sum(whole, []) == list(range(313))


@pytest.mark.usefixtures("small_windows")
def test_every_epoch_has_another_order_and_every_seed_its_own(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "d", 300)
    orders = {}
    for seed in (0, 1):
        for repeat in (0, 1):
            each = open_reader(folder, 16, seed=seed)
            for epoch in range(3):
                assert each.epoch == epoch
                orders[seed, epoch, repeat] = sum((rows_of(batch) for batch in each), [])
    distinct = {tuple(rows) for rows in orders.values()}
    assert len(distinct) == 6
    assert all(orders[seed, epoch, 0] == orders[seed, epoch, 1] for seed, epoch, _ in orders)


@pytest.mark.usefixtures("small_windows")
def test_the_order_is_well_mixed(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "d", 2000, group_rows=50)
    rows = np.array(sum((rows_of(batch) for batch in open_reader(folder, 100)), []))
    correlation = np.corrcoef(rows, np.arange(2000))[0, 1]
    assert abs(correlation) < 0.3
    means = rows.reshape(20, 100).mean(1)
    assert means.std() < 300  # batches in file order would have 577


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("schema", [SCHEMA, SINGLE], ids=["multi_hot", "single"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_resume_from_any_step_on_any_number_of_ranks(tmp_path: Path, schema: Schema, shuffle: bool) -> None:
    folder = make_dataset(tmp_path / "d", 151, schema=schema)
    settings = {"shuffle": shuffle, "seed": 3}
    whole: list[list[int]] = []
    states = []
    first = open_reader(folder, **settings)
    for _ in range(2):
        for batch in first:
            whole.append(rows_of(batch))
            states.append(first.state_dict())
    assert len(whole) == 32
    for step, state in enumerate(states):
        world_size = 1 + step % 3
        parts = []
        for rank in range(world_size):
            resumed = open_reader(folder, rank=rank, world_size=world_size, prefetch_batches=0, **settings)
            resumed.load_state_dict(state)
            parts.append([rows_of(b) for b in itertools.chain(resumed, resumed)])
        rest = [sum(together, []) for together in zip(*parts, strict=True)]
        # What is left of an epoch and the next one; the state after the last batch is the next epoch's start.
        compared = min(len(rest), 31 - step)
        assert rest[:compared] == whole[step + 1 : step + 1 + compared]
        assert len(rest) == (16 - (step + 1) % 16) + 16


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("in_flight", [0, 1, 3, 20])
def test_batches_in_flight_are_handed_out_again(tmp_path: Path, in_flight: int) -> None:
    folder = make_dataset(tmp_path / "d", 151)
    ahead = open_reader(folder)
    whole = take(itertools.chain(*[ahead] * 5), 80)
    for step in (20, 32, 33):
        pulling = open_reader(folder)
        batches = itertools.chain(pulling, pulling, pulling)
        take(batches, step)
        resumed = open_reader(folder, rank=0, world_size=1)
        resumed.load_state_dict(pulling.state_dict(in_flight=in_flight))
        used = step - in_flight
        assert resumed.epoch == used // 16 and resumed.batch == used % 16
        assert take(itertools.chain(resumed, resumed), 17) == whole[used : used + 17]
        pulling.close()


def test_more_in_flight_than_handed_out(tmp_path: Path) -> None:
    each = open_reader(make_dataset(tmp_path / "d", 50))
    take(iter(each), 2)
    for in_flight in (3, -1):
        with pytest.raises(UserError, match="in_flight"):
            each.state_dict(in_flight=in_flight)


def test_iterating_again_goes_on_where_it_was(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "d", 100)
    whole = take(iter(open_reader(folder)), 10)
    each = open_reader(folder)
    assert take(iter(each), 4) == whole[:4]
    old = iter(each)
    assert next(old) is not None
    assert [rows_of(batch) for batch in each] == whole[5:]
    with pytest.raises(RuntimeError, match="iterated over"):
        next(old)


def test_drop_last(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "d", 313)
    each = open_reader(folder, 50, drop_last=True)
    left_out = []
    for _ in range(2):
        batches = [rows_of(batch) for batch in each]
        assert [len(rows) for rows in batches] == [50] * 6 and each.batches_per_epoch == 6
        seen = set(sum(batches, []))
        assert len(seen) == 300
        left_out.append(set(range(313)) - seen)
    assert left_out[0] != left_out[1]


@pytest.mark.parametrize("num_rows", [0, 1, 2])
@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("prefetch_batches", [0, 2])
def test_hardly_any_rows(tmp_path: Path, num_rows: int, world_size: int, prefetch_batches: int) -> None:
    folder = make_dataset(tmp_path / "d", num_rows)
    seen = []
    for rank in range(world_size):
        each = open_reader(folder, 8, rank=rank, world_size=world_size, prefetch_batches=prefetch_batches)
        batches = list(each)
        assert len(batches) == min(num_rows, 1) and each.epoch == 1 and each.num_rows == num_rows
        for batch in batches:
            assert batch["dense_features"].shape == (len(batch["labels"]), 2)
            seen += rows_of(batch)
        assert each.state_dict()["epoch"] == 1
    assert sorted(seen) == list(range(num_rows))


def test_a_split_without_files(tmp_path: Path) -> None:
    create_manifest(tmp_path, SCHEMA, {"all": []})
    assert list(open_reader(tmp_path)) == []


def test_only_multi_hot_and_no_dense(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "d", 40, schema=Schema("clicked", (), (SCHEMA.categorical[1],)))
    tags = [
        ids.tolist() for b in open_reader(folder, 7, shuffle=False) for ids in b["sparse_features"]["tags"].to_dense()
    ]
    assert tags == [tags_of(row) or [] for row in range(40)]


@pytest.mark.parametrize("kind", [pa.large_list(pa.int32()), pa.list_(pa.uint16()), pa.list_(pa.int8(), 2)])
def test_any_kind_of_list(tmp_path: Path, kind: pa.DataType) -> None:
    values = [[1, 2], [3, 4], [5, 6]]
    pq.write_table(pa.table({"y": [0.0, 1.0, 1.0], "t": pa.array(values, kind)}), tmp_path / "a.parquet")
    create_manifest(tmp_path, Schema("y", (), (CategoricalFeature("t", 7, multi_hot=True),)), {"all": ["a.parquet"]})
    (batch,) = open_reader(tmp_path, shuffle=False)
    assert batch["sparse_features"].values().tolist() == [1, 2, 3, 4, 5, 6]
    assert batch["labels"].tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("num_dense", [0, 1, 2])
def test_ids_beyond_32_bits(tmp_path: Path, num_dense: int) -> None:
    ids = [2**40, 2**31, 5]
    columns = {f"d{i}": [0.25 + i, 1.0, 2.0] for i in range(num_dense)}
    pq.write_table(pa.table({"y": [0, 1, 0], "a": ids, "b": [1, 2, 3], **columns}), tmp_path / "a.parquet")
    features = (CategoricalFeature("a", 2**41), CategoricalFeature("b", 4))
    create_manifest(tmp_path, Schema("y", tuple(columns), features), {"all": ["a.parquet"]})
    (batch,) = open_reader(tmp_path, shuffle=False)
    assert batch["sparse_features"]["a"].values().tolist() == ids
    assert batch["sparse_features"]["b"].values().tolist() == [1, 2, 3]
    assert batch["labels"].tolist() == [0.0, 1.0, 0.0]
    assert batch["dense_features"].tolist() == [
        [0.25 + i for i in range(num_dense)],
        [1.0] * num_dense,
        [2.0] * num_dense,
    ]


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("clicked", [0.0, None, 1.0], "column 'clicked': 1 values are null"),
        ("clicked", [0.0, float("nan"), 1.0], "column 'clicked': row 1 is nan"),
        ("clicked", [0.0, 1.0, 5.0], "column 'clicked': row 2 is 5.0; a label is 0 or 1"),
        ("x", [0.0, float("inf"), 1.0], "column 'x': row 1 is inf"),
        ("row", [1, 10_000, 2], r"column 'row': id 10000 is outside \[0, 10000\)"),
        ("row", [1, -1, 2], "id -1 is outside"),
        ("row", [1, 2**40, 2], "id 1099511627776 is outside"),
        ("row", [1, None, 2], "column 'row': 1 rows have no id"),
        ("tags", [[1], [50], []], "column 'tags': id 50 is outside"),
        ("tags", [[1], [None], []], "column 'tags': a list holds a null"),
    ],
)
@pytest.mark.parametrize("prefetch_batches", [0, 4])
def test_impossible_values(tmp_path: Path, column: str, values: list, message: str, prefetch_batches: int) -> None:
    columns = {
        "clicked": [0, 1, 0],
        "x": [1.0] * 3,
        "y": [1] * 3,
        "row": [1, 2, 3],
        "tags": [[1]] * 3,
        "bucket": [1] * 3,
    }
    pq.write_table(pa.table({**columns, column: values}), tmp_path / "bad.parquet")
    create_manifest(tmp_path, SCHEMA, {"all": ["bad.parquet"]})
    with pytest.raises(UserError, match=message) as caught:
        list(open_reader(tmp_path, prefetch_batches=prefetch_batches))
    assert "bad.parquet, row group 0" in str(caught.value)


def test_files_that_are_not_as_the_manifest_says(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "d", 100)
    file = folder / "part1.parquet"
    whole = file.read_bytes()
    file.write_bytes(whole[:-50])
    with pytest.raises(UserError, match="part1.parquet has .* bytes, the manifest says"):
        open_reader(folder)
    file.write_bytes(bytes(len(whole)))
    with pytest.raises(UserError, match="part1.parquet is not a readable Parquet file"):
        open_reader(folder)
    file.unlink()
    with pytest.raises(UserError, match="part1.parquet is missing"):
        open_reader(folder)


def test_columns_of_another_type(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "d", 10)
    right = Manifest.load(folder)
    for wrong, message in (
        (Schema("unused", (), ()), "its type is string"),
        (Schema("clicked", ("tags",), ()), "a label or dense column is numeric"),
        (Schema("clicked", (), (CategoricalFeature("tags", 50),)), "multi_hot=False needs integer"),
        (Schema("clicked", (), (CategoricalFeature("row", 50, multi_hot=True),)), "needs a list of integers"),
        (Schema("clicked", (), (CategoricalFeature("x", 50),)), "its type is double"),
        (Schema("nowhere", (), ()), "lacks the columns nowhere"),
    ):
        with pytest.raises(UserError, match=message):
            create_manifest(folder, wrong, {"all": ["part0.parquet"]})
        replace(right, schema=wrong).save(folder)
        with pytest.raises(UserError, match=message):
            open_reader(folder)


def test_a_state_of_other_settings_is_refused(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "d", 100)
    other = make_dataset(tmp_path / "e", 101)
    state = open_reader(folder).state_dict()
    for changed, name in (
        (open_reader(folder, seed=1), "seed is 0 in the state and 1 here"),
        (open_reader(folder, 11), "batch_size is 10 in the state and 11 here"),
        (open_reader(folder, shuffle=False), "shuffle"),
        (open_reader(folder, drop_last=True), "drop_last"),
        (open_reader(other), "dataset"),
    ):
        with pytest.raises(UserError, match=name):
            changed.load_state_dict(state)
    with pytest.raises(UserError, match="split is 'x' in the state.*; batch_size"):
        open_reader(folder, 3).load_state_dict({**state, "split": "x"})


@pytest.mark.parametrize(
    "wrong",
    [{"batch_size": 0}, {"rank": 2, "world_size": 2}, {"rank": -1}, {"world_size": 0}, {"seed": -1},
     {"prefetch_batches": -1}],
)  # fmt: skip
def test_impossible_settings(tmp_path: Path, wrong: dict) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        open_reader(make_dataset(tmp_path / "d", 10), **{"batch_size": 4, **wrong})


def test_an_unknown_split(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no split 'train': it has all"):
        BatchReader(make_dataset(tmp_path / "d", 10), "train", BatchOrder(1))


def prefetching() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "distembed-prefetch"}


@pytest.fixture
def gone() -> Callable[[], bool]:
    """Whether the threads that were started since then end, without a fixed time to wait."""
    before = prefetching()

    def are_gone() -> bool:
        deadline = time.monotonic() + 30
        while prefetching() - before and time.monotonic() < deadline:
            time.sleep(0.01)
        return not prefetching() - before

    return are_gone


def test_the_thread_ends_with_its_reader(tmp_path: Path, gone: Callable[[], bool]) -> None:
    folder = make_dataset(tmp_path / "d", 300)
    each = open_reader(folder, 5, prefetch_batches=2)
    batches = iter(each)
    next(batches)
    assert prefetching()
    each.close()
    assert gone()
    batches = iter(each)
    next(batches)
    del batches
    gc.collect()
    assert gone()
    batches = iter(each)
    next(batches)
    del each, batches
    gc.collect()
    assert gone()
    for _ in open_reader(folder, 5):
        break
    gc.collect()
    assert gone()


def test_the_thread_ends_when_the_consumer_fails(tmp_path: Path, gone: Callable[[], bool]) -> None:
    each = open_reader(make_dataset(tmp_path / "d", 300), 5)
    with pytest.raises(KeyboardInterrupt):
        for _ in each:
            raise KeyboardInterrupt
    gc.collect()
    each.close()
    assert gone()


def test_batches_can_be_moved(tmp_path: Path) -> None:
    (batch,) = open_reader(make_dataset(tmp_path / "d", 5, schema=SINGLE), shuffle=False)
    moved = batch.to(torch.device("cpu"), non_blocking=True)
    assert rows_of(moved) == rows_of(batch) == list(range(5)) and moved.global_batch_size == 5


def test_single_valued_bags_know_their_sums(tmp_path: Path) -> None:
    """What TorchRec would compute from the lengths is what the batch brings along."""
    (batch,) = open_reader(make_dataset(tmp_path / "d", 9, schema=SINGLE))
    features = batch["sparse_features"]
    assert features.lengths().tolist() == [1] * 18 and features.offsets().tolist() == list(range(19))
    assert features.length_per_key() == [9, 9] and features.offset_per_key() == [0, 9, 18]
