"""Finds ids in a hash table of identities on a CPU, and in training counts and admits them, in one pass.

Source: linear probing (Knuth, "The Art of Computer Programming", volume 3, section 6.4); an id's place follows from
SplitMix64. The layout of the arrays is in :mod:`distembed.embedding.managed`.
"""

from typing import Any

import numpy as np
from numba import njit

from distembed.data.hashing import GOLDEN_GAMMA, MULTIPLIERS, SHIFTS

_GAMMA, _MULTIPLIERS = np.uint64(GOLDEN_GAMMA), tuple(map(np.uint64, MULTIPLIERS))
_SHIFTS, _BUCKET_SHIFT = tuple(map(np.uint64, SHIFTS)), np.uint64(48)
_MOST_COUNTED = 2**31 - 1
_compiled: Any = njit(nogil=True, error_model="numpy")

ADMIT = "int64[::1](int64[::1], int64[:,:,::1], int64[:,::1], int32[:,::1], int64[::1], int64, int64, int64)"
"""The signature of :func:`admit`."""
INSERT = "(int64[:,::1], int64, int32[::1])"
"""The signature of :func:`insert`."""


@_compiled
def _mix(number: Any) -> Any:
    mixed = np.uint64(number) + _GAMMA
    mixed = (mixed ^ (mixed >> _SHIFTS[0])) * _MULTIPLIERS[0]
    mixed = (mixed ^ (mixed >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return mixed ^ (mixed >> _SHIFTS[2])


@_compiled
def admit(ids: Any, entries: Any, used: Any, places: Any, rows: Any, num_slots: Any, min_count: Any, clock: Any) -> Any:
    """Counts ids in their order, admits some, and returns the slot of each id: 0 for id 0, and 1 for an unknown id.

    Args:
        ids: ``[ids]`` The raw ids, all of buckets on this rank.
        entries: ``[own buckets, entries, 2]`` Id, and ``count * 2^32 + clock`` of the last occurrence.
        used: ``[own buckets, 3 or more]`` The number of used slots, of used candidates, and of occurrences of ids that
            are not counted, since all candidates are used.
        places: ``[own buckets, places]`` The number of an entry + 1, or 0; the number of places is a power of two.
        rows: ``[buckets]`` The row of each bucket in the other arrays, or -1.
        num_slots: The number of slots of a bucket, which are its first entries; its candidates follow.
        min_count: The number of occurrences that admits an id.
        clock: The number of the batch.
    """
    bucket_mask, place_mask = np.uint64(len(rows) - 1), np.uint64(places.shape[1] - 1)
    num_candidates = entries.shape[1] - num_slots
    slots = np.empty_like(ids)
    for i in range(len(ids)):
        raw = ids[i]
        if raw == 0:
            slots[i] = 0
            continue
        slots[i] = 1
        hashed = _mix(raw)
        bucket = np.int64((hashed >> _BUCKET_SHIFT) & bucket_mask)
        row = rows[bucket]
        place = hashed & place_mask
        entry = places[row, place] - 1
        while entry >= 0 and entries[row, entry, 0] != raw:
            place = (place + np.uint64(1)) & place_mask
            entry = places[row, place] - 1
        count = 1
        if entry >= 0:
            count = min((entries[row, entry, 1] >> 32) + 1, _MOST_COUNTED)
        if (entry < 0 or entry >= num_slots) and count >= min_count and used[row, 0] < num_slots:
            if entry >= 0:
                entries[row, entry, 1] = 0  # no candidate any more
            entry = used[row, 0]
            used[row, 0] += 1
            places[row, place] = entry + 1
            entries[row, entry, 0] = raw
        elif entry < 0:
            if used[row, 1] == num_candidates:
                used[row, 2] += 1
                continue
            entry = num_slots + used[row, 1]
            used[row, 1] += 1
            places[row, place] = entry + 1
            entries[row, entry, 0] = raw
        entries[row, entry, 1] = (count << 32) + clock
        if entry < num_slots:
            slots[i] = 2 + bucket * num_slots + entry
    return slots


@_compiled
def insert(entries: Any, first: Any, places: Any) -> None:
    """Writes the places of new entries of one bucket: ``entries`` ``[new, 2]`` are its entries from ``first`` on."""
    place_mask = np.uint64(len(places) - 1)
    for entry in range(len(entries)):
        place = _mix(entries[entry, 0]) & place_mask
        while places[place] != 0:
            place = (place + np.uint64(1)) & place_mask
        places[place] = first + entry + 1
