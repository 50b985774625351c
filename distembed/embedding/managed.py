"""Managed ids: raw ids get slots of a table as they occur in training, and lose them to ids that score higher.

::

    raw ids (any int64) -> slots in [0, size) -> partition -> rows         slot 0: missing (id 0), slot 1: unknown

Ids are counted one by one in the order of the batch: feature after feature, row after row of the whole batch. At its
``min_count``-th occurrence since the last eviction an id gets a free slot, and from then on has vectors of its own.
Where no slot is free it stays a candidate. An eviction compares candidates with the ids in slots::

    score     lfu: n     lru: t     distance_lfu: n / (now - t + 1)      n occurrences, the last one in batch t

The best candidate takes the slot of the worst id, the second best that of the second worst, while its score is higher.
Equal scores leave the slot as it is. Then candidates are forgotten, so that a stream without end takes no more memory.
With a half-life, occurrences of ids in slots are then halved: an id that was frequent long ago loses its slot at last
(the reset of TinyLFU; Einziger, Friedman and Manes, ACM Transactions on Storage 2017, section 3.3).

Ids are divided by a hash into buckets, each with slots of its own, and buckets among the ranks. Their number depends on
``size`` alone, so that any number of ranks gives the same slots. A bucket in memory, ``entries [entries, 2]``::

    | slots, in the order of admission | candidates, in the order of arrival |      id, count * 2^32 + last batch

TorchRec's own modules are not wrapped, for reasons measured on a CPU at 8,192 ids a batch (``tools/RESULTS.md``).
``MCHManagedCollisionModule`` takes seconds for an eviction, admits no id before the first one, and does not save the
ids seen since the last, so that resumed runs differ. ``HashZchManagedCollisionModule`` refuses to train on a CPU, and
evicts by the hours of the clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Int64
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.data.hashing import mix64_array
from distembed.embedding.batches import with_ids
from distembed.embedding.managed_sizes import NUM_COUNTERS, UNKNOWN, ManagedSizes
from distembed.kernels.loading import load_identities

_SLOTS, _CANDIDATES, _REFUSED, _CLOCK, _EVICTED, _EVICTION = range(NUM_COUNTERS)
_MOST_AHEAD = 64  # batches whose counts are kept one by one: more than any pipeline prepares ahead
_LAST = 2**32 - 1  # the bits of an entry's second number that hold the batch of the last occurrence


class ManagedIds:
    """The identities of one table on this rank: which raw id has which slot, and the scores.

    Attributes:
        sizes: Numbers of slots, candidates and buckets.
        rank: The rank whose buckets are here.
        world_size: The number of ranks that have buckets.
        step: The number of batches before the next one.
    """

    def __init__(self, sizes: ManagedSizes) -> None:
        self.sizes = sizes
        self.rank, self.world_size = 0, 1
        self.step = 0
        self._counts: list[NDArray[np.int64]] = []
        self._copies: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def place(self, rank: int, world_size: int) -> None:
        """Keeps the buckets of one of several ranks; nothing may be admitted yet."""
        self.rank, self.world_size = rank, world_size
        self.__dict__.pop("state", None)
        self.state_changed()

    @cached_property
    def owners(self) -> NDArray[np.uint16]:
        """The rank that has each bucket; tables of one bucket are spread over the ranks by their names."""
        return ((np.arange(self.sizes.num_buckets) + self.sizes.first_rank) % self.world_size).astype(np.uint16)

    @cached_property
    def buckets(self) -> NDArray[np.int64]:
        """The buckets on this rank, in ascending order."""
        return np.flatnonzero(self.owners == self.rank)

    @cached_property
    def state(self) -> dict[str, Tensor]:
        """The identities of this rank's buckets, on the CPU; the first access takes the memory.

        ``entries`` ``[own buckets, entries, 2]`` has ids, counts and batches; ``used`` ``[own buckets, 6]`` has the
        number of used slots, used candidates, occurrences since the last eviction that were not counted, batches,
        evicted ids, and batches before the last eviction.
        """
        entries = torch.zeros(len(self.buckets), self.sizes.entries_per_bucket, 2, dtype=torch.int64)
        return {"entries": entries, "used": torch.zeros(len(self.buckets), NUM_COUNTERS, dtype=torch.int64)}

    def state_changed(self) -> None:
        """Drops the copies that were computed from the state or the placement, after either has changed."""
        self._copies.clear()
        for name in ("_places", "_rows", *(("owners", "buckets") if "state" not in self.__dict__ else ())):
            self.__dict__.pop(name, None)

    @cached_property
    def _rows(self) -> NDArray[np.int64]:
        """The index in the state of each bucket, or -1."""
        rows = np.full(self.sizes.num_buckets, -1)
        rows[self.buckets] = np.arange(len(self.buckets))
        return rows

    @cached_property
    def _places(self) -> NDArray[np.int32]:
        """The hash table of each bucket on this rank: number of an entry + 1, or 0."""
        places = np.zeros((len(self.buckets), self.sizes.places_per_bucket), np.int32)
        for row in range(len(self.buckets)):
            self._insert(places, row)
        return places

    def _insert(self, places: NDArray[np.int32], row: int) -> None:
        """Writes a bucket's used entries into its hash table, which is empty."""
        _, insert = load_identities()
        entries, num_slots = self.state["entries"][row].numpy(), self.sizes.slots_per_bucket
        slots, candidates = self.state["used"][row, : _CANDIDATES + 1].tolist()
        insert(entries[:slots], 0, places[row])
        waiting = entries[num_slots : num_slots + candidates]
        for index in np.flatnonzero(waiting[:, 1]):  # a candidate that got a slot has the count 0
            insert(waiting[index : index + 1], num_slots + index, places[row])

    def start_batch(self) -> None:
        """Counts a batch, before the ids of its features are admitted."""
        self.state["used"][:, _CLOCK] += 1
        self.step += 1
        self._counts.append(np.zeros(2, np.int64))
        if len(self._counts) > _MOST_AHEAD:  # bounds the list if take_counts is never called
            self._counts[:2] = [self._counts[0] + self._counts[1]]

    def admit(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Counts and admits ids of buckets on this rank in their order, in training; returns the slot of each.

        Raises a UserError where numba is missing.
        """
        admit, _ = load_identities()
        used = self.state["used"].numpy()
        if not len(used):
            return np.empty_like(ids)
        self._copies.clear()
        slots: NDArray[np.int64] = admit(
            np.ascontiguousarray(ids),
            self.state["entries"].numpy(),
            used,
            self._places,
            self._rows,
            self.sizes.slots_per_bucket,
            self.sizes.config.admission.min_count,
            int(used[0, _CLOCK]),
        )
        if self._counts:
            self._counts[-1] += np.count_nonzero(slots > UNKNOWN), np.count_nonzero(ids)
        return slots

    def take_counts(self, until_step: int) -> tuple[int, int]:
        """Returns the numbers of ids with a slot and of all ids that are not missing, in batches since the last call.

        Batches of later steps than the first ``until_step``, which a pipeline has prepared, are left for the next call.
        """
        num_taken = max(0, len(self._counts) - max(0, self.step - until_step))
        known, present = sum(self._counts[:num_taken], np.zeros(2, np.int64)).tolist()
        self._counts = self._counts[num_taken:]
        return known, present

    @property
    def num_evicted(self) -> int:
        """The number of ids that lost their slots on this rank."""
        return int(self.state["used"][:, _EVICTED].sum())

    def lookup(self, ids: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
        """Returns the slots of ids without counting them; 1 for an id that has no slot on this rank."""
        if "state" not in self.__dict__:
            return ids.ne(0).long()
        return find_slots(ids, *self._sorted_on(ids.device))

    def _sorted_on(self, device: torch.device) -> tuple[Int64[Tensor, " known"], Int64[Tensor, " known"]]:
        """Returns the ids that have slots on this rank in ascending order, and their slots; id 0 is among them."""
        if device not in self._copies:
            known, slots = self.known()
            known, slots = np.append(known, 0), np.append(slots, 0)
            order = np.argsort(known)
            self._copies[device] = (
                torch.from_numpy(known[order]).to(device),
                torch.from_numpy(slots[order]).to(device),
            )
        return self._copies[device]

    def known(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the raw ids that have slots on this rank, in the order of the slots, and the slots."""
        ids, slots = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for row, bucket in enumerate(self.buckets):
            num_used = int(self.state["used"][row, _SLOTS])
            ids.append(self.state["entries"][row, :num_used, 0].numpy())
            slots.append(self.sizes.first_slot(int(bucket)) + np.arange(num_used))
        return np.concatenate(ids), np.concatenate(slots)

    def owners_of(self, ids: NDArray[np.int64]) -> NDArray[np.uint16]:
        """Returns the rank of each raw id."""
        buckets = mix64_array(ids.view(np.uint64)) >> np.uint64(48) & np.uint64(self.sizes.num_buckets - 1)
        return self.owners[buckets.astype(np.int64)]

    @property
    def num_refused(self) -> int:
        """The occurrences since the last eviction, on this rank, of ids that no candidate's place was left for."""
        return int(self.state["used"][:, _REFUSED].sum())

    def evict(self) -> Int64[Tensor, " evicted"]:
        """Gives slots on this rank to candidates that score higher, and forgets candidates; returns these slots."""
        changed = [self._evict_bucket(row, int(bucket)) for row, bucket in enumerate(self.buckets)]
        self._halve_counts()
        self.state["used"][:, _REFUSED] = 0
        self.state["used"][:, _EVICTION] = self.state["used"][:, _CLOCK]
        self._copies.clear()
        return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *changed]))

    def _evict_bucket(self, row: int, bucket: int) -> NDArray[np.int64]:
        entries, used = self.state["entries"][row].numpy(), self.state["used"][row].numpy()
        if not used[_CANDIDATES]:
            return np.empty(0, np.int64)
        num_slots = self.sizes.slots_per_bucket
        residents, waiting = entries[: used[_SLOTS]], entries[num_slots : num_slots + used[_CANDIDATES]]
        waiting = waiting[waiting[:, 1] >> 32 >= self.sizes.config.admission.min_count]
        lost = np.empty(0, np.int64)
        if len(waiting):
            resident_scores, scores = (self._scores(own[:, 1], int(used[_CLOCK])) for own in (residents, waiting))
            worst = np.argsort(resident_scores, kind="stable")[: len(waiting)]
            best = np.argsort(-scores, kind="stable")[: len(worst)]
            num_changed = int((scores[best] > resident_scores[worst]).sum())
            lost = worst[:num_changed]
            residents[lost] = waiting[best[:num_changed]]
        entries[num_slots:] = 0
        used[_CANDIDATES] = 0
        used[_EVICTED] += len(lost)
        if "_places" in self.__dict__:
            self._places[row] = 0
            self._insert(self._places, row)
        return self.sizes.first_slot(bucket) + lost

    def _halve_counts(self) -> None:
        """Halves the counts of ids in slots, rounded down, for each half-life that ended since the last eviction."""
        config, used = self.sizes.config.eviction, self.state["used"]
        if config.half_life_steps is None or not len(used):
            return
        now, last_eviction = (int(used[0, number]) // config.half_life_steps for number in (_CLOCK, _EVICTION))
        values = self.state["entries"][:, : self.sizes.slots_per_bucket, 1]
        values.copy_((values >> 32 >> min(now - last_eviction, 32)) << 32 | values & _LAST)

    def _scores(self, values: NDArray[np.int64], clock: int) -> NDArray[np.int64] | NDArray[np.float64]:
        """Returns the scores of entries by their second numbers."""
        counts, last = values >> 32, values & _LAST
        policy = self.sizes.config.eviction.policy
        return counts if policy == "lfu" else last if policy == "lru" else counts / (clock - last + 1)


def find_slots(
    ids: Int64[Tensor, "*shape"], known: Int64[Tensor, " known"], slots: Int64[Tensor, " known"]
) -> Int64[Tensor, "*shape"]:
    """Returns the slots of raw ids, given ``known`` ids in ascending order and their ``slots``; 1 for another id."""
    places = torch.searchsorted(known, ids).clamp(max=len(known) - 1)
    found = torch.where(known[places] == ids, slots[places], UNKNOWN)
    return torch.where(ids == 0, 0, found)


class ManagedFeatures:
    """Gives the ids of a batch's managed features their slots, on one rank with all identities.

    Args:
        by_feature: The identities by the names of features; features of a table share them.
    """

    def __init__(self, by_feature: dict[str, ManagedIds]) -> None:
        self._by_feature = by_feature

    def __call__(self, features: KeyedJaggedTensor, admits: bool) -> KeyedJaggedTensor:
        """Returns the batch with slots in the place of raw ids; with ``admits``, counts and admits ids as training."""
        parts = list(features.values().long().split(features.length_per_key()))
        places = [i for i, key in enumerate(features.keys()) if key in self._by_feature]
        managed = [self._by_feature[features.keys()[i]] for i in places]
        for i, slots in zip(places, self._slots(managed, [parts[i] for i in places], admits), strict=True):
            parts[i] = slots
        return with_ids(features, torch.cat(parts), features.weights_or_none())

    def _slots(self, managed: Sequence[ManagedIds], ids: Sequence[Tensor], admits: bool) -> Sequence[Tensor]:
        """Returns the slots of each feature's ids."""
        return map_parts(managed, ids, admits)


def map_parts(managed: Sequence[ManagedIds], parts: Sequence[Tensor], admits: bool) -> list[Tensor]:
    """Returns the slots of ids of buckets on this rank, part after part, each of the identities at its place."""
    if not admits:
        return [own.lookup(ids) for own, ids in zip(managed, parts, strict=True)]
    for own in dict.fromkeys(managed):
        own.start_batch()
    return [
        torch.from_numpy(own.admit(ids.cpu().numpy())).to(ids.device) for own, ids in zip(managed, parts, strict=True)
    ]
