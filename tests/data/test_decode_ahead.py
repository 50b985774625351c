"""Rows that are decoded ahead in threads: the same batches for any number of threads, and no more rows than allowed."""

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from distembed.data import Schema
from distembed.data.dataset.config import DataConfig
from distembed.data.reader import order
from distembed.data.reader.decode import Block, Decoder
from distembed.data.reader.epoch_part import DecodeAhead, windows_in_need_order
from distembed.data.reader.order import BatchOrder, EpochOrder
from distembed.errors import UserError
from tests.data.small_dataset import SCHEMA, SINGLE, make_dataset, open_reader, rows_of


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "WINDOW_ROWS", 8)


@pytest.mark.parametrize("schema", [SCHEMA, SINGLE], ids=["multi_hot", "single"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_are_the_same_for_any_number_of_threads(tmp_path: Path, schema: Schema, shuffle: bool) -> None:
    folder = make_dataset(tmp_path / "d", 151, schema=schema, group_rows=5)
    for rank, world_size in ((0, 1), (1, 3), (10, 11)):
        found = []
        for threads in (0, 1, 3):
            settings = {"rank": rank, "world_size": world_size, "shuffle": shuffle}
            reader = open_reader(folder, 16, decode_threads=threads, **settings)
            reader.load_state_dict({**reader.state_dict(), "batch": 2})
            found.append([rows_of(batch) for batch in itertools.chain(reader, reader)])
        assert found[0] == found[1] == found[2] and len(found[0]) == 8 + 10


@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize("first_batch", [0, 3, 9, 10])
def test_windows_come_in_the_order_in_which_batches_need_them(world_size: int, first_batch: int) -> None:
    epoch_order = EpochOrder((7, 13, 2, 40, 5, 33, 1, 19, 30), BatchOrder(15, seed=4))
    for rank in range(world_size):
        needed = windows_in_need_order(epoch_order, 1, rank, world_size, first_batch)
        windows = {(lane, window.number): position for position, (lane, window) in enumerate(needed)}
        assert len(windows) == len(needed) and (needed or first_batch == epoch_order.num_batches)
        before = -1
        for batch in range(first_batch, epoch_order.num_batches - 1):  # the last batch is short
            asked = []
            for part in epoch_order.rank_parts(batch, rank, world_size):
                overlapping = [
                    windows[part.lane, window.number]
                    for window in epoch_order.lane_windows(1, part.lane)
                    if window.start < part.stop and window.stop > part.start
                ]
                asked += overlapping
            new = [position for position in asked if position > before]
            assert sorted(new) == list(range(before + 1, before + 1 + len(new)))
            before += len(new)


def test_no_more_windows_wait_than_may(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "d", 200, group_rows=5)
    reader = open_reader(folder, 16)
    needed = windows_in_need_order(reader._order, 0, 0, 1, 0)
    decoded, changed = [], threading.Condition()

    class Counting(Decoder):
        def decode(self, segments: Sequence[tuple[int, int, int]]) -> Block:
            block = super().decode(segments)
            with changed:
                decoded.append(segments)
                changed.notify_all()
            return block

    with DecodeAhead(Counting(reader.schema, reader._decoder.groups), needed, 3, most_waiting=4) as ahead:
        for taken, (lane, window) in enumerate(needed):
            expected = min(taken + 4, len(needed))
            with changed:
                assert changed.wait_for(lambda expected=expected: len(decoded) >= expected, timeout=60)
                assert len(decoded) == expected
            assert len(ahead.block(lane, window).records) == window.stop - window.start
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("distembed-decode")]


@pytest.mark.parametrize("threads", [0, 2])
def test_damage_is_said_where_the_batch_is_asked_for_and_ends_the_threads(tmp_path: Path, threads: int) -> None:
    folder = make_dataset(tmp_path / "d", 100, group_rows=5)
    path = folder / "part1.parquet"
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="part1.parquet, row group 0 is damaged"):
        list(open_reader(folder, 16, decode_threads=threads))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("distembed-decode")]


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"), [(1, 1, 0), (2, 1, 1), (2, 2, 0), (96, 8, 4), (16, 8, 1), (4, 8, 0)]
)
def test_threads_follow_the_cores_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, threads: int
) -> None:
    monkeypatch.setattr("distembed.data.dataset.config.usable_cores", lambda: cores)
    assert DataConfig().threads_of_rank(ranks) == threads
    assert DataConfig(decode_threads=7).threads_of_rank(ranks) == 7
