"""Rankings of a catalogue whose table is sharded in every way, on two gloo ranks, against one process."""

from typing import Any

import pytest
import torch

from distembed.tasks.catalogue import CatalogueRanking, RankedItems
from tests.catalogue.test_ranking import jagged
from tests.catalogue.test_sharded_softmax import DIM, LAYOUTS, NUM_IDS, Tied, shard
from tests.ranks import run_on_ranks

NUM_QUERIES = 7
RELEVANT = [[(17 * row + step) % NUM_IDS for step in range(row % 3)] for row in range(NUM_QUERIES)]
EXCLUDED = [list(range(row, NUM_IDS, 3)) for row in range(NUM_QUERIES)]


def rank_rows(model: Any, rows: slice, num_best: int) -> RankedItems:
    queries = torch.randn(NUM_QUERIES, DIM, generator=torch.Generator().manual_seed(1))
    ranking = CatalogueRanking(model.catalogue, (0, 1), num_best)
    return ranking.rank(queries[rows], jagged(RELEVANT[rows]), jagged(EXCLUDED[rows]))


def compare(rank: int, world_size: int) -> None:
    rows = slice(0, 2) if rank == 0 else slice(2, NUM_QUERIES)
    relevant = slice(0, 1) if rank == 0 else slice(1, None)
    for layout in LAYOUTS:
        for scheme in ("naive", "quotient_remainder"):
            whole = Tied(scheme, "product", False)
            inner = shard(Tied(scheme, "product", False, device="meta"), world_size, layout).module
            for num_best in (0, 5):
                expected, found = rank_rows(whole, slice(None), num_best), rank_rows(inner, rows, num_best)
                assert torch.equal(found.ranks, expected.ranks[relevant]), f"{layout} {scheme}"
                assert torch.equal(found.best, expected.best[rows]), f"{layout} {scheme}"


@pytest.mark.distributed
def test_a_sharded_catalogue_is_ranked_like_a_whole_one() -> None:
    run_on_ranks(2, compare)
