"""Decodes the windows that batches need next in threads, while batches are gathered from those before.

Reading, verifying, decompressing and copying into records are done by code that lets other Python threads run. The
order of rows is settled before anything is decoded, so that batches are the same for any number of threads.

Trade-off: as many windows wait as the rank has lanes, so that it holds two windows a lane in place of one. Windows of
all lanes end at about the same time, so that fewer would leave batches waiting for most of them.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from distembed.data.reader.decode import Block, Decoder
from distembed.data.reader.order import EpochOrder, Window, rank_parts


class DecodeAhead:
    """Decodes windows in the order in which batches need them; used as a context, which ends its threads.

    Args:
        decoder: Reads row groups.
        needed: Lanes and windows, in the order in which they are needed.
        num_threads: Number of threads; 0 decodes each window when it is needed, in the caller's thread.
        most_waiting: Most windows that are decoded, or being decoded, before they are needed.
    """

    def __init__(self, decoder: Decoder, needed: list[tuple[int, Window]], num_threads: int, most_waiting: int) -> None:
        self._decoder = decoder
        self._needed = iter(needed if num_threads else ())
        self._most_waiting = most_waiting
        self._waiting: dict[tuple[int, int], Future[Block]] = {}
        self._threads = ThreadPoolExecutor(num_threads, "distembed-decode") if num_threads else None

    def __enter__(self) -> DecodeAhead:
        self._go_on()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def block(self, lane: int, window: Window) -> Block:
        """Returns the rows of a window, which is asked for once.

        Raises:
            UserError: A row group is damaged, or a value cannot be used.
        """
        decoded = self._waiting.pop((lane, window.index), None)
        self._go_on()
        return self._decode(window) if decoded is None else decoded.result()

    def _go_on(self) -> None:
        """Begins with further windows, as many as may wait."""
        while self._threads is not None and len(self._waiting) < self._most_waiting:
            lane, window = next(self._needed, (0, None))
            if window is None:
                break
            self._waiting[lane, window.index] = self._threads.submit(self._decode, window)

    def _decode(self, window: Window) -> Block:
        return self._decoder.decode([(segment.group, segment.start, segment.stop) for segment in window.segments])


def windows_in_need_order(
    order: EpochOrder, epoch: int, rank: int, world_size: int, first_batch: int
) -> list[tuple[int, Window]]:
    """Returns the lanes and windows that a rank needs from a batch on, in the order in which it needs them.

    The last batch, which may be short, may need another lane's window at its end, which is not among them.
    """
    if first_batch >= order.num_batches:
        return []
    found = []
    for part in rank_parts(order, first_batch, rank, world_size):
        rows_a_batch = max(order.lane_start(part.lane, 1), 1)
        for window in order.lane_windows(epoch, part.lane):
            if window.start + window.num_rows > part.start:
                found.append(((window.start - part.start) // rows_a_batch, part.lane, window))
    found.sort(key=lambda need: need[:2])
    return [(lane, window) for _, lane, window in found]
