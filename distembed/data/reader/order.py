"""The order in which an epoch's rows are handed out: pure arithmetic, the same on every rank.

The *global* sequence of batches is a function of (seed, epoch, batch_size, dataset) and never of the number of ranks,
so a run can stop on eight ranks and go on with two. To let ranks share the decoding all the same, every batch is made
of lanes. A batch of b rows with L lanes and W ranks::

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

import numpy as np
from numpy.typing import NDArray

MAX_LANES = 8
WINDOW_ROWS = 131_072

# Streams of random numbers: what a generator is for is part of its seed.
_GROUP_ORDER, _WINDOW_ORDER = 0, 1


@dataclass(frozen=True)
class Segment:
    """Rows ``[start, stop)`` of one row group."""

    group: int
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        """How many rows these are."""
        return self.stop - self.start


@dataclass(frozen=True)
class Window:
    """Segments that are decoded and shuffled together: rows ``[start, start + num_rows)`` of their lane."""

    index: int
    start: int
    segments: tuple[Segment, ...]

    @property
    def num_rows(self) -> int:
        """How many rows these are."""
        return sum(segment.num_rows for segment in self.segments)


@dataclass(frozen=True)
class EpochOrder:
    """The order of a split's rows for every epoch.

    Attributes:
        group_rows: rows of each row group, in file order.
        batch_size: rows of a step over all ranks.
        shuffle: False gives file order in one lane.
        seed: of the shuffling.
        drop_last: leave out the rows that do not fill a batch (others in every epoch, if shuffled).
    """

    group_rows: tuple[int, ...]
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool

    @property
    def num_rows(self) -> int:
        """Rows of the split."""
        return sum(self.group_rows)

    @property
    def num_lanes(self) -> int:
        """Lanes that a batch is made of."""
        return min(max(len(self.group_rows), 1), MAX_LANES) if self.shuffle else 1

    @property
    def num_batches(self) -> int:
        """Batches of an epoch."""
        full, rest = divmod(self.num_rows, self.batch_size)
        return full + (1 if rest and not self.drop_last else 0)

    def batch_rows(self, batch: int) -> int:
        """Rows of this batch over all ranks: fewer than ``batch_size`` only in the last."""
        return min(self.batch_size, self.num_rows - batch * self.batch_size)

    def lane_rows(self, lane: int) -> int:
        """Rows of this lane in an epoch: the sum of its slots over the batches."""
        full, rest = divmod(self.num_rows, self.batch_size)
        last = 0 if self.drop_last else _slot_rows(lane, self.num_lanes, rest)
        return full * _slot_rows(lane, self.num_lanes, self.batch_size) + last

    def lane_start(self, lane: int, batch: int) -> int:
        """Where in its lane a batch's slot begins; only the last batch can be short, so no sum is needed."""
        return batch * _slot_rows(lane, self.num_lanes, self.batch_size)

    def lane_windows(self, epoch: int, lane: int) -> list[Window]:
        """What this lane decodes in this epoch, in order."""
        start = sum(self.lane_rows(earlier) for earlier in range(lane))
        segments = _cut(self._group_order(epoch), self.group_rows, start, start + self.lane_rows(lane))
        return _windows(segments)

    def window_permutation(self, epoch: int, lane: int, window: Window) -> NDArray[np.int64] | None:
        """The order of the rows within a window; None for as they stand."""
        if not self.shuffle:
            return None
        generator = np.random.default_rng([self.seed, epoch, _WINDOW_ORDER, lane, window.index])
        return generator.permutation(window.num_rows)

    def _group_order(self, epoch: int) -> NDArray[np.int64]:
        if not self.shuffle:
            return np.arange(len(self.group_rows))
        return np.random.default_rng([self.seed, epoch, _GROUP_ORDER]).permutation(len(self.group_rows))


@dataclass(frozen=True)
class LanePart:
    """The rows of one lane that one rank takes of one batch: ``[start, stop)`` of the lane's rows."""

    lane: int
    start: int
    stop: int


def rank_parts(order: EpochOrder, batch: int, rank: int, world_size: int) -> list[LanePart]:
    """What this rank takes of this batch, lane by lane; empty when the batch has fewer rows than ranks need."""
    rows, num_lanes = order.batch_rows(batch), order.num_lanes
    first, last = rank * rows // world_size, (rank + 1) * rows // world_size
    parts = []
    for lane in range(num_lanes):
        slot = lane * rows // num_lanes
        low, high = max(first, slot), min(last, slot + _slot_rows(lane, num_lanes, rows))
        if low < high:
            start = order.lane_start(lane, batch) - slot
            parts.append(LanePart(lane, start + low, start + high))
    return parts


def _slot_rows(lane: int, num_lanes: int, rows: int) -> int:
    return (lane + 1) * rows // num_lanes - lane * rows // num_lanes


def _cut(groups: NDArray[np.int64], group_rows: Sequence[int], start: int, stop: int) -> list[Segment]:
    """Rows ``[start, stop)`` of the row groups laid end to end in this order."""
    segments, position = [], 0
    for group in groups.tolist():
        low, high = max(start - position, 0), min(stop - position, group_rows[group])
        if low < high:
            segments.append(Segment(group, low, high))
        position += group_rows[group]
    return segments


def _windows(segments: Sequence[Segment]) -> list[Window]:
    """Segments gathered until a window has enough rows; row groups are never divided for it."""
    windows: list[Window] = []
    waiting: list[Segment] = []
    start = 0
    for segment in segments:
        waiting.append(segment)
        rows = sum(part.num_rows for part in waiting)
        if rows >= WINDOW_ROWS:
            windows.append(Window(len(windows), start, tuple(waiting)))
            waiting, start = [], start + rows
    if waiting:
        windows.append(Window(len(windows), start, tuple(waiting)))
    return windows
