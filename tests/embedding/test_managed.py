"""Managed ids against an independent dictionary of the same policy."""

import numpy as np
import pytest
import torch

from distembed.embedding.managed import ManagedIds
from distembed.embedding.managed_sizes import ManagedSizes
from tests.embedding.managed_dictionary import DictionaryPolicy, managed_config, skewed_stream


@pytest.mark.parametrize(
    "size, policy, min_count, candidates, half_life",
    [
        (5_000, "lfu", 2, None, None),
        (5_000, "lfu", 1, None, 7),
        (5_000, "lru", 3, 20_000, None),
        (2_000, "distance_lfu", 1, 700, 50),
        (300_000, "lru", 1, 10_000, None),
    ],
)
def test_equal_to_a_dictionary(
    size: int, policy: str, min_count: int, candidates: int | None, half_life: int | None
) -> None:
    every = max(20, size // 3000)
    config = managed_config(
        size, policy, min_count=min_count, candidates=candidates, every=every, half_life_steps=half_life
    )
    sizes = ManagedSizes("t", config)
    managed, expected = ManagedIds(sizes), DictionaryPolicy(config)
    for batch in np.split(skewed_stream(1_000_000, 200 * size), 500):
        managed.start_batch()
        assert managed.admit(batch).tolist() == expected.batch(batch.tolist())
        if expected.clock % config.eviction.every == 0:
            assert managed.num_refused == sum(bucket.refused for bucket in expected.buckets)
            assert managed.evict().tolist() == expected.evict()
            assert managed.num_refused == 0
            assert managed.lookup(torch.from_numpy(batch)).tolist() == expected.lookup(batch.tolist())
    assert expected.evicted > 50
    assert managed.num_evicted == expected.evicted
    saved = sum(state.nbytes for state in managed.state.values())
    assert (saved, saved + managed._places.nbytes) == (sizes.saved_bytes, sizes.memory_bytes)


def test_with_room_for_all_ids_slots_are_a_vocabulary() -> None:
    stream = skewed_stream(100_000)
    managed = ManagedIds(ManagedSizes("t", managed_config(len(set(stream.tolist())) + 1)))
    slots = np.concatenate([managed.admit(batch) for batch in np.split(stream, 100)])
    numbers = {0: 0}
    for id in stream.tolist():
        numbers.setdefault(id, len(numbers) + 1)
    assert slots.tolist() == [numbers[id] for id in stream.tolist()]
    ids, known = managed.known()
    assert dict(zip(ids.tolist(), known.tolist(), strict=True)) | {0: 0} == numbers


@pytest.mark.parametrize("half_life, keeps", [(None, True), (4, False)])
def test_an_id_that_was_frequent_long_ago_loses_its_slot(half_life: int | None, keeps: bool) -> None:
    managed = ManagedIds(ManagedSizes("t", managed_config(3, half_life_steps=half_life, every=4)))
    for batch in [np.full(1000, 7)] * 4 + [np.full(10, 8)] * 60:
        managed.start_batch()
        managed.admit(batch.astype(np.int64))
        if int(managed.state["used"][0, 3]) % 4 == 0:
            managed.evict()
    assert managed.known()[0].tolist() == [7 if keeps else 8]


def test_half_lives_that_ended_before_a_new_run_are_counted() -> None:
    managed = ManagedIds(ManagedSizes("t", managed_config(3, half_life_steps=500, every=1000)))
    managed.admit(np.full(2000, 7))
    for _ in range(1500):
        managed.start_batch()
    later = ManagedIds(managed.sizes)  # a run from these weights, which evicts after its own 1,000 steps
    for name, tensor in managed.state.items():
        later.state[name].copy_(tensor)
    for num_batches, half_lives in (1000, 5), (250, 5), (250, 6):
        for _ in range(num_batches):
            later.start_batch()
        later.evict()
        assert later.state["entries"][0, 0, 1] >> 32 == 2000 // 2**half_lives


def test_recency_has_no_half_life() -> None:
    with pytest.raises(ValueError, match="half_life_steps is 10, and the policy 'lru' scores no occurrences"):
        managed_config(100, "lru", half_life_steps=10)
