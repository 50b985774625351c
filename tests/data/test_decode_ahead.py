"""Rows that are decoded ahead in threads: the same batches for any number of threads, and no more rows than allowed."""

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from distembed.base.errors import UserError
from distembed.data import Schema
from distembed.data.dataset.config import DataConfig
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.records import RecordBlock
from distembed.data.dataset.row_groups import list_row_groups
from distembed.data.reader import BatchOrder, BatchReader, Decoding, order, read_share
from distembed.data.reader import reader as reading
from distembed.data.reader.decode import Decoder
from distembed.data.reader.order import Segment
from tests.data.small_dataset import SCHEMA, SINGLE, make_dataset, open_reader, rows_of


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "WINDOW_ROWS", 8)


@pytest.mark.thorough
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


def test_no_more_windows_wait_than_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, decoded, changed = Decoder.decode, [], threading.Condition()

    def counted(decoder: Decoder, segments: Sequence[Segment]) -> RecordBlock:
        block = decode(decoder, segments)
        with changed:
            decoded.append(segments)
            changed.notify_all()
        return block

    monkeypatch.setattr(Decoder, "decode", counted)
    folder = make_dataset(tmp_path / "d", 200, files=1, group_rows=8)
    batches = iter(open_reader(folder, 8, shuffle=False, decode_threads=3, prefetch_batches=0))
    monkeypatch.setattr(reading, "_ROWS_AT_ONCE", 1)
    for taken in range(1, 26):
        next(batches)
        expected = min(taken + 3, 25)
        with changed:
            assert changed.wait_for(lambda expected=expected: len(decoded) >= expected, timeout=60)
            assert len(decoded) == expected
    assert next(batches, None) is None
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


def damage(folder: Path, *numbers: int) -> list[range]:
    """Flips a bit in some row groups; returns the rows of all row groups."""
    groups = list_row_groups(folder, Manifest.load(folder), "all")
    rows, first = [], 0
    for group in groups:
        rows.append(range(first, first + group.num_rows))
        first += group.num_rows
    for number in numbers:
        group = groups[number]
        assert group.file.pieces is not None
        start = int(group.file.pieces["bytes"][: group.index].sum())
        data = bytearray(group.file.path.read_bytes())
        data[start + 40] ^= 1
        group.file.path.write_bytes(data)
    return rows


@pytest.mark.thorough
@pytest.mark.parametrize("damaged", [[0], [5], [3, 4], [29], [28, 29]])
@pytest.mark.parametrize("threads", [0, 2])
def test_other_rows_take_their_place_on_any_number_of_ranks(tmp_path: Path, damaged: list[int], threads: int) -> None:
    folder = make_dataset(tmp_path / "d", 149, group_rows=5)
    whole = [rows_of(batch) for batch in open_reader(folder, 16)]
    groups = damage(folder, *damaged)
    # independent: the row at the same place of the next whole group, modulo its size
    taken = {row: row for group in groups for row in group}
    for number in damaged:
        other = next(each % len(groups) for each in range(number, 99) if each % len(groups) not in damaged)
        for place, row in enumerate(groups[number]):
            taken[row] = groups[other][place % len(groups[other])]
    expected = [[taken[row] for row in rows] for rows in whole]
    for world_size in (1, 3):
        readers = [
            open_reader(folder, 16, rank=rank, world_size=world_size, decode_threads=threads, skip_unreadable=2)
            for rank in range(world_size)
        ]
        parts = [[rows_of(batch) for batch in reader] for reader in readers]
        assert [sum(together, []) for together in zip(*parts, strict=True)] == expected
        found = {name for reader in readers for name in reader.unreadable}
        assert len(found) == len(damaged) and all("row group" in name for name in found)


def test_more_than_are_allowed_end_it_and_evaluations_allow_none(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "d", 149, group_rows=5)
    damage(folder, 3, 8, 20)
    with pytest.raises(
        UserError, match="3 row groups cannot be read, and data.skip_unreadable allows 2; the last: .*d"
    ):
        list(open_reader(folder, 16, skip_unreadable=2))
    assert sum(len(batch["labels"]) for batch in open_reader(folder, 16, skip_unreadable=3)) == 149
    for read in (lambda: read_share(folder, "all", 16, rank=0, world_size=1), lambda: open_reader(folder, 16)):
        with pytest.raises(UserError, match="row group . is damaged"):
            list(read())


def test_when_no_row_group_can_be_read_it_ends(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "d", 10, group_rows=5)
    damage(folder, 0, 1)
    with pytest.raises(UserError, match="no row group can be read: .*part0.parquet.*part1.parquet"):
        list(BatchReader(folder, "all", BatchOrder(4), decoding=Decoding(skip_unreadable=99)))
