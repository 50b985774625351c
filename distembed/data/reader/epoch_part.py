"""What one rank reads of one epoch: windows of lanes are decoded, and batches are gathered from them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from distembed.data.reader.assemble import BatchAssembler
from distembed.data.reader.batch import Batch
from distembed.data.reader.decode import Block, Decoder
from distembed.data.reader.decode_ahead import DecodeAhead, windows_in_need_order
from distembed.data.reader.order import EpochOrder, LanePart, Window, rank_parts

# Batches of fewer rows than this are made several at a time.
_ROWS_AT_ONCE = 4096


class EpochPart:
    """What one rank reads of one epoch from a batch on.

    It does not refer to the reader, so that the thread that holds it does not hold the reader.
    """

    def __init__(self, order: EpochOrder, decoder: Decoder, ranks: tuple[int, int], start: tuple[int, int]) -> None:
        self._order, self._decoder = order, decoder
        self._rank, self._world_size = ranks
        self._epoch, self._first_batch = start
        self._assembler = BatchAssembler(decoder.schema)
        self._lanes: dict[int, _LaneCursor] = {}

    def batches(self, decode_threads: int) -> Iterator[Batch]:
        """Yields the batches, in order; windows are decoded ahead in so many threads."""
        needed = windows_in_need_order(self._order, self._epoch, self._rank, self._world_size, self._first_batch)
        most_waiting = max(len({lane for lane, _ in needed}), decode_threads)
        with DecodeAhead(self._decoder, needed, decode_threads, most_waiting) as self._ahead:
            batch = self._first_batch
            while batch < self._order.num_batches:
                count = self._num_at_once(batch)
                yield from self._make(batch, count)
                batch += count

    def _num_at_once(self, batch: int) -> int:
        """Returns how many batches to make at once: several small ones, so that numpy's calls do not dominate."""
        batch_size = self._order.batches.batch_size
        full_batches = self._order.num_rows // batch_size - batch
        rows_each = -(-batch_size // self._world_size)
        return 1 if self._assembler.layout.has_lists else max(1, min(full_batches, _ROWS_AT_ONCE // rows_each))

    def _make(self, batch: int, count: int) -> Iterator[Batch]:
        rows = [self._lane_rows(part, count) for part in rank_parts(self._order, batch, self._rank, self._world_size)]
        sizes = [self._order.batch_rows(index) for index in range(batch, batch + count)]
        return self._assembler.assemble(rows, sizes)

    def _lane_rows(self, part: LanePart, count: int) -> Block:
        """Returns one lane's rows of ``count`` batches, batch by batch."""
        if part.lane not in self._lanes:
            self._lanes[part.lane] = _LaneCursor(self._order, self._ahead, self._epoch, part.lane)
        starts = self._order.lane_start(part.lane, 1) * np.arange(count)[:, None]
        return self._lanes[part.lane].gather((starts + np.arange(part.start, part.stop)).reshape(-1))


class _LaneCursor:
    """Reads a lane's rows from front to back, and holds one decoded window."""

    def __init__(self, order: EpochOrder, decoded: DecodeAhead, epoch: int, lane: int) -> None:
        self._order, self._decoded, self._epoch, self._lane = order, decoded, epoch, lane
        self._windows = iter(order.lane_windows(epoch, lane))
        self._window = Window(-1, 0, ())
        self._block: Block | None = None
        self._permutation: NDArray[np.int64] | None = None

    def gather(self, positions: NDArray[np.int64]) -> Block:
        """Returns the rows at these places in the lane, which must go up from call to call."""
        gathered = []
        while len(positions):
            block = self._reach(int(positions[0]))
            here = int(np.searchsorted(positions, self._window.start + self._window.num_rows))
            rows = positions[:here] - self._window.start
            gathered.append(block.gather(rows if self._permutation is None else self._permutation[rows]))
            positions = positions[here:]
        return gathered[0] if len(gathered) == 1 else Block.concatenate(gathered)

    def _reach(self, position: int) -> Block:
        """Decodes windows until the one that holds a row, and returns its block."""
        while self._block is None or position >= self._window.start + self._window.num_rows:
            self._block = None  # before the next is decoded, so that two are not held
            self._window = next(self._windows)
            if position < self._window.start + self._window.num_rows:
                self._block = self._decoded.block(self._lane, self._window)
                self._permutation = self._order.window_permutation(self._epoch, self._lane, self._window)
        return self._block
