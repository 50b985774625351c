"""Managed ids of several tables on ranks, against dictionaries that see the whole batch, for streams of any kind."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.ranks import Collectives
from distembed.embedding import managed_sizes
from distembed.embedding.managed import ManagedIds
from distembed.embedding.managed_sizes import ManagedSizes
from distembed.sharding.managed_ids import ShardedManagedFeatures
from tests.embedding.managed_dictionary import DictionaryPolicy, managed_config, skewed_stream
from tests.ranks import run_cases

NUM_ROWS, NUM_STEPS = 22, 40
EXTREMES = np.array([-(2**63), -(2**63) + 1, -(2**32), -1, 0, 1, 2, 2**31, 2**32, 2**62, 2**63 - 1])
FEATURES = {"c": "second", "a": "first", "other": None, "b": "first", "d": "least"}  # of each batch, with their tables
STREAMS: dict[str, Callable[[np.random.Generator, int, int], NDArray[np.int64]]] = {
    "skewed": lambda rng, step, count: (60 * rng.random(count) ** 3).astype(np.int64) + step // 10,
    "new": lambda rng, step, count: step * 10_000 + rng.permutation(10_000)[:count],
    "equal": lambda rng, step, count: np.full(count, 7),
    "missing": lambda rng, step, count: np.zeros(count, np.int64),
    "extremes": lambda rng, step, count: rng.choice(EXTREMES, count),
}


def draw(stream: str, step: int) -> dict[str, list[NDArray[np.int64]]]:
    """The raw ids of each feature, row by row; every fifth batch has no ids."""
    rng = np.random.default_rng(step)
    lengths = rng.integers(0, 4 if step % 5 else 1, (len(FEATURES), NUM_ROWS))
    drawn = {name: STREAMS[stream](rng, step, own.sum()) for name, own in zip(FEATURES, lengths, strict=True)}
    return {name: np.split(ids, own.cumsum()[:-1]) for (name, ids), own in zip(drawn.items(), lengths, strict=True)}


def check(rank: int, world_size: int, stream: str, policy: str, min_count: int) -> None:
    managed_sizes._SLOTS_PER_BUCKET = 2  # so that tables of 18 ids have 8 buckets
    configs = {
        name: managed_config(size, policy, min_count=min_count, candidates=candidates, every=every)
        for name, size, candidates, every in (("first", 18, 24, 3), ("second", 18, 24, 4), ("least", 3, 1, 1))
    }
    policies = {name: DictionaryPolicy(config) for name, config in configs.items()}
    managed = {name: ManagedIds(ManagedSizes(name, config)) for name, config in configs.items()}
    for own in managed.values():
        own.place(rank, world_size)
    assert dist.group.WORLD is not None
    by_feature = {name: managed[table] for name, table in FEATURES.items() if table is not None}
    give_slots = ShardedManagedFeatures(by_feature, dist.group.WORLD)
    own_rows = slice(rank * NUM_ROWS // world_size, (rank + 1) * NUM_ROWS // world_size)

    def features(batch: dict[str, list[NDArray[np.int64]]]) -> KeyedJaggedTensor:
        rows = [row for name in FEATURES for row in batch[name][own_rows]]
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int32)
        return KeyedJaggedTensor([*FEATURES], torch.from_numpy(np.concatenate(rows)), lengths=lengths)

    for step in range(1, NUM_STEPS + 1):
        raw, admits = draw(stream, step), step % 4 > 0  # every fourth batch is an evaluation
        expected = {name: [row.tolist() for row in raw[name]] for name in FEATURES}
        seen = dict.fromkeys(policies, 0), dict.fromkeys(policies, 0)
        for table, own_policy in policies.items():
            names = [name for name in FEATURES if FEATURES[name] == table]
            ids = [id for name in names for row in expected[name] for id in row]
            slots = own_policy.batch(ids) if admits else own_policy.lookup(ids)
            seen[0][table], seen[1][table] = sum(slot > 1 for slot in slots), sum(id != 0 for id in ids)
            in_order = iter(slots)
            expected |= {name: [[next(in_order) for _ in row] for row in expected[name]] for name in names}
        found = give_slots(features(raw), admits)
        assert found.values().tolist() == [id for name in FEATURES for row in expected[name][own_rows] for id in row]
        for table, own in managed.items():
            counts = torch.tensor(own.take_counts(own.step))
            dist.all_reduce(counts)
            assert counts.tolist() == ([seen[0][table], seen[1][table]] if admits else [0, 0])
            if step % configs[table].eviction.every == 0:
                gathered: list[list[int]] = [[] for _ in range(world_size)]
                dist.all_gather_object(gathered, own.evict().tolist())
                assert sorted(sum(gathered, [])) == sorted(policies[table].evict())
    evicted = torch.tensor([own.num_evicted for own in managed.values()])
    dist.all_reduce(evicted)
    assert evicted.tolist() == [own.evicted for own in policies.values()]
    assert (evicted.sum() > 0) == (stream not in ("equal", "missing"))


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_tables_of_one_size_and_of_two_columns_are_dictionaries(world_size: int) -> None:
    streams = [(stream, "distance_lfu", 1) for stream in STREAMS]
    run_cases(world_size, check, [*streams, ("skewed", "lfu", 2), ("new", "lru", 1), ("extremes", "lru", 3)])


def check_long(rank: int, world_size: int, policy: str) -> None:
    managed_sizes._SLOTS_PER_BUCKET = 20  # so that there are 64 buckets
    config = managed_config(5_000, policy, min_count=2, every=10)
    managed, expected = ManagedIds(ManagedSizes("t", config)), DictionaryPolicy(config)
    managed.place(rank, world_size)
    assert dist.group.WORLD is not None
    give_slots, ranks = ShardedManagedFeatures({"a": managed}, dist.group.WORLD), Collectives()
    hits = expected_hits = 0
    for step, batch in enumerate(np.split(skewed_stream(1_000_000, 10**5), 100), start=1):
        own = torch.from_numpy(np.array_split(batch, world_size)[rank])
        slots = give_slots(KeyedJaggedTensor(["a"], own, lengths=torch.ones(len(own), dtype=torch.int32)), True)
        found = torch.cat(ranks.gather(slots.values())).tolist()
        hits += sum(ranks.gather(managed.take_counts(step)[0]))
        evicted = sorted(torch.cat(ranks.gather(managed.evict() if step % 10 == 0 else own[:0])).tolist())
        if rank == 0:
            assert found == expected.batch(batch.tolist())
            expected_hits += sum(slot > 1 for slot in found)
            assert evicted == (sorted(expected.evict()) if step % 10 == 0 else [])
    num_evicted = sum(ranks.gather(managed.num_evicted))
    assert rank > 0 or (hits, num_evicted) == (expected_hits, expected.evicted) and num_evicted > 1_000


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_million_skewed_ids_have_the_slots_of_a_dictionary(world_size: int) -> None:
    run_cases(world_size, check_long, [("lfu",), ("lru",), ("distance_lfu",)])
