"""The policy of managed ids in plain Python, and a skewed stream of raw ids."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distembed.embedding.managed_sizes import ManagedSizes
from distembed.embedding.settings import AdmissionConfig, EvictionConfig, ManagedConfig

_BITS = 2**64 - 1


@dataclass
class Seen:
    """An id of the dictionary: how often and in which batch it occurred, and its slot."""

    count: int = 0
    last: int = 0
    slot: int | None = None


@dataclass
class Bucket:
    """The ids of one bucket, in the order of their arrival."""

    config: ManagedConfig
    slots: range
    num_candidates: int
    seen: dict[int, Seen] = field(default_factory=dict)
    num_used: int = 0
    num_waiting: int = 0
    evicted: int = 0
    refused: int = 0
    last_eviction: int = 0

    def slot(self, id: int, clock: int) -> int:
        entry = self.seen.get(id, Seen())
        if (
            entry.slot is None
            and self.num_used < len(self.slots)
            and entry.count + 1 >= self.config.admission.min_count
        ):
            entry.slot = self.slots[self.num_used]
            self.num_used += 1
        elif id not in self.seen:
            if self.num_waiting == self.num_candidates:
                self.refused += 1
                return 1
            self.num_waiting += 1
        entry.count, entry.last = entry.count + 1, clock
        self.seen[id] = entry
        return 1 if entry.slot is None else entry.slot

    def evict(self, clock: int) -> list[int]:
        def score(own: Seen) -> float:
            distance = own.count / (clock - own.last + 1)
            return {"lfu": own.count, "lru": own.last, "distance_lfu": distance}[self.config.eviction.policy]

        waiting = [own for own in self.seen.values() if own.slot is None]
        waiting = [own for own in waiting if own.count >= self.config.admission.min_count]
        residents = sorted((own for own in self.seen.values() if own.slot is not None), key=lambda own: own.slot or 0)
        slots = []
        for new, old in zip(sorted(waiting, key=score, reverse=True), sorted(residents, key=score), strict=False):
            if score(new) > score(old):
                assert old.slot is not None
                slots.append(old.slot)
                new.slot, old.slot = old.slot, None
        self.seen = {id: own for id, own in self.seen.items() if own.slot is not None}
        self.num_waiting = 0
        self.evicted += len(slots)
        if self.config.eviction.half_life_steps is not None:
            for step in range(self.last_eviction + 1, clock + 1):
                if step % self.config.eviction.half_life_steps == 0:
                    self.seen = {id: replace(own, count=own.count // 2) for id, own in self.seen.items()}
        self.last_eviction, self.refused = clock, 0
        return slots


class DictionaryPolicy:
    """All buckets of a table."""

    def __init__(self, config: ManagedConfig) -> None:
        sizes, self.config = ManagedSizes("any", config), config
        slots = range(2, 2 + sizes.num_buckets * sizes.slots_per_bucket)
        self.clock = 0
        self.buckets = [
            Bucket(config, slots[b * sizes.slots_per_bucket :][: sizes.slots_per_bucket], sizes.candidates_per_bucket)
            for b in range(sizes.num_buckets)
        ]

    def bucket(self, id: int) -> Bucket:
        mixed = id + 0x9E3779B97F4A7C15 & _BITS  # SplitMix64
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _BITS
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _BITS
        return self.buckets[((mixed ^ mixed >> 31) >> 48) % len(self.buckets)]

    def batch(self, ids: list[int]) -> list[int]:
        """Returns the slots of a batch in training."""
        self.clock += 1
        return [self.bucket(id).slot(id, self.clock) if id else 0 for id in ids]

    def lookup(self, ids: list[int]) -> list[int]:
        """Returns the slots of ids in an evaluation."""
        return [self.bucket(id).seen.get(id, Seen(slot=1)).slot or 1 if id else 0 for id in ids]

    def evict(self) -> list[int]:
        """Returns the slots that are given to other ids."""
        return [slot for bucket in self.buckets for slot in bucket.evict(self.clock)]

    @property
    def evicted(self) -> int:
        return sum(bucket.evicted for bucket in self.buckets)


def managed_config(size: int, policy: str = "lfu", **values: Any) -> ManagedConfig:
    admission = AdmissionConfig(values.pop("min_count", 1), values.pop("candidates", None))
    return ManagedConfig(size, admission=admission, eviction=EvictionConfig(policy, **values))  # type: ignore[arg-type]


def skewed_stream(num_ids: int, num_distinct: int = 10**6, seed: int = 0) -> NDArray[np.int64]:
    """Returns raw ids whose ranks follow Zipf's law and whose meaning drifts; 1% are missing (0)."""
    rng = np.random.default_rng(seed)
    ranks = np.exp(rng.uniform(0.0, np.log(num_distinct), num_ids)).astype(np.int64)
    ids = (ranks * 8 + np.arange(num_ids) * 8 // num_ids) * 0x1E3779B97F4A7C15
    ids[rng.random(num_ids) < 0.01] = 0
    return ids
