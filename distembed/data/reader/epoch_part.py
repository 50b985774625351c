"""What one rank reads of one epoch: windows of lanes are decoded, and batches are gathered from them.

Threads decode the next windows of each lane, while batches are gathered from the windows before. The order of rows is
settled before anything is decoded, so that batches are the same for any number of threads.

Trade-off: with threads, a rank holds two windows a lane in place of one. Windows of all lanes end at about the same
time, so that fewer would leave batches waiting for most of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from distembed.data.reader.assemble import BatchAssembler
from distembed.data.reader.batch import Batch
from distembed.data.reader.decode import Block, Decoder, Decoding
from distembed.data.reader.order import EpochOrder, Window

# Batches of fewer rows than this are made several at a time.
_ROWS_AT_ONCE = 4096

_Decoded: TypeAlias = tuple[Block, NDArray[np.int64] | None]  # rows, and their order, unless they stay as they are


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

    def decode(lane: int, window: Window) -> _Decoded:
        return decoder.decode(window.segments), order.window_permutation(epoch, lane, window)

    with ExitStack() as resources:
        threads = ThreadPoolExecutor(decoding.threads, "distembed-decode") if decoding.threads else None
        if threads is not None:
            resources.callback(threads.shutdown, cancel_futures=True)

        def begin(lane: int, window: Window) -> Callable[[], _Decoded]:
            """Begins to decode a window; returns a function that waits for it."""
            return partial(decode, lane, window) if threads is None else threads.submit(decode, lane, window).result

        first_parts = order.rank_parts(batch, rank, world_size) if batch < order.num_batches else []
        most_ahead = -(-max(1, decoding.threads) // max(1, len(first_parts)))

        def open_lane(lane: int, first_row: int) -> _LaneCursor:
            windows = (window for window in order.lane_windows(epoch, lane) if window.stop > first_row)
            return _LaneCursor(windows, partial(begin, lane), most_ahead)

        lanes = {lane: open_lane(lane, first) for lane, first, _ in first_parts}
        while batch < order.num_batches:
            count = 1 if assembler.layout.has_lists else _num_at_once(order, batch, world_size)
            blocks = []
            for lane, first, stop in order.rank_parts(batch, rank, world_size):
                if lane not in lanes:  # in the last batch, whose slots are shorter
                    lanes[lane] = open_lane(lane, first)
                batch_starts = order.slot_rows(lane) * np.arange(count)[:, None]
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


class _LaneCursor:
    """Reads a lane's rows from front to back: it holds one decoded window, and begins the next ones ahead."""

    def __init__(self, windows: Iterator[Window], begin: Callable[[Window], Callable[[], _Decoded]], most_ahead: int):
        self._windows, self._most_ahead = ((window, begin(window)) for window in windows), most_ahead
        self._ahead = deque(islice(self._windows, 1))  # the first ones of all lanes come before any second
        self._window = Window(-1, 0, 0, ())
        self._decoded: _Decoded | None = None

    def gather(self, positions: NDArray[np.int64]) -> Block:
        """Returns the rows at these places in the lane, which must go up from call to call."""
        gathered = []
        while len(positions):
            block, permutation = self._reach(int(positions[0]))
            here = int(np.searchsorted(positions, self._window.stop))
            rows = positions[:here] - self._window.start
            gathered.append(block.gather(rows if permutation is None else permutation[rows]))
            positions = positions[here:]
        return gathered[0] if len(gathered) == 1 else Block.concatenate(gathered)

    def _reach(self, position: int) -> _Decoded:
        """Returns the decoded window that holds a row; it skips the windows before."""
        while self._decoded is None or position >= self._window.stop:
            self._decoded = None  # before the next is decoded, so that two are not held
            self._window, wait = self._ahead.popleft()
            self._ahead.extend(islice(self._windows, self._most_ahead - len(self._ahead)))
            if position < self._window.stop:
                self._decoded = wait()
        return self._decoded
