r"""Stretches of users' histories, as rows of a dataset of sequences.

Interactions are sorted by user, split and time, so that a row is a range of them::

    a user's items     1 2 3 4 5 6 7 8 9      the last two are to be predicted: 8 validates, 9 tests
    max_length 3       [1 2 3 4|       ]      training, ``all``: the first window ends where the next begins, so that
                             [4 5 6 7]        each item but the first is the last of three at most, and predicted once
                             [4 5 6 7]        training, ``latest``
                       [1 2 3 4 5 6 7 8]      validation: the whole history, with the item to predict
                       [1 2 3 4 5 6 7 8 9]    test
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distembed.data.prepare.interactions.options import ALL
from distembed.data.prepare.interactions.splits import TRAIN


@dataclass(frozen=True, eq=False)
class Windows:
    """The rows of a split."""

    starts: NDArray[np.int64]  # where each row begins among the sorted interactions
    stops: NDArray[np.int64]  # where it ends

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def num_entries(self) -> int:
        """Number of interactions in all rows, each counted as often as it is there."""
        return int((self.stops - self.starts).sum())

    @property
    def mean_entries(self) -> float:
        """Mean number of interactions of a row; 0 without rows."""
        return self.num_entries / max(1, len(self))


def training_windows(users: NDArray[np.int32], parts: NDArray[np.uint8], max_length: int, windows: str) -> Windows:
    """Returns the training rows, of 2 to ``max_length + 1`` items; users and their splits are ascending."""
    bounds = user_bounds(users)
    begins = bounds[:-1]
    ends = begins + np.add.reduceat(parts == TRAIN, begins, dtype=np.int64)
    lengths = ends - begins
    begins, ends, lengths = begins[lengths > 1], ends[lengths > 1], lengths[lengths > 1]
    if windows != ALL:
        return Windows(np.maximum(begins, ends - max_length - 1), ends)
    # from the end, so that only the first window of a user may be short
    counts = -(-(lengths - 1) // max_length)
    number_from_end = np.repeat(np.cumsum(counts), counts) - np.arange(counts.sum()) - 1
    stops = np.repeat(ends, counts) - number_from_end * max_length
    return Windows(np.maximum(np.repeat(begins, counts), stops - max_length - 1), stops)


def evaluation_windows(users: NDArray[np.int32], parts: NDArray[np.uint8], part: int) -> Windows:
    """Returns a row for each interaction of a split that is not its user's first: the whole history, with itself."""
    bounds = user_bounds(users)
    begins = np.repeat(bounds[:-1], np.diff(bounds))
    targets = np.flatnonzero((parts == part) & (np.arange(len(users)) > begins))
    return Windows(begins[targets], targets + 1)


def user_bounds(sorted_users: NDArray[np.int32]) -> NDArray[np.int64]:
    """Returns where each user's interactions begin, and where the last one's end."""
    return np.append(np.flatnonzero(np.diff(sorted_users, prepend=-1)), len(sorted_users))


def entries(windows: Windows, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the interactions of some rows end to end, and where each row begins among them and the last one ends."""
    starts, lengths = windows.starts[start:stop], windows.stops[start:stop] - windows.starts[start:stop]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1]), offsets
