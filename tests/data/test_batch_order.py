"""Laws of the reader's order: each row once, the same on any number of ranks, resumable anywhere."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from distembed.base.errors import UserError
from distembed.data import Schema, create_manifest
from distembed.data.dataset.row_groups import RowGroup
from distembed.data.reader import BatchOrder, BatchReader, BatchShares, order, read_share
from distembed.data.reader import reader as reading
from tests.data.small_dataset import SCHEMA, SINGLE, make_dataset, open_reader, rows_of, take


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes windows so small that a hundred rows fill many, and several batches are made at once."""
    monkeypatch.setattr(order, "WINDOW_ROWS", 8)
    monkeypatch.setattr(reading, "_ROWS_AT_ONCE", 24)


@pytest.mark.thorough
@pytest.mark.parametrize(("group_rows", "window_rows"), [(2, 8), (2, 200), (50, 8), (500, 200), (1000, 8)])
def test_batches_mix_many_small_row_groups_as_well_as_few_large_ones(
    tmp_path: Path, group_rows: int, window_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "WINDOW_ROWS", window_rows)
    folder = make_dataset(tmp_path / "d", 1000, files=1, group_rows=group_rows)
    batches = [rows_of(batch) for batch in open_reader(folder, 100)]
    num_groups = 1000 // group_rows
    for rows in batches:
        assert len({row // group_rows for row in rows}) >= min(num_groups, order.MAX_LANES)
    steps = np.abs(np.diff(np.array(batches, float), axis=1))
    # rows of a batch that stand beside each other are rarely neighbours in the files
    assert (steps == 1).mean() < (0.2 if group_rows == 2 and window_rows == 8 else 0.1)
    assert abs(np.corrcoef(np.concatenate(batches), np.arange(1000))[0, 1]) < 0.3
    assert np.array(batches).mean(1).std() < 150  # batches in file order would have 289


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("schema", [SCHEMA, SINGLE], ids=["multi_hot", "single"])
@pytest.mark.parametrize(
    ("shuffle", "batch_size"),
    [
        *[(True, 7), (True, 64), (True, 1000), (False, 1), (False, 64)],
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(True, 1), (False, 7), (False, 1000)]),
    ],
)
def test_each_row_once_and_the_same_global_batches_on_any_number_of_ranks(
    tmp_path: Path, schema: Schema, shuffle: bool, batch_size: int
) -> None:
    folder = make_dataset(tmp_path / "d", 151, schema=schema, group_rows=5)
    alone = open_reader(folder, batch_size, shuffle=shuffle, seed=5)
    readers = [
        [open_reader(folder, batch_size, rank=r, world_size=size, shuffle=shuffle, seed=5) for r in range(size)]
        for size in (2, 3, 5)
    ]
    for _ in range(2 if shuffle else 1):
        whole = [rows_of(batch) for batch in alone]
        assert sorted(sum(whole, [])) == list(range(151))
        assert len(whole) == alone.batches_per_epoch == -(-151 // batch_size)
        for ranks in readers:
            parts = [list(each) for each in ranks]
            assert {len(part) for part in parts} == {len(whole)}
            for step, rows in enumerate(whole):
                assert sum((rows_of(part[step]) for part in parts), []) == rows
                assert {part[step].global_batch_size for part in parts} == {len(rows)}
                sizes = [len(part[step]["labels"]) for part in parts]
                assert max(sizes) - min(sizes) <= 1
    if not shuffle:
        assert sum(whole, []) == list(range(151))


@pytest.mark.usefixtures("small_windows")
def test_every_epoch_has_another_order_and_every_seed_its_own(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "d", 100, group_rows=5)
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


@pytest.mark.thorough
@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("schema", [SCHEMA, SINGLE], ids=["multi_hot", "single"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_resume_from_any_step_on_any_number_of_ranks(tmp_path: Path, schema: Schema, shuffle: bool) -> None:
    folder = make_dataset(tmp_path / "d", 71, schema=schema, group_rows=5)
    settings = {"shuffle": shuffle, "seed": 3}
    whole: list[list[int]] = []
    states = []
    first = open_reader(folder, **settings)
    for _ in range(2):
        for batch in first:
            whole.append(rows_of(batch))
            states.append(first.state_dict())
    assert len(whole) == 16
    for step, state in enumerate(states):
        world_size = 1 + step % 3
        parts = []
        for rank in range(world_size):
            resumed = open_reader(folder, rank=rank, world_size=world_size, prefetch_batches=0, **settings)
            resumed.load_state_dict(state)
            parts.append([rows_of(b) for b in itertools.chain(resumed, resumed)])
        rest = [sum(together, []) for together in zip(*parts, strict=True)]
        # What is left of an epoch and the next one; the state after the last batch is the next epoch's start.
        compared = min(len(rest), 15 - step)
        assert rest[:compared] == whole[step + 1 : step + 1 + compared]
        assert len(rest) == (8 - (step + 1) % 8) + 8


@pytest.mark.usefixtures("small_windows")
def test_batches_in_flight_are_read_again(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "d", 71, group_rows=5)
    ahead = open_reader(folder)
    whole = take(itertools.chain(*[ahead] * 5), 40)
    for step, in_flight in itertools.product((10, 16, 17), (0, 1, 3, 10)):
        pulling = open_reader(folder)
        batches = itertools.chain(pulling, pulling, pulling)
        take(batches, step)
        resumed = open_reader(folder, rank=0, world_size=1)
        resumed.load_state_dict(pulling.state_dict(in_flight=in_flight))
        used = step - in_flight
        assert resumed.epoch == used // 8 and resumed.batch == used % 8
        assert take(itertools.chain(resumed, resumed), 9) == whole[used : used + 9]
        for wrong in (step + 1, -1):
            with pytest.raises(UserError, match="in_flight"):
                pulling.state_dict(in_flight=wrong)
        pulling.close()


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
def test_hardly_any_rows(tmp_path: Path, num_rows: int) -> None:
    folder = make_dataset(tmp_path / "d", num_rows)
    for world_size, prefetch_batches in itertools.product((1, 4), (0, 2)):
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
    create_manifest(tmp_path, SCHEMA, {"all": []})
    assert list(open_reader(tmp_path)) == []


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


def test_impossible_settings(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "d", 10)
    too_small = [{"batch_size": 0}, {"rank": -1}, {"world_size": 0}, {"seed": -1}, {"prefetch_batches": -1}]
    for wrong in ({"rank": 2, "world_size": 2}, *too_small):
        with pytest.raises(UserError, match=next(iter(wrong))):
            open_reader(folder, **{"batch_size": 4, **wrong})
    with pytest.raises(UserError, match="no split 'train': it has all"):
        BatchReader(folder, "train", BatchOrder(1))


@pytest.mark.parametrize("num_rows", [0, 1, 65, 1001])
@pytest.mark.parametrize("batch_size", [1, 7, 64])
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_ranks_share_all_rows_in_order_and_take_equally_many_steps(
    num_rows: int, batch_size: int, world_size: int
) -> None:
    shares = BatchShares(num_rows, batch_size, world_size)
    assert [row for rank in range(world_size) for row in shares.rows(rank)] == list(range(num_rows))
    cuts = {frozenset(range(first, min(first + batch_size, num_rows))) for first in range(0, num_rows, batch_size)}
    steps = [list(shares.steps(rank)) for rank in range(world_size)]
    assert {len(of_rank) for of_rank in steps} == {shares.num_steps}
    assert {frozenset(rows) for of_rank in steps for rows in of_rank if rows} == cuts
    for rank, of_rank in enumerate(steps):
        assert [row for rows in of_rank for row in rows] == list(shares.rows(rank))
        assert sum(not rows for rows in of_rank) <= 1


@pytest.mark.parametrize("num_rows", [0, 1, 10, 151])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_batches_are_those_of_one_rank(tmp_path: Path, num_rows: int, world_size: int) -> None:
    folder = make_dataset(tmp_path / "d", num_rows, group_rows=5)
    whole = [rows_of(batch) for batch in open_reader(folder, 10, shuffle=False)]
    ranks = [list(read_share(folder, "all", 10, rank=rank, world_size=world_size)) for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    found = [rows_of(batch) for batches in ranks for batch in batches]
    assert [rows for rows in found if rows] == whole
    for batch in (batch for batches in ranks for batch in batches):
        assert batch["dense_features"].shape == (len(batch["labels"]), 2)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_rank_decodes_its_row_groups_and_no_others(
    tmp_path: Path, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "WINDOW_ROWS", 64)
    folder = make_dataset(tmp_path / "d", 1600, files=2, group_rows=16)
    read, decoded = RowGroup.read, []

    def counted(group: RowGroup, columns: tuple[str, ...]) -> object:
        decoded.append((group.file.path.name, group.index))
        return read(group, columns)

    monkeypatch.setattr(RowGroup, "read", counted)
    for rank in range(world_size):
        decoded.clear()
        batches = list(read_share(folder, "all", 40, rank=rank, world_size=world_size))
        assert sum(len(batch["labels"]) for batch in batches) == 1600 // world_size
        # a row group at either end may be another rank's too
        assert 100 // world_size <= len(decoded) <= 100 // world_size + 2
        assert len(set(decoded)) == len(decoded)


@pytest.mark.parametrize("rows", [range(5, 12), range(0, 5, 2), range(-1, 3)])
def test_rows_that_are_not_there_are_refused(tmp_path: Path, rows: range) -> None:
    folder = make_dataset(tmp_path / "d", 11)
    with pytest.raises(UserError, match="rows is range.* within the split's 11"):
        BatchReader(folder, "all", BatchOrder(2, shuffle=False), rows=rows)
    with pytest.raises(UserError, match="without shuffling"):
        BatchReader(folder, "all", BatchOrder(2), rows=range(3))
