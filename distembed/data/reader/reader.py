"""Reads a split of a dataset as shuffled batches, one part for each rank, resumable at the exact row.

The order is a function of dataset, :class:`BatchOrder` and epoch alone (``order.py``), so the state is two numbers: the
epoch and the batch. Row groups are decoded into row-major blocks (``decode.py``), and batches are gathered from them in
a background thread::

    row groups -> Decoder (threads) -> window of a lane -> _LaneCursor.gather -> BatchAssembler -> Prefetcher -> batch

Trade-off: a rank holds one window of rows for each lane that it reads, at most 8 x 131,072 rows (170 MB for Criteo
rows), and twice as many with decoding threads, since the windows of all lanes end at about the same time.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import MANIFEST_NAME, Manifest
from distembed.data.dataset.mirror import dataset_folder
from distembed.data.dataset.records import RecordBlock
from distembed.data.dataset.row_groups import list_row_groups
from distembed.data.reader.batch import Batch, BatchAssembler
from distembed.data.reader.decode import Decoder, Decoding
from distembed.data.reader.order import BatchOrder, BatchShares, EpochOrder, Window, require_at_least

Item = TypeVar("Item")


class Prefetcher(Generic[Item]):
    """Iterates over items that one background thread makes, up to ``capacity`` ahead of the consumer.

    An exception in the thread, the StopIteration at the end included, is raised by ``next`` in its turn.
    """

    def __init__(self, make_items: Callable[[], Iterator[Item]], capacity: int) -> None:
        self._thread = ThreadPoolExecutor(1, "distembed-prefetch")
        self._make_next = make_items().__next__
        self._items: deque[Future[Item]] = deque(self._thread.submit(self._make_next) for _ in range(capacity))

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if not self._items:
            raise StopIteration
        item = self._items[0].result()
        self._items.popleft()
        self._items.append(self._thread.submit(self._make_next))
        return item

    def is_ready(self, seconds: float) -> bool:
        """Returns whether ``next`` has something to return or raise, and waits so many seconds for it."""
        return not self._items or bool(wait([self._items[0]], seconds).done)

    def close(self) -> None:
        """Ends the thread and drops the items that wait; it may be called any number of times."""
        with suppress(RuntimeError):  # the garbage collector may call this in the thread itself
            self._thread.shutdown(cancel_futures=True)
        self._items.clear()
        self._make_next = iter(()).__next__  # drops the iterator and its rows


_ROWS_AT_ONCE = 4096  # batches of fewer rows are made several at a time
_Decoded: TypeAlias = tuple[RecordBlock, NDArray[np.int64] | None]  # rows, and their order if they are shuffled


def epoch_batches(
    order: EpochOrder, decoder: Decoder, decoding: Decoding, ranks: tuple[int, int], start: tuple[int, int]
) -> Iterator[Batch]:
    """Yields a rank's part of each remaining batch: ``ranks`` is (rank, world size), ``start`` (epoch, first batch)."""
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
        # enough windows ahead in each lane that every decoding thread has one
        most_ahead = -(-max(1, decoding.threads) // max(1, len(first_parts)))

        def open_lane(lane: int, first_row: int) -> _LaneCursor:
            windows = (window for window in order.lane_windows(epoch, lane) if window.stop > first_row)
            return _LaneCursor(windows, partial(begin, lane), most_ahead)

        lanes = {lane: open_lane(lane, first) for lane, first, _ in first_parts}
        while batch < order.num_batches:
            count = 1
            if not assembler.layout.has_lists:  # several small batches at once, so that numpy's calls do not dominate
                rows_each = -(-order.batches.batch_size // world_size)
                num_full = order.num_rows // order.batches.batch_size - batch
                count = max(1, min(num_full, _ROWS_AT_ONCE // rows_each))
            blocks = []
            for lane, first, stop in order.rank_parts(batch, rank, world_size):
                if lane not in lanes:  # in the last batch, whose slots are shorter
                    lanes[lane] = open_lane(lane, first)
                # row j of the rank's part of batch i: i slots after its row of the first of these batches
                batch_starts = order.slot_rows(lane) * np.arange(count)[:, None]
                blocks.append(lanes[lane].gather((batch_starts + np.arange(first, stop)).reshape(-1)))
            batch_rows = [order.batch_rows(index) for index in range(batch, batch + count)]
            for assembled in assembler.assemble(blocks, batch_rows):
                yield assembled.pin_memory() if decoding.pins else assembled
            batch += count


class _LaneCursor:
    """Reads a lane's rows from front to back: it holds one decoded window, and begins the next ones ahead."""

    def __init__(self, windows: Iterator[Window], begin: Callable[[Window], Callable[[], _Decoded]], most_ahead: int):
        self._windows, self._most_ahead = ((window, begin(window)) for window in windows), most_ahead
        self._ahead = deque(islice(self._windows, 1))  # the first ones of all lanes come before any second
        self._window = Window(-1, 0, 0, ())
        self._decoded: _Decoded | None = None

    def gather(self, positions: NDArray[np.int64]) -> RecordBlock:
        """Returns the rows at ascending positions in the lane, none below a position of an earlier call."""
        gathered = []
        while len(positions):
            block, permutation = self._reach(int(positions[0]))
            num_in_window = int(np.searchsorted(positions, self._window.stop))
            rows = positions[:num_in_window] - self._window.start
            gathered.append(block.gather(rows if permutation is None else permutation[rows]))
            positions = positions[num_in_window:]
        return gathered[0] if len(gathered) == 1 else RecordBlock.concatenate(gathered)

    def _reach(self, position: int) -> _Decoded:
        """Moves to the window that holds a row, starts to decode later ones, and returns the decoded window."""
        while self._decoded is None or position >= self._window.stop:
            self._decoded = None  # before the next is decoded, so that two are not held
            self._window, wait = self._ahead.popleft()
            self._ahead.extend(islice(self._windows, self._most_ahead - len(self._ahead)))
            if position < self._window.stop:
                self._decoded = wait()
        return self._decoded


STATE_VERSION = 1


class BatchReader:
    """Iterates over one rank's part of a split's batches.

    Iterating yields the rest of the current epoch; iterating again yields the next epoch. Every rank yields the same
    number of batches; with fewer rows than ranks in the last one, a rank's part may be empty.

    Args:
        dataset_dir: Folder with ``manifest.json``, or its URL.
        split: Name of a split in the manifest, for example ``train``.
        order: How the rows are ordered and cut into batches, the same on every rank.
        rank: Rank whose part is read.
        world_size: Number of ranks that share each batch.
        prefetch_batches: Number of batches that a thread makes ahead; 0 makes them in the caller's thread.
        decoding: How row groups are decoded.
        rows: The rows of the split that are read, where they are not shuffled; all unless given.
    """

    def __init__(
        self,
        dataset_dir: str | os.PathLike[str],
        split: str,
        order: BatchOrder,
        *,
        rank: int = 0,
        world_size: int = 1,
        prefetch_batches: int = 4,
        decoding: Decoding | None = None,
        rows: range | None = None,
    ) -> None:
        require_at_least("world_size", world_size, 1)
        require_at_least("prefetch_batches", prefetch_batches, 0)
        if not 0 <= rank < world_size:
            raise UserError(f"rank is {rank}: it must be in [0, {world_size}), the number of ranks")
        decoding = decoding or Decoding()
        folder = dataset_folder(dataset_dir)
        manifest = Manifest.load(folder)
        self.schema, self.ages = manifest.schema, decoding.ages
        groups = list_row_groups(folder, manifest, split)
        self._order = EpochOrder(tuple(group.num_rows for group in groups), order, rows)
        self._decoder = Decoder(manifest.schema, groups, decoding.skip_unreadable, decoding.ages)
        self._ranks, self._prefetch_batches, self._decoding = (rank, world_size), prefetch_batches, decoding
        self._identity = {
            "dataset": hashlib.sha256((folder / MANIFEST_NAME).read_bytes()).hexdigest()[:16],
            "split": split,
            **asdict(order),
            **({} if rows is None else {"rows": [rows.start, rows.stop]}),
        }
        self.num_rows = self._order.num_rows  # in an epoch, over all ranks
        self.batches_per_epoch = self._order.num_batches  # the same on every rank
        self.epoch = 0  # of the next batch; it goes up when the last batch of an epoch is yielded
        self.batch = 0  # number of the next batch in its epoch
        self._prefetcher: Prefetcher[Batch] | None = None
        self._iteration = 0

    @property
    def unreadable(self) -> dict[str, str]:
        """The problem of each row group that this rank could not read, by its name."""
        return dict(self._decoder.unreadable)

    def __iter__(self) -> Iterator[Batch]:
        """Yields the rest of the current epoch; an earlier iteration that is still under way ends."""
        self.close()
        return self._iterate(self._iteration)

    def _iterate(self, iteration: int) -> Iterator[Batch]:
        if iteration != self._iteration:
            raise RuntimeError("the reader was closed, moved or iterated over again: this iterator is out of date")
        # without a reference to the reader, so that the thread does not hold it
        start = (self.epoch, self.batch)
        make_batches = partial(epoch_batches, self._order, self._decoder, self._decoding, self._ranks, start)
        if self._prefetch_batches:
            self._prefetcher = Prefetcher(make_batches, self._prefetch_batches)
        try:
            if not self.batches_per_epoch:
                self.epoch += 1
            for batch in self._prefetcher or make_batches():
                self.batch += 1
                if self.batch == self.batches_per_epoch:
                    self.epoch, self.batch = self.epoch + 1, 0
                yield batch
                if iteration != self._iteration:
                    raise RuntimeError("the reader was closed or moved while it was iterated over: start again")
        finally:
            if iteration == self._iteration:
                self.close()

    def state_dict(self, in_flight: int = 0) -> dict[str, Any]:
        """Returns the position in the global sequence of batches, with the identity of dataset, split and order.

        Args:
            in_flight: Number of batches that a training pipeline has taken but not trained on; they are read again.
        """
        step = self.epoch * self.batches_per_epoch + self.batch - in_flight
        if in_flight < 0 or step < 0:
            raise UserError(f"in_flight is {in_flight}: between 0 and the {step + in_flight} batches handed out so far")
        epoch, batch = divmod(step, self.batches_per_epoch) if self.batches_per_epoch else (self.epoch, 0)
        return {"version": STATE_VERSION, **self._identity, "epoch": epoch, "batch": batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Moves to the position of a :meth:`state_dict` of any number of ranks, and ends iterations under way.

        Raises a UserError if the state is of another dataset, split or order.
        """
        expected = {"version": STATE_VERSION, **self._identity}
        wrong = (name for name in expected if state.get(name) != expected[name])
        differences = [f"{name} is {state.get(name)!r} in the state and {expected[name]!r} here" for name in wrong]
        if differences:
            raise UserError(
                f"the reader's state does not fit: {'; '.join(differences)}. Use the same settings, or start anew"
            )
        self.close()
        self.epoch, self.batch = int(state["epoch"]), int(state["batch"])

    def close(self) -> None:
        """Ends the thread that reads ahead, and any iteration under way; the reader can be iterated over again."""
        self._iteration += 1
        prefetcher, self._prefetcher = self._prefetcher, None
        if prefetcher is not None:
            prefetcher.close()


def read_share(
    dataset_dir: str | os.PathLike[str],
    split: str,
    batch_size: int,
    *,
    rank: int,
    world_size: int,
    decode_threads: int = 0,
) -> Generator[Batch, None, None]:
    """Yields whole batches of a split, unshuffled: a rank's share is a contiguous range of rows.

    Every rank yields equally many batches; ranks with fewer are given a last batch without rows. ``global_batch_size``
    of the batches counts this rank alone.
    """
    manifest = Manifest.load(dataset_dir)
    shares = BatchShares(manifest.split(split).num_rows, batch_size, world_size)
    order = BatchOrder(batch_size, shuffle=False)
    rows = shares.rows(rank)
    with closing(BatchReader(dataset_dir, split, order, decoding=Decoding(decode_threads), rows=rows)) as reader:
        yield from reader
    num_missing = shares.num_steps - reader.batches_per_epoch
    yield from BatchAssembler(manifest.schema).assemble([], [1] * num_missing)
