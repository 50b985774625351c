"""Decides whether explicit partitions are complementary, by every id and without Python loops over ids.

Each id's k rows become one hashed 64-bit key; ids collide where keys are equal. Keys are sorted range by range: hashed
keys spread evenly, so n ids take about ``n / _MOST_KEYS`` passes over the assignments. Trade-off: more passes in place
of more memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from distembed.base.lazy import torch
from distembed.partitions.base import MAX_NUM_EMBEDDINGS
from distembed.partitions.hashing import mix64

if TYPE_CHECKING:
    from torch import Tensor

_MOST_KEYS = 2**26
"""The number of evenly spread keys that are sorted at once: half a GiB."""

_CHUNK_IDS = 2**14
"""The number of ids whose keys are computed at once: few enough for the processor's cache, and for torch not to split
them among threads, which costs more than it gains, and many times more where the processor is busy."""


@dataclass(frozen=True)
class _Keys:
    """The key of each id: its rows as one number of a mixed radix, hashed; past 63 bits, row after row hashed."""

    assignments: Sequence[Tensor]
    num_rows: Sequence[int]
    salt: int = 0

    @property
    def num_ids(self) -> int:
        return len(self.assignments[0])

    def chunks(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yields the first id of each chunk, and the keys of the chunk."""
        exact = math.prod(self.num_rows) <= MAX_NUM_EMBEDDINGS
        for start in range(0, self.num_ids, _CHUNK_IDS):
            key = torch.full((1,), self.salt)  # of one dimension, so that narrower rows are widened to int64
            for rows, bound in zip(self.assignments, self.num_rows, strict=True):
                key = (key * bound if exact else mix64(key)) + rows[start : start + _CHUNK_IDS]
            yield start, mix64(key).numpy()


@dataclass(frozen=True)
class _Survey:
    """The number of distinct keys of a range, and a key that occurs more than once, if any."""

    num_distinct: int
    repeated: int | None


def find_collision(assignments: Sequence[Tensor], num_rows: Sequence[int]) -> tuple[int, int] | None:
    """Returns two ids with the same row in every assignment, the smaller one first; None without any.

    Args:
        assignments: Integer tensors of length n on the CPU, one for each partition; entry x is the row of id x.
        num_rows: The number of rows of each assignment, above every entry of it.
    """
    tuples = math.prod(num_rows)
    if tuples < len(assignments[0]):  # pigeonhole: the first tuples + 1 ids hold a collision already
        assignments = [rows[: tuples + 1] for rows in assignments]
    for salt in itertools.count():
        keys = _Keys(assignments, num_rows, salt)
        repeated = next((s.repeated for s in _surveys(keys) if s.repeated is not None), None)
        pair = None if repeated is None else _same_rows(keys, repeated)
        # Past 63 bits two tuples may happen to share a hash; under another salt they will not.
        if repeated is None or pair is not None:
            return pair
    raise AssertionError("some salt hashes distinct tuples to distinct keys")


def count_tuples(assignments: Sequence[Tensor], num_rows: Sequence[int]) -> int:
    """Returns the number of distinct tuples of rows of the ids.

    Past 63 bits it counts distinct 64-bit hashes, about ``n^2 / 2^65`` too few.
    """
    return sum(survey.num_distinct for survey in _surveys(_Keys(assignments, num_rows)))


def _surveys(keys: _Keys) -> Iterator[_Survey]:
    """Surveys one range of keys after another; the ranges have equal widths and cover all int64 keys."""
    count = math.ceil(keys.num_ids / _MOST_KEYS)
    bounds = [i * 2**64 // count - 2**63 for i in range(count + 1)]
    for low, high in itertools.pairwise(bounds):
        # high - 1, as high may be 2^63
        found = np.concatenate([chunk[(chunk >= low) & (chunk <= high - 1)] for _, chunk in keys.chunks()])
        found.sort()
        same = found[1:] == found[:-1]
        num_repeats = int(np.count_nonzero(same))
        yield _Survey(len(found) - num_repeats, int(found[int(same.argmax())]) if num_repeats else None)


def _same_rows(keys: _Keys, key: int) -> tuple[int, int] | None:
    """Returns the first two ids of this key that have the same rows, or None where all differ."""
    first_ids: dict[tuple[int, ...], int] = {}
    for start, chunk in keys.chunks():
        for offset in np.flatnonzero(chunk == key).tolist():
            found = start + offset
            rows = tuple(int(assigned[found]) for assigned in keys.assignments)
            if rows in first_ids:
                return first_ids[rows], found
            first_ids[rows] = found
    return None
