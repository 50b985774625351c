"""Laws of rows that are read in order and divided over ranks: each once, by one rank, in batches that are the same."""

from pathlib import Path

import pytest

from distembed.base.errors import UserError
from distembed.data.dataset.row_groups import RowGroup
from distembed.data.reader import BatchOrder, BatchReader, BatchShares, order, read_share
from tests.data.small_dataset import make_dataset, open_reader, rows_of


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
