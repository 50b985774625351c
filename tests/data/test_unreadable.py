"""Row groups that cannot be read: others take their place, the same on any number of ranks, up to a number."""

from pathlib import Path

import pytest

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.row_groups import list_row_groups
from distembed.data.reader import BatchOrder, BatchReader, Decoding, order, read_share
from tests.data.small_dataset import make_dataset, open_reader, rows_of


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "WINDOW_ROWS", 8)


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
