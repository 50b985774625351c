"""Rankings of whole catalogues against a loop over all items, on one rank and on two."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import JaggedTensor

from distembed.tasks.catalogue import ranking
from distembed.tasks.catalogue.ranking import BestItems, CatalogueRanking, RankedItems, ids_of
from tests.catalogue.fake_catalogue import FakeCatalogue, brute_force

DIM = 3


class Case:
    """Queries and items whose vectors are small integers, so that many scores are equal."""

    def __init__(self, seed: int, num_queries: int, num_items: int) -> None:
        rng = np.random.default_rng(seed)
        self.queries = torch.from_numpy(rng.integers(-1, 2, (num_queries, DIM)).astype(np.float32))
        self.items = torch.from_numpy(rng.integers(-2, 3, (num_items, DIM)).astype(np.float32)) / 3
        self.bias = torch.from_numpy(rng.integers(0, 2, num_items).astype(np.float32)) if seed % 2 else None
        pick = [rng.permutation(num_items).tolist() for _ in range(num_queries)]
        self.relevant = [items[: rng.integers(0, 4)] for items in pick]
        self.excluded = [items[2 : rng.integers(2, num_items + 1)] for items in pick]
        self.reserved = (0, 1) if seed % 3 else ()

    def catalogue(self, most_ids: int = 4) -> Any:
        return FakeCatalogue(self.items, self.bias, most_ids)

    def scores(self) -> torch.Tensor:
        products = self.queries.double() @ self.items.double().T
        return (products if self.bias is None else products + self.bias).float()

    def rank(self, num_best: int, rows: slice = slice(None), most_ids: int = 4) -> RankedItems:
        ranking = CatalogueRanking(self.catalogue(most_ids), self.reserved, num_best)
        return ranking.rank(self.queries[rows], jagged(self.relevant[rows]), jagged(self.excluded[rows]))

    def expected(self, num_best: int, rows: slice = slice(None)) -> tuple[list[list[int]], list[list[int]]]:
        each = zip(self.scores().numpy()[rows], self.relevant[rows], self.excluded[rows], strict=True)
        found = [brute_force(*values, self.reserved, num_best) for values in each]
        return [ranks for ranks, _ in found], [best for _, best in found]


def jagged(lists: list[list[int]]) -> JaggedTensor:
    values = torch.tensor([value for values in lists for value in values], dtype=torch.long)
    return JaggedTensor(values, lengths=torch.tensor([len(values) for values in lists], dtype=torch.long))


def require_equal(found: RankedItems, expected: tuple[list[list[int]], list[list[int]]]) -> None:
    assert found.ranks.tolist() == [rank for ranks in expected[0] for rank in ranks]
    assert found.best.tolist() == expected[1]


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32), num_queries=st.integers(0, 9), num_items=st.integers(3, 30), most_ids=st.integers(1, 31)
)
def test_ranks_and_best_items_equal_a_loop(seed: int, num_queries: int, num_items: int, most_ids: int) -> None:
    case = Case(seed, num_queries, num_items)
    require_equal(case.rank(5, most_ids=most_ids), case.expected(5))


def test_a_reserved_relevant_item_has_no_rank_and_changes_no_other() -> None:
    items = torch.tensor([[9.0], [1.0], [3.0], [2.0]])
    ranking = CatalogueRanking(FakeCatalogue(items, None, 2), (0,), 4)
    found = ranking.rank(torch.ones(2, 1), jagged([[0, 3], [3]]), jagged([[], []]))
    assert found.ranks.tolist() == [-1, 1, 1]
    assert found.best.tolist() == [[2, 3, 1, -1]] * 2


def test_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(1, 50, 40)
    monkeypatch.setattr(ranking, "_MOST_SCORES_ON_CPU", 60)
    monkeypatch.setattr(ranking, "_PAIRS_AT_ONCE", 3)
    require_equal(case.rank(7), case.expected(7))


def test_best_scores_are_those_of_the_best_items() -> None:
    case = Case(5, 9, 30)
    found = case.rank(30)
    expected = torch.where(found.best < 0, -torch.inf, case.scores().gather(1, found.best.clamp(min=0)))
    torch.testing.assert_close(found.best_scores, expected)
    assert case.rank(0).best.shape == (9, 0)


def test_a_query_that_is_no_number_has_the_worst_ranks() -> None:
    case = Case(1, 4, 30)
    case.queries[2] = torch.nan
    expected, found = case.expected(5)[0], iter(case.rank(5).ranks.tolist())
    for row, ranks in enumerate(expected):
        own = [next(found) for _ in ranks]
        assert (
            own == ranks
            if row != 2
            else all(rank >= 30 or rank == ranks[place] == -1 for place, rank in enumerate(own))
        )


def test_an_item_whose_score_is_no_number_hides_no_other_item() -> None:
    best = BestItems(2, 2, torch.device("cpu"))
    best.add(torch.tensor([[1.0, torch.nan, 3.0], [torch.nan, 5.0, torch.nan]]), torch.arange(3))
    best.add(torch.tensor([[torch.nan, 2.0], [torch.nan, torch.nan]]), torch.arange(3, 5))
    assert ids_of(best.keys).tolist() == [[2, 4], [1, -1]]


def test_equal_vectors_have_equal_scores_in_chunks_of_any_size() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(7, 64, generator=generator)
    catalogue: Any = FakeCatalogue(rows[torch.arange(3000) % 7], None, 1000)  # every 7th item is the same
    queries = torch.randn(33, 64, generator=generator)
    found = CatalogueRanking(catalogue, (), 0).rank(queries, jagged([[5]] * 33), jagged([[]] * 33))
    scores = queries.double() @ rows.double().T
    better = (scores > scores[:, 5:6]).double()
    same = torch.bincount(torch.arange(3000) % 7).double()
    assert found.ranks.tolist() == (better @ same + same[5] - 1).tolist()


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), num_queries=st.integers(0, 6), num_sampled=st.integers(0, 5))
def test_ranks_among_sampled_items_equal_a_loop(seed: int, num_queries: int, num_sampled: int) -> None:
    case = Case(seed, num_queries, 20)
    chosen = torch.from_numpy(np.random.default_rng(seed).integers(0, 20, (num_queries, num_sampled + 1)))
    found = CatalogueRanking(case.catalogue()).rank_among(case.queries, chosen[:, 0], chosen[:, 1:])
    scores = case.scores()
    expected = [
        sum(float(scores[row, item]) >= float(scores[row, target]) for item in sampled)
        for row, (target, *sampled) in enumerate(chosen.tolist())
    ]
    assert found.tolist() == expected


def rank_on_two(rank: int) -> None:
    """Compares rankings on two ranks, which test_sharded_catalogue starts, with a loop."""
    for seed, bounds in ((0, (0, 5, 11)), (1, (0, 11, 11)), (2, (0, 1, 30)), (4, (0, 0, 0))):
        case, rows = Case(seed, bounds[-1], 23), slice(bounds[rank], bounds[rank + 1])
        require_equal(case.rank(6, rows), case.expected(6, rows))
        targets = torch.arange(bounds[-1]) % 23
        sampled = torch.stack([(targets + 3) % 23, (targets + 11) % 23], 1)
        among = CatalogueRanking(case.catalogue()).rank_among(case.queries[rows], targets[rows], sampled[rows])
        scores = case.scores()
        expected = (scores.gather(1, sampled) >= scores.gather(1, targets.unsqueeze(1))).sum(1)
        assert among.tolist() == expected[rows].tolist()
