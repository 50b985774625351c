"""Rows of several features' ids at once, as a GPU computes them, against each table's own map."""

import pytest
import torch

from distembed.partitions import PARTITIONS, Partition
from distembed.sharding.ids import FeatureRows, IdCounts

SIZES = (10, 1000, 57)


def partitions(name: str) -> list[Partition]:
    settings = [{"assignments": [torch.arange(n)]} if name == "explicit" else {} for n in SIZES]
    return [PARTITIONS[name](num_embeddings=n, **own) for n, own in zip(SIZES, settings, strict=True)]


@pytest.mark.parametrize("name", PARTITIONS)
@pytest.mark.parametrize("counts", [(4, 4, 4), (1, 1, 1), (5, 0, 2), (0, 0, 0), (0, 7, 0)])
def test_rows_of_all_features_are_those_of_each(name: str, counts: tuple[int, ...]) -> None:
    tables = partitions(name)
    ids = [torch.randint(0, n, (count,)) for n, count in zip(SIZES, counts, strict=True)]
    expected = torch.cat([table.rows(own) for table, own in zip(tables, ids, strict=True)], dim=1)
    of_ids = IdCounts(counts, torch.tensor(counts))
    rows = FeatureRows(tables)(torch.cat(ids), of_ids)
    assert torch.equal(rows, expected) and rows.is_contiguous()
    constants = type(tables[0]).constants(tables)
    if constants is not None:  # which a GPU repeats for each id, where features have unequal numbers of them
        assert torch.equal(type(tables[0]).rows_by_constants(torch.cat(ids), of_ids.of_each_id(constants)), expected)


def test_numbers_of_ids_are_the_same_on_both_sides() -> None:
    counts = IdCounts([3, 0, 2], torch.tensor([1, 2, 0, 0, 2, 0]))
    assert counts.on_device.tolist() == counts.on_host == [3, 0, 2]
    assert (counts.total, counts.is_uniform) == (5, False)
    assert counts.of_each_id(torch.tensor([[1, 2, 3], [4, 5, 6]])).tolist() == [[1, 1, 1, 3, 3], [4, 4, 4, 6, 6]]
