"""Decides whether explicit partitions are complementary, by every id, in bounded memory and without Python loops.

Each id's k rows become one 64-bit key, and ids collide where keys are equal. The keys are sorted, range by range of the
key space, in a buffer of fixed size; as the keys are hashed they spread evenly, so that n ids take about
``n / _BUFFER_KEYS`` passes over the assignments. Trade-off: more passes in place of more memory.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distembed.partitions.base import MAX_NUM_EMBEDDINGS
from distembed.partitions.hashing import mix64

_BUFFER_KEYS = 2**26
"""The number of keys that are sorted at once: half a GiB."""

_CHUNK_IDS = 2**14
"""The number of ids whose keys are computed at once: few enough for the processor's cache, and for torch not to split
them among threads, which costs more than it gains, and many times more where the processor is busy."""

_EXPECTED_FILL = 0.9
"""The share of the buffer that a range of evenly spread keys is expected to fill."""


@dataclass(frozen=True)
class _Keys:
    """The key of each id: its rows as one number of a mixed radix, hashed; past 63 bits, row after row hashed.

    Attributes:
        assignments: Integer tensors of length n, one for each partition; entry x is the row of id x.
        num_rows: The number of rows of each assignment.
        salt: Another one gives other hashes.
    """

    assignments: Sequence[Tensor]
    num_rows: Sequence[int]
    salt: int = 0

    @property
    def num_ids(self) -> int:
        """The number of ids, n."""
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
    """What was found out about the keys of a range.

    Attributes:
        num_distinct: The number of distinct keys.
        repeated: A key that occurs more than once, or None where there is none.
    """

    num_distinct: int
    repeated: int | None


def find_collision(assignments: Sequence[Tensor], num_rows: Sequence[int]) -> tuple[int, int] | None:
    """Returns two ids with the same row in every assignment, the smaller one first, or None where there are none.

    Args:
        assignments: Integer tensors of length n on the CPU, one for each partition; entry x is the row of id x.
        num_rows: The number of rows of each assignment; every row of assignment j lies in ``[0, num_rows[j])``.
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
    """Returns how many distinct tuples of rows the ids have; the arguments are those of :func:`find_collision`.

    Where tuples exceed 63 bits it is the number of distinct 64-bit hashes, below the truth by ``n^2 / 2^65`` or so.
    """
    return sum(survey.num_distinct for survey in _surveys(_Keys(assignments, num_rows)))


def _surveys(keys: _Keys) -> Iterator[_Survey]:
    """Surveys one range of keys after another; the ranges have equal widths and cover all int64 keys."""
    fits = keys.num_ids <= _BUFFER_KEYS
    buffer = np.empty(keys.num_ids if fits else _BUFFER_KEYS, dtype=np.int64)
    count = 1 if fits else math.ceil(keys.num_ids / (_EXPECTED_FILL * _BUFFER_KEYS))
    bounds = [i * 2**64 // count - 2**63 for i in range(count + 1)]
    for low, high in itertools.pairwise(bounds):
        yield _survey(keys, low, high, buffer)


def _survey(keys: _Keys, low: int, high: int, buffer: NDArray[np.int64]) -> _Survey:
    """Surveys the keys in ``[low, high)``, which it sorts within the buffer."""
    filled, repeated = 0, None
    for _, chunk in keys.chunks():
        # high - 1, as high may be 2^63
        chosen = chunk[(chunk >= low) & (chunk <= high - 1)]
        if filled + len(chosen) > len(buffer):
            filled, seen = _keep_distinct(buffer[:filled])
            repeated = seen if repeated is None else repeated
        if filled + len(chosen) > len(buffer):  # still: more distinct keys than expected in this range
            middle = (low + high) // 2
            left, right = _survey(keys, low, middle, buffer), _survey(keys, middle, high, buffer)
            repeated = left.repeated if right.repeated is None else right.repeated
            return _Survey(left.num_distinct + right.num_distinct, repeated)
        buffer[filled : filled + len(chosen)] = chosen
        filled += len(chosen)
    distinct, seen = _keep_distinct(buffer[:filled])
    return _Survey(distinct, seen if repeated is None else repeated)


def _keep_distinct(keys: NDArray[np.int64]) -> tuple[int, int | None]:
    """Sorts keys in place and moves the distinct ones to the front; returns their number, and a repeated key if any."""
    keys.sort()
    same = keys[1:] == keys[:-1]
    repeats = int(np.count_nonzero(same))
    if repeats == 0:
        return len(keys), None
    repeated = int(keys[int(same.argmax())])
    keys[1 : len(keys) - repeats] = keys[1:][~same]
    return len(keys) - repeats, repeated


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
