"""What one rank reads of one epoch: windows of lanes are decoded, and batches are gathered from them.

Threads decode the windows that batches need next, while batches are gathered from those before. The order of rows is
settled before anything is decoded, so that batches are the same for any number of threads.

Trade-off: with threads, as many windows wait as the rank has lanes, so that it holds two windows a lane in place of
one. Windows of all lanes end at about the same time, so that fewer would leave batches waiting for most of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from distembed.data.reader.assemble import BatchAssembler
from distembed.data.reader.batch import Batch
from distembed.data.reader.decode import Block, Decoder, Decoding
from distembed.data.reader.order import EpochOrder, Window

# Batches of fewer rows than this are made several at a time.
_ROWS_AT_ONCE = 4096


def epoch_batches(
    order: EpochOrder, decoder: Decoder, decoding: Decoding, ranks: tuple[int, int], start: tuple[int, int]
) -> Iterator[Batch]:
    """Yields what one rank reads of one epoch from a batch on; batches are pinned where they are made.

    Args:
        order: The order of the rows.
        decoder: Reads row groups.
        decoding: How rows are decoded, and into which memory.
        ranks: The rank, and the number of ranks.
        start: The epoch, and the first batch.
    """
    (rank, world_size), (epoch, batch) = ranks, start
    assembler = BatchAssembler(decoder.schema)
    lanes: dict[int, _LaneCursor] = {}
    needed = windows_in_need_order(order, epoch, rank, world_size, batch)
    most_waiting = max(len({lane for lane, _ in needed}), decoding.threads)
    with DecodeAhead(decoder, needed, decoding.threads, most_waiting) as decoded:
        while batch < order.num_batches:
            count = 1 if assembler.layout.has_lists else _num_at_once(order, batch, world_size)
            blocks = []
            for lane, first, stop in order.rank_parts(batch, rank, world_size):
                if lane not in lanes:
                    lanes[lane] = _LaneCursor(order, decoded, epoch, lane)
                batch_starts = order.lane_start(lane, 1) * np.arange(count)[:, None]
                blocks.append(lanes[lane].gather((batch_starts + np.arange(first, stop)).reshape(-1)))
            for made in assembler.assemble(blocks, [order.batch_rows(index) for index in range(batch, batch + count)]):
                yield made.pin_memory() if decoding.pins else made
            batch += count


def _num_at_once(order: EpochOrder, batch: int, world_size: int) -> int:
    """Returns how many batches to make at once: several small ones, so that numpy's calls do not dominate."""
    batch_size = order.batches.batch_size
    full_batches = order.num_rows // batch_size - batch
    rows_each = -(-batch_size // world_size)
    return max(1, min(full_batches, _ROWS_AT_ONCE // rows_each))


class DecodeAhead(ExitStack):
    """Decodes windows in the order in which batches need them; used as a context, which ends its threads.

    Args:
        decoder: Reads row groups.
        needed: Lanes and windows, in the order in which they are needed.
        num_threads: Number of threads; 0 decodes each window when it is needed, in the caller's thread.
        most_waiting: Most windows that are decoded, or being decoded, before they are needed.
    """

    def __init__(self, decoder: Decoder, needed: list[tuple[int, Window]], num_threads: int, most_waiting: int) -> None:
        super().__init__()
        self._decoder, self._needed, self._most_waiting = decoder, iter(needed), most_waiting
        self._waiting: dict[tuple[int, int], Future[Block]] = {}
        self._threads = ThreadPoolExecutor(num_threads, "distembed-decode") if num_threads else None
        if self._threads is not None:
            self.callback(self._threads.shutdown, cancel_futures=True)
            self._submit(self._threads)

    def block(self, lane: int, window: Window) -> Block:
        """Returns the rows of a window, which is asked for once.

        Raises:
            UserError: A row group is damaged, or a value cannot be used.
        """
        decoded = self._waiting.pop((lane, window.number), None)
        if self._threads is not None:
            self._submit(self._threads)
        return self._decoder.decode(window.segments) if decoded is None else decoded.result()

    def _submit(self, threads: ThreadPoolExecutor) -> None:
        """Starts to decode further windows, as many as may wait."""
        while len(self._waiting) < self._most_waiting and (need := next(self._needed, None)):
            lane, window = need
            self._waiting[lane, window.number] = threads.submit(self._decoder.decode, window.segments)


def windows_in_need_order(
    order: EpochOrder, epoch: int, rank: int, world_size: int, first_batch: int
) -> list[tuple[int, Window]]:
    """Returns the lanes and windows that a rank needs from a batch on, in the order in which it needs them.

    The last batch, which may be short, may need another lane's window at its end, which is not among them.
    """
    if first_batch >= order.num_batches:
        return []
    found = []
    for part in order.rank_parts(first_batch, rank, world_size):
        rows_a_batch = max(order.lane_start(part.lane, 1), 1)
        for window in order.lane_windows(epoch, part.lane):
            if window.stop > part.start:
                found.append(((window.start - part.start) // rows_a_batch, part.lane, window))
    return [(lane, window) for _, lane, window in sorted(found)]


class _LaneCursor:
    """Reads a lane's rows from front to back, and holds one decoded window."""

    def __init__(self, order: EpochOrder, decoded: DecodeAhead, epoch: int, lane: int) -> None:
        self._order, self._decoded, self._epoch, self._lane = order, decoded, epoch, lane
        self._windows = iter(order.lane_windows(epoch, lane))
        self._window = Window(-1, 0, 0, ())
        self._block: Block | None = None
        self._permutation: NDArray[np.int64] | None = None

    def gather(self, positions: NDArray[np.int64]) -> Block:
        """Returns the rows at these places in the lane, which must go up from call to call."""
        gathered = []
        while len(positions):
            block = self._reach(int(positions[0]))
            here = int(np.searchsorted(positions, self._window.stop))
            rows = positions[:here] - self._window.start
            gathered.append(block.gather(rows if self._permutation is None else self._permutation[rows]))
            positions = positions[here:]
        return gathered[0] if len(gathered) == 1 else Block.concatenate(gathered)

    def _reach(self, position: int) -> Block:
        """Returns the block of the window that holds a row, which it decodes; it skips the windows before."""
        while self._block is None or position >= self._window.stop:
            self._block = None  # before the next is decoded, so that two are not held
            self._window = next(self._windows)
            if position < self._window.stop:
                self._block = self._decoded.block(self._lane, self._window)
                self._permutation = self._order.window_permutation(self._epoch, self._lane, self._window)
        return self._block
