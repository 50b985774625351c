"""Reads a split of a dataset as shuffled batches, one part for each rank, resumable at the exact row.

The order is a function of dataset, :class:`BatchOrder` and epoch alone (``order.py``), so the state is two numbers: the
epoch and the batch. Row groups are decoded into row-major blocks (``decode.py``), and batches are gathered from these
(``epoch_part.py``) in a background thread (``prefetch.py``).

Trade-off: a rank holds one window of rows for each lane that it reads, at most 8 x 131,072 rows (170 MB for Criteo
rows), and with threads that decode ahead twice as many; row groups much larger than that cost as much more, since a row
group is never divided.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import MANIFEST_NAME, Manifest
from distembed.data.dataset.mirror import dataset_folder
from distembed.data.dataset.row_groups import list_row_groups
from distembed.data.reader.batch import Batch
from distembed.data.reader.decode import Decoder, Decoding
from distembed.data.reader.epoch_part import epoch_batches
from distembed.data.reader.order import BatchOrder, EpochOrder, require_at_least
from distembed.data.reader.prefetch import Prefetcher

STATE_VERSION = 1


class BatchReader:
    """Iterates over one rank's part of a split's batches.

    Iterating yields the rest of the current epoch; iterating again yields the next epoch. Every rank yields the same
    number of batches; with fewer rows than ranks in the last one, a rank's part may be empty.

    Args:
        dataset_dir: Folder with ``manifest.json``, or its URL.
        split: Name of a split in the manifest, such as ``train``.
        order: How the rows are ordered and cut into batches, the same on every rank.
        rank: Rank whose part is read.
        world_size: Number of ranks that share each batch.
        prefetch_batches: Number of batches that a thread makes ahead; 0 makes them in the caller's thread.
        decoding: How row groups are decoded; where batches are made, and none may be unreadable, unless given.
        rows: The rows of the split that are read, where they are not shuffled; all unless given.

    Raises:
        UserError: A setting is impossible, or the dataset is not as its manifest says.
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
        self.schema = manifest.schema  # columns of the batches
        groups = list_row_groups(folder, manifest, split)
        self._order = EpochOrder(tuple(group.num_rows for group in groups), order, rows)
        self._decoder = Decoder(manifest.schema, groups, decoding.skip_unreadable)
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
        """What is wrong with each row group that this rank could not read, by its name."""
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
        """Returns where the reader stands, for any number of ranks.

        Args:
            in_flight: Number of batches that were yielded and not used yet, such as those in a training pipeline: the
                state is as if these had not been yielded, across the end of an epoch too.

        Raises:
            UserError: ``in_flight`` is negative, or more than were yielded.
        """
        step = self.epoch * self.batches_per_epoch + self.batch - in_flight
        if in_flight < 0 or step < 0:
            raise UserError(f"in_flight is {in_flight}: between 0 and the {step + in_flight} batches handed out so far")
        epoch, batch = divmod(step, self.batches_per_epoch) if self.batches_per_epoch else (self.epoch, 0)
        return {"version": STATE_VERSION, **self._identity, "epoch": epoch, "batch": batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Moves to where :meth:`state_dict` was taken; the number of ranks may differ.

        Raises:
            UserError: The state belongs to another dataset, split, batch size or order; each difference is named.
        """
        mine = {"version": STATE_VERSION, **self._identity}
        wrong = (name for name in mine if state.get(name) != mine[name])
        differences = [f"{name} is {state.get(name)!r} in the state and {mine[name]!r} here" for name in wrong]
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
