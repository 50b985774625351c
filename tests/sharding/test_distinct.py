"""Distinct ids of each feature, against Python's sets and loops."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distembed.sharding.ids import DistinctIds, IdCounts, distinct_ids, every_id

FEATURES = st.lists(st.lists(st.integers(0, 4), max_size=8), min_size=1, max_size=5)


@pytest.mark.parametrize("scale", [1, 10**9, 2**60])
@settings(max_examples=40)
@given(features=FEATURES)
def test_every_feature_keeps_its_own_distinct_ids(scale: int, features: list[list[int]]) -> None:
    ids = torch.tensor([i * scale for feature in features for i in feature], dtype=torch.long)
    counts = [len(feature) for feature in features]
    found = distinct_ids(ids, counts, 4 * scale + 1)
    pieces = [piece.tolist() for piece in found.ids.split(found.counts.on_host)]
    assert pieces == [sorted({i * scale for i in feature}) for feature in features]
    assert torch.equal(found.ids[found.inverse], ids)
    owner = [f for f, count in enumerate(found.counts.on_host) for _ in range(count)]
    given_owner = [f for f, count in enumerate(counts) for _ in range(count)]
    assert [owner[i] for i in found.inverse.tolist()] == given_owner
    slots = [i * len(counts) + f for f, count in enumerate(found.counts.on_host) for i in range(count)]
    assert found.slots().tolist() == slots


def take_every_id(ids: Tensor, counts: list[int], num_embeddings: int) -> DistinctIds:
    return every_id(ids, IdCounts(counts, torch.tensor(counts)))


@given(features=FEATURES)
def test_ids_that_are_taken_as_they_are_have_the_slots_of_distinct_ones(features: list[list[int]]) -> None:
    ids, counts = torch.tensor([i for feature in features for i in feature]).long(), [len(own) for own in features]
    taken = take_every_id(ids, counts, 5)
    assert torch.equal(taken.ids, ids)
    assert torch.equal(taken.inverse, torch.arange(len(ids)))
    assert taken.slots().tolist() == [i * len(counts) + f for f, count in enumerate(counts) for i in range(count)]


@pytest.mark.parametrize("find", [distinct_ids, take_every_id])
@pytest.mark.parametrize("pooling", ["sum", "weighted", "max"])
@settings(max_examples=40)
@given(bags=st.lists(st.lists(st.integers(0, 6), max_size=5), max_size=6))
def test_pooling_and_its_gradient_equal_a_loop(find: Any, pooling: str, bags: list[list[int]]) -> None:
    ids = torch.tensor([i for bag in bags for i in bag], dtype=torch.long)
    found = find(ids, [len(ids)], 7)
    offsets = torch.tensor([0, *[len(bag) for bag in bags]]).cumsum(0)
    table = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(len(ids), dtype=torch.float64) if pooling == "weighted" else torch.ones(len(ids)).double()
    weights.requires_grad_(pooling == "weighted")
    pooled = found.pool(
        table[found.ids], offsets, "max" if pooling == "max" else "sum", weights if pooling == "weighted" else None
    )
    assert pooled.shape == (len(bags), 3)
    if not bags:
        return

    def pool_bag(bag: list[int], of_ids: Tensor) -> Tensor:
        if not bag:
            return torch.zeros(3, dtype=torch.float64)
        if pooling == "max":
            return table[list(dict.fromkeys(bag))].amax(0)  # whose gradient is shared among equals
        return (table[bag] * of_ids.unsqueeze(1)).sum(0)

    pieces = weights.split([len(bag) for bag in bags])
    expected = torch.stack([pool_bag(bag, piece) for bag, piece in zip(bags, pieces, strict=True)])
    torch.testing.assert_close(pooled, expected)
    upstream = torch.randn_like(pooled)
    trained = [table, weights] if pooling == "weighted" else [table]
    ours = torch.autograd.grad((pooled * upstream).sum(), trained)
    if len(ids):
        torch.testing.assert_close(ours, torch.autograd.grad((expected * upstream).sum(), trained))
