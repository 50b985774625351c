"""The order in which an epoch's rows are read: pure arithmetic, the same on every rank.

The *global* sequence of batches is a function of (dataset, :class:`BatchOrder`, epoch) and never of the number of
ranks, so a run can stop on eight ranks and resume on two. So that ranks can share the decoding all the same, every
batch is made of lanes. A batch of b rows with L lanes and W ranks::

    position   0 ........................................ b
    lanes      |  lane 0  |  lane 1  |  lane 2  |  lane 3 |    lane l has [l*b//L, (l+1)*b//L), its slot
    ranks      |       rank 0        |       rank 1       |    rank r has [r*b//W, (r+1)*b//W)

A rank decodes only the lanes that it overlaps. The epoch's row groups are put in random order, each lane gets a
contiguous share of that sequence (as many rows as its slots add up to), and shuffles it window by window.

Trade-off: rows mix within ``lanes x window`` (about a million rows) around a random choice of row groups, which is no
uniform shuffle of the whole, but reads every row group about once and needs no index of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distembed.base.errors import UserError

MAX_LANES = 8
WINDOW_ROWS = 131_072

# Streams of random numbers: the purpose of a generator is part of its seed.
_GROUP_ORDER, _WINDOW_ORDER = 0, 1


@dataclass(frozen=True)
class BatchOrder:
    """How the rows of a split are ordered and cut into batches."""

    batch_size: int  # rows of a step over all ranks
    shuffle: bool = True  # again in every epoch; False reads the files in order
    seed: int = 0
    drop_last: bool = False  # leaves out the rows that do not fill a batch (others in every epoch, if shuffled)

    def __post_init__(self) -> None:
        require_at_least("batch_size", self.batch_size, 1)
        require_at_least("seed", self.seed, 0)


def require_at_least(name: str, value: int, least: int) -> None:
    """Raises a UserError that names the setting if its value is below ``least``."""
    if value < least:
        raise UserError(f"{name} is {value}: it must be {least} or more")


class Segment(NamedTuple):
    """Rows ``[start, stop)`` of one row group."""

    group: int
    start: int
    stop: int


class Window(NamedTuple):
    """Rows ``[start, stop)`` of a lane, its window ``number``: segments that are decoded and shuffled together."""

    number: int
    start: int
    stop: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class EpochOrder:
    """The order of a split's rows for every epoch."""

    group_rows: tuple[int, ...]  # rows of each row group, in file order
    batches: BatchOrder
    rows: range | None = None  # the rows of the split that are read, where they are not shuffled; all unless given

    def __post_init__(self) -> None:
        total = sum(self.group_rows)
        if (rows := self.rows) is not None and (
            self.batches.shuffle or rows.step != 1 or not 0 <= rows.start <= rows.stop <= total
        ):
            raise UserError(f"rows is {rows}: rows without shuffling, in steps of 1, within the split's {total}")

    @property
    def num_rows(self) -> int:
        return sum(self.group_rows) if self.rows is None else len(self.rows)

    @property
    def num_lanes(self) -> int:
        """Number of lanes that a batch is made of."""
        return min(max(len(self.group_rows), 1), MAX_LANES) if self.batches.shuffle else 1

    @property
    def num_batches(self) -> int:
        full, rest = divmod(self.num_rows, self.batches.batch_size)
        return full + (1 if rest and not self.batches.drop_last else 0)

    def batch_rows(self, batch: int) -> int:
        """Returns the number of rows of this batch over all ranks: fewer than ``batch_size`` only in the last."""
        return min(self.batches.batch_size, self.num_rows - batch * self.batches.batch_size)

    def slot_rows(self, lane: int) -> int:
        """Returns the rows that a lane gives to every full batch."""
        size, num_lanes = self.batches.batch_size, self.num_lanes
        return (lane + 1) * size // num_lanes - lane * size // num_lanes

    def lane_windows(self, epoch: int, lane: int) -> list[Window]:
        """Returns the windows of a lane in an epoch, which follow each other and cover the lane.

        A window is whole segments of together at least WINDOW_ROWS rows; the last window may have fewer.
        """
        windows: list[Window] = []
        waiting: list[Segment] = []
        start = stop = 0
        for segment in self._segments(epoch, self._lane_begin(lane), self._lane_begin(lane + 1)):
            waiting.append(segment)
            stop += segment.stop - segment.start
            if stop - start >= WINDOW_ROWS:
                windows.append(Window(len(windows), start, stop, tuple(waiting)))
                waiting, start = [], stop
        return windows + ([Window(len(windows), start, stop, tuple(waiting))] if waiting else [])

    def window_permutation(self, epoch: int, lane: int, window: Window) -> NDArray[np.int64] | None:
        """Returns the random order of a window's rows, by seed, epoch, lane and window; None without shuffling."""
        if not self.batches.shuffle:
            return None
        generator = np.random.default_rng([self.batches.seed, epoch, _WINDOW_ORDER, lane, window.number])
        return generator.permutation(window.stop - window.start)

    def rank_parts(self, batch: int, rank: int, world_size: int) -> list[tuple[int, int, int]]:
        """Returns (lane, first, last + 1) for each lane that overlaps a rank's part, rows numbered within the lane."""
        num_rows, num_lanes = self.batch_rows(batch), self.num_lanes
        rank_start, rank_stop = rank * num_rows // world_size, (rank + 1) * num_rows // world_size
        parts = []
        for lane in range(num_lanes):
            slot_start, slot_stop = lane * num_rows // num_lanes, (lane + 1) * num_rows // num_lanes
            start, stop = max(rank_start, slot_start), min(rank_stop, slot_stop)
            if start < stop:
                # Earlier batches are full and took slot_rows of the lane each; position p is row p - slot_start of it.
                offset = batch * self.slot_rows(lane) - slot_start
                parts.append((lane, offset + start, offset + stop))
        return parts

    def _lane_begin(self, lane: int) -> int:
        """Returns where a lane begins in the epoch's sequence of rows: after all slots of earlier lanes."""
        # slots before ``lane`` have lane * b // L rows in each batch of b rows
        num_full, last_batch_rows = divmod(self.num_rows, self.batches.batch_size)
        rows_of_full = num_full * (lane * self.batches.batch_size // self.num_lanes)
        rows_of_last = 0 if self.batches.drop_last else lane * last_batch_rows // self.num_lanes
        return (0 if self.rows is None else self.rows.start) + rows_of_full + rows_of_last

    def _segments(self, epoch: int, start: int, stop: int) -> list[Segment]:
        """Returns rows ``[start, stop)`` of the epoch's sequence, row groups end to end in their order, as segments."""
        groups = np.arange(len(self.group_rows))
        if self.batches.shuffle:
            groups = np.random.default_rng([self.batches.seed, epoch, _GROUP_ORDER]).permutation(len(groups))
        rows = np.array(self.group_rows, np.int64)[groups]
        begins = np.cumsum(rows) - rows
        low, high = np.maximum(start - begins, 0), np.minimum(stop - begins, rows)
        ranges = zip(groups.tolist(), low.tolist(), high.tolist(), strict=True)
        return [Segment(group, first, end) for group, first, end in ranges if first < end]


@dataclass(frozen=True)
class BatchShares:
    """The batches of rows in order, a contiguous range of them for each rank; ranks differ by at most one batch."""

    num_rows: int  # of all ranks
    batch_size: int  # rows of a batch; the last one may have fewer
    world_size: int

    @property
    def num_steps(self) -> int:
        """Steps of every rank: the most batches of any rank, so the last step of some ranks has no rows."""
        return -(-self.num_rows // (self.batch_size * self.world_size))

    def rows(self, rank: int) -> range:
        num_batches = -(-self.num_rows // self.batch_size)
        first, end = (share * num_batches // self.world_size * self.batch_size for share in (rank, rank + 1))
        return range(min(first, self.num_rows), min(end, self.num_rows))

    def steps(self, rank: int) -> Iterator[range]:
        """Yields the range of rows of each step of a rank, an empty range once the rank has no batch left."""
        rows = self.rows(rank)
        for first in range(rows.start, rows.start + self.num_steps * self.batch_size, self.batch_size):
            yield rows[first - rows.start :][: self.batch_size]
