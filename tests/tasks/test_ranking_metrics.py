"""Metrics of rankings against a loop over ranked lists, and against scikit-learn."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import ndcg_score

from distembed.tasks.ranking_metrics import RankingMetrics, coverage, coverage_metric

METRICS = RankingMetrics((1, 3, 10))


def by_loop(scores: list[float], relevant: set[int], k: int) -> dict[str, float]:
    """Goes through the items by falling score; of equal scores irrelevant items come first."""
    order = sorted(range(len(scores)), key=lambda item: (-scores[item], item in relevant))
    hits = [item in relevant for item in order]
    gain = sum(1 / math.log2(place + 2) for place, hit in enumerate(hits[:k]) if hit)
    best = sum(1 / math.log2(place + 2) for place in range(min(k, len(relevant))))
    return {
        "hr": float(any(hits[:k])),
        "precision": sum(hits[:k]) / k,
        "recall": sum(hits[:k]) / len(relevant),
        "ndcg": gain / best,
        "mrr": 1 / (1 + hits.index(True)),
    }


def ranks_of(scores: list[float], relevant: set[int]) -> list[int]:
    order = sorted(range(len(scores)), key=lambda item: (-scores[item], item in relevant))
    return [order.index(item) for item in relevant]


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 4), min_size=4, max_size=15), st.sets(st.integers(0, 3), max_size=4)),
        min_size=1,
        max_size=6,
    )
)
def test_metrics_equal_a_loop_with_ties(queries: list[tuple[list[int], set[int]]]) -> None:
    ranked = [ranks_of([float(s) for s in scores], relevant) for scores, relevant in queries]
    ranks, lengths = torch.tensor(sum(ranked, []), dtype=torch.long), torch.tensor([len(r) for r in ranked])
    values = METRICS.by_query(ranks, lengths).numpy()
    for row, (scores, relevant) in zip(values, queries, strict=True):
        found = dict(zip(METRICS.names, row.tolist(), strict=True))
        if not relevant:
            assert all(math.isnan(value) for value in found.values())
            continue
        for k in METRICS.cutoffs:
            expected = by_loop([float(s) for s in scores], relevant, k)
            assert found["mrr"] == pytest.approx(expected.pop("mrr"))
            assert {kind: found[f"{kind}@{k}"] for kind in expected} == pytest.approx(expected)
    means = METRICS.means(values)
    known = [row for row, (_, relevant) in zip(values, queries, strict=True) if relevant]
    expected_means = np.mean(known, axis=0) if known else [math.nan] * len(METRICS.names)
    assert list(means.values()) == pytest.approx(expected_means, nan_ok=True)


@pytest.mark.parametrize("num_relevant", [1, 3, 12])
def test_ndcg_equals_scikit_learns_without_ties(num_relevant: int) -> None:
    rng = np.random.default_rng(num_relevant)
    scores = rng.permutation(40).astype(float)
    relevant = set(rng.permutation(40)[:num_relevant].tolist())
    ranks = torch.tensor(ranks_of(scores.tolist(), relevant))
    found = METRICS.means(METRICS.by_query(ranks, torch.tensor([num_relevant])).numpy())
    labels = np.array([[float(item in relevant) for item in range(40)]])
    for k in METRICS.cutoffs:
        assert found[f"ndcg@{k}"] == pytest.approx(ndcg_score(labels, scores[None], k=k), abs=1e-6)


def test_no_queries_have_no_metrics() -> None:
    nothing = torch.zeros(0, dtype=torch.long)
    values = METRICS.by_query(nothing, nothing)
    assert values.shape == (0, len(METRICS.names))
    assert all(math.isnan(mean) for mean in METRICS.means(values.numpy()).values())


def test_coverage_counts_each_item_once() -> None:
    best = np.array([[5, 2, 7], [2, 5, -1], [9, 2, 5]])
    assert coverage(best[:, :1], 10) == 3 / 10
    assert coverage(best, 8) == coverage(np.array([2, 5, 7, 9]), 8) == 4 / 8
    assert coverage(np.empty((0, 3), np.int64), 8) == 0
    assert coverage_metric(10).name == "coverage@10"


def test_names_say_among_how_many_a_target_was_ranked() -> None:
    sampled = RankingMetrics((1, 10), among=101)
    assert sampled.names[-2:] == ("ndcg@10_of_101", "mrr_of_101")
    reported = sampled.reported(("ndcg", "hr", "mrr"))
    assert [metric.name for metric in reported] == [
        *("ndcg@10_of_101", "hr@10_of_101", "mrr_of_101", "ndcg@1_of_101", "hr@1_of_101")
    ]
    assert reported[0].heading == "NDCG@10 of 101" and reported[0].in_terminal and not reported[-1].in_terminal
    assert RankingMetrics().reported(("precision",))[0].heading == "P@10"
