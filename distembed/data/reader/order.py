"""The order in which an epoch's rows are read: pure arithmetic, the same on every rank.

The *global* sequence of batches is a function of (dataset, :class:`BatchOrder`, epoch) and never of the number of
ranks, so a run can stop on eight ranks and resume on two. So that ranks can share the decoding all the same, every
batch is made of lanes. A batch of b rows with L lanes and W ranks::

    position   0 ........................................ b
    lanes      |  lane 0  |  lane 1  |  lane 2  |  lane 3 |    lane l has [l*b//L, (l+1)*b//L)
    ranks      |       rank 0        |       rank 1       |    rank r has [r*b//W, (r+1)*b//W)

A rank decodes only the lanes that it overlaps. The epoch's row groups are put in random order, each lane gets a
contiguous share of that sequence (as many rows as its slots add up to), and shuffles it window by window.

Trade-off: rows mix within ``lanes x window`` (about a million rows) around a random choice of row groups, which is no
uniform shuffle of the whole, but reads every row group about once and needs no index of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distembed.errors import UserError

MAX_LANES = 8
WINDOW_ROWS = 131_072

# Streams of random numbers: what a generator is for is part of its seed.
_GROUP_ORDER, _WINDOW_ORDER = 0, 1


@dataclass(frozen=True)
class BatchOrder:
    """How the rows of a split are ordered and cut into batches.

    Attributes:
        batch_size: Number of rows of a step over all ranks.
        shuffle: Whether every epoch has another order; False reads the files in order.
        seed: Seed of the shuffling, 0 or more.
        drop_last: Whether the rows that do not fill a batch are left out (others in every epoch, if shuffled).

    Raises:
        UserError: A number is too small.
    """

    batch_size: int
    shuffle: bool = True
    seed: int = 0
    drop_last: bool = False

    def __post_init__(self) -> None:
        require_at_least("batch_size", self.batch_size, 1)
        require_at_least("seed", self.seed, 0)


def require_at_least(name: str, value: int, least: int) -> None:
    """Makes sure that a setting is large enough.

    Raises:
        UserError: It is below ``least``.
    """
    if value < least:
        raise UserError(f"{name} is {value}: it must be {least} or more")


class Segment(NamedTuple):
    """Rows ``[start, stop)`` of one row group."""

    group: int
    start: int
    stop: int


class LanePart(NamedTuple):
    """Rows ``[start, stop)`` of one lane, which one rank takes of one batch."""

    lane: int
    start: int
    stop: int


class Window(NamedTuple):
    """Segments that are decoded and shuffled together: rows ``[start, stop)`` of their lane, its window ``number``."""

    number: int
    start: int
    stop: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class EpochOrder:
    """The order of a split's rows for every epoch.

    Attributes:
        group_rows: Number of rows of each row group, in file order.
        batches: How the rows are ordered and cut into batches.
        rows: The rows of the split that are read, where they are not shuffled; all unless given.

    Raises:
        UserError: A part of the rows is to be shuffled, or goes beyond the split.
    """

    group_rows: tuple[int, ...]
    batches: BatchOrder
    rows: range | None = None

    def __post_init__(self) -> None:
        if self.rows is None:
            return
        total = sum(self.group_rows)
        if self.batches.shuffle or self.rows.step != 1 or not 0 <= self.rows.start <= self.rows.stop <= total:
            raise UserError(f"rows is {self.rows}: rows without shuffling, in steps of 1, within the split's {total}")

    @property
    def num_rows(self) -> int:
        """Number of rows in an epoch."""
        return sum(self.group_rows) if self.rows is None else len(self.rows)

    @property
    def num_lanes(self) -> int:
        """Number of lanes that a batch is made of."""
        return min(max(len(self.group_rows), 1), MAX_LANES) if self.batches.shuffle else 1

    @property
    def num_batches(self) -> int:
        """Number of batches in an epoch."""
        full, rest = divmod(self.num_rows, self.batches.batch_size)
        return full + (1 if rest and not self.batches.drop_last else 0)

    def batch_rows(self, batch: int) -> int:
        """Returns the number of rows of this batch over all ranks: fewer than ``batch_size`` only in the last."""
        return min(self.batches.batch_size, self.num_rows - batch * self.batches.batch_size)

    def lane_rows(self, lane: int) -> int:
        """Returns the number of rows of this lane in an epoch: the sum of its slots over the batches."""
        full, rest = divmod(self.num_rows, self.batches.batch_size)
        last = 0 if self.batches.drop_last else _slot_rows(lane, self.num_lanes, rest)
        return self.lane_start(lane, full) + last

    def lane_start(self, lane: int, batch: int) -> int:
        """Returns the row of its lane where a batch's slot begins; only the last batch can be short."""
        return batch * _slot_rows(lane, self.num_lanes, self.batches.batch_size)

    def lane_windows(self, epoch: int, lane: int) -> list[Window]:
        """Returns the windows of this lane in this epoch: of at least WINDOW_ROWS rows each, but for the last."""
        first = 0 if self.rows is None else self.rows.start
        lane_start = first + sum(self.lane_rows(earlier) for earlier in range(lane))
        windows: list[Window] = []
        waiting: list[Segment] = []
        start = stop = 0
        for segment in _cut(self._group_order(epoch), self.group_rows, lane_start, lane_start + self.lane_rows(lane)):
            waiting.append(segment)
            stop += segment.stop - segment.start
            if stop - start >= WINDOW_ROWS:
                windows.append(Window(len(windows), start, stop, tuple(waiting)))
                waiting, start = [], stop
        return windows + ([Window(len(windows), start, stop, tuple(waiting))] if waiting else [])

    def window_permutation(self, epoch: int, lane: int, window: Window) -> NDArray[np.int64] | None:
        """Returns the order of the rows within a window, None where they stay as they are."""
        if not self.batches.shuffle:
            return None
        generator = np.random.default_rng([self.batches.seed, epoch, _WINDOW_ORDER, lane, window.number])
        return generator.permutation(window.stop - window.start)

    def rank_parts(self, batch: int, rank: int, world_size: int) -> list[LanePart]:
        """Returns what this rank takes of this batch, lane by lane; nothing where there are more ranks than rows."""
        rows, num_lanes = self.batch_rows(batch), self.num_lanes
        first, last = rank * rows // world_size, (rank + 1) * rows // world_size
        parts = []
        for lane in range(num_lanes):
            slot = lane * rows // num_lanes
            low, high = max(first, slot), min(last, slot + _slot_rows(lane, num_lanes, rows))
            if low < high:
                start = self.lane_start(lane, batch) - slot
                parts.append(LanePart(lane, start + low, start + high))
        return parts

    def _group_order(self, epoch: int) -> NDArray[np.int64]:
        if not self.batches.shuffle:
            return np.arange(len(self.group_rows))
        return np.random.default_rng([self.batches.seed, epoch, _GROUP_ORDER]).permutation(len(self.group_rows))


def _slot_rows(lane: int, num_lanes: int, rows: int) -> int:
    """Returns how many of a batch's rows belong to a lane."""
    return (lane + 1) * rows // num_lanes - lane * rows // num_lanes


def _cut(groups: NDArray[np.int64], group_rows: Sequence[int], start: int, stop: int) -> list[Segment]:
    """Returns the segments that are the rows ``[start, stop)`` of the row groups laid end to end in this order."""
    segments, position = [], 0
    for group in groups.tolist():
        low, high = max(start - position, 0), min(stop - position, group_rows[group])
        if low < high:
            segments.append(Segment(group, low, high))
        position += group_rows[group]
    return segments
