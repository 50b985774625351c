"""Reads a split of a dataset as shuffled batches, one part for each rank, resumable at the exact row.

The order is a function of dataset, :class:`BatchOrder` and epoch alone (``order.py``), so the state is two numbers: the
epoch and the batch. Row groups are decoded into row-major blocks (``decode.py``), and batches are gathered from these
in a background thread (``prefetch.py``).

Trade-off: a rank holds one window of rows for each lane that it reads, at most 8 x 131,072 rows (170 MB for Criteo
rows); row groups much larger than that cost as much more, since a row group is never divided.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.data.dataset.manifest import MANIFEST_NAME, Manifest
from distembed.data.dataset.row_groups import list_row_groups
from distembed.data.dataset.schema import DENSE_SEQUENCES, SPARSE_FEATURES, Schema
from distembed.data.reader.batch import Batch
from distembed.data.reader.decode import Block, Decoder, RecordLayout
from distembed.data.reader.jagged import Jagged
from distembed.data.reader.order import BatchOrder, EpochOrder, LanePart, Window, rank_parts, require_at_least
from distembed.data.reader.prefetch import Prefetcher
from distembed.errors import UserError

STATE_VERSION = 1

# Batches of fewer rows than this are made several at a time.
_ROWS_AT_ONCE = 4096


class BatchReader:
    """Iterates over one rank's part of a split's batches.

    Iterating yields the rest of the current epoch; iterating again yields the next epoch. Every rank yields the same
    number of batches; with fewer rows than ranks in the last one, a rank's part may be empty.

    Args:
        dataset_dir: Folder with ``manifest.json``.
        split: Name of a split in the manifest, such as ``train``.
        order: How the rows are ordered and cut into batches, the same on every rank.
        rank: Rank whose part is read.
        world_size: Number of ranks that share each batch.
        prefetch_batches: Number of batches that a thread makes ahead; 0 makes them in the caller's thread.

    Attributes:
        schema: Columns of the batches.

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
    ) -> None:
        _check_settings(rank, world_size, prefetch_batches)
        folder = Path(dataset_dir)
        manifest = Manifest.load(folder)
        self.schema = manifest.schema
        groups = list_row_groups(folder, manifest, split)
        self._order = EpochOrder(tuple(group.num_rows for group in groups), order)
        self._decoder = Decoder(manifest.schema, groups)
        self._rank, self._world_size = rank, world_size
        self._prefetch_batches = prefetch_batches
        self._identity = {
            "dataset": hashlib.sha256((folder / MANIFEST_NAME).read_bytes()).hexdigest()[:16],
            "split": split,
            **asdict(order),
        }
        self._epoch, self._batch = 0, 0
        self._prefetcher: Prefetcher[Batch] | None = None
        self._iteration = 0

    @property
    def num_rows(self) -> int:
        """Number of rows in the split, over all ranks."""
        return self._order.num_rows

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches in an epoch, the same on every rank."""
        return self._order.num_batches

    @property
    def epoch(self) -> int:
        """Epoch of the next batch; it goes up when the last batch of an epoch is yielded."""
        return self._epoch

    @property
    def batch(self) -> int:
        """Number of the next batch in its epoch."""
        return self._batch

    def __iter__(self) -> Iterator[Batch]:
        """Yields the rest of the current epoch; an earlier iteration that is still under way ends."""
        self.close()
        return self._iterate(self._iteration)

    def _iterate(self, iteration: int) -> Iterator[Batch]:
        if iteration != self._iteration:
            raise RuntimeError("the reader was closed, moved or iterated over again: this iterator is out of date")
        batches = self._start()
        try:
            if not self.batches_per_epoch:
                self._epoch += 1
            for batch in batches:
                self._advance()
                yield batch
                if iteration != self._iteration:
                    raise RuntimeError("the reader was closed or moved while it was iterated over: start again")
        finally:
            if iteration == self._iteration:
                self.close()

    def _start(self) -> Iterator[Batch]:
        part = _EpochPart(self._order, self._decoder, self._rank, self._world_size, self._epoch, self._batch)
        if not self._prefetch_batches:
            return part.batches()
        self._prefetcher = Prefetcher(part.batches, self._prefetch_batches)
        return self._prefetcher

    def _advance(self) -> None:
        self._batch += 1
        if self._batch == self.batches_per_epoch:
            self._epoch, self._batch = self._epoch + 1, 0

    def state_dict(self, in_flight: int = 0) -> dict[str, Any]:
        """Returns where the reader stands, for any number of ranks.

        Args:
            in_flight: Number of batches that were yielded and not used yet, such as those in a training pipeline: the
                state is as if these had not been yielded, across the end of an epoch too.

        Raises:
            UserError: ``in_flight`` is negative, or more than were yielded.
        """
        step = self._epoch * self.batches_per_epoch + self._batch - in_flight
        if in_flight < 0 or step < 0:
            raise UserError(f"in_flight is {in_flight}: between 0 and the {step + in_flight} batches handed out so far")
        epoch, batch = divmod(step, self.batches_per_epoch) if self.batches_per_epoch else (self._epoch, 0)
        return {"version": STATE_VERSION, **self._identity, "epoch": epoch, "batch": batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Moves to where :meth:`state_dict` was taken; the number of ranks may differ.

        Raises:
            UserError: The state belongs to another dataset, split, batch size or order; each difference is named.
        """
        mine = {"version": STATE_VERSION, **self._identity}
        differences = [
            f"{name} is {state.get(name)!r} in the state and {value!r} here"
            for name, value in mine.items()
            if state.get(name) != value
        ]
        if differences:
            raise UserError(
                f"the reader's state does not fit: {'; '.join(differences)}. Use the same settings, or start anew"
            )
        self.close()
        self._epoch, self._batch = int(state["epoch"]), int(state["batch"])

    def close(self) -> None:
        """Ends the thread that reads ahead, and any iteration under way; the reader can be iterated over again."""
        self._iteration += 1
        prefetcher, self._prefetcher = self._prefetcher, None
        if prefetcher is not None:
            prefetcher.close()


class _EpochPart:
    """What one rank reads of one epoch from a batch on.

    It does not refer to the reader, so that the thread that holds it does not hold the reader.
    """

    def __init__(
        self, order: EpochOrder, decoder: Decoder, rank: int, world_size: int, epoch: int, first_batch: int
    ) -> None:
        self._order, self._decoder = order, decoder
        self._rank, self._world_size = rank, world_size
        self._epoch, self._first_batch = epoch, first_batch
        self._layout = RecordLayout.from_schema(decoder.schema)
        self._columns = _float_columns(decoder.schema, self._layout)
        self._lanes: dict[int, _LaneCursor] = {}

    def batches(self) -> Iterator[Batch]:
        """Yields the batches, in order."""
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
        return 1 if self._layout.has_lists else max(1, min(full_batches, _ROWS_AT_ONCE // rows_each))

    def _make(self, batch: int, count: int) -> Iterator[Batch]:
        layout, schema = self._layout, self._decoder.schema
        rows = [self._lane_rows(part, count) for part in rank_parts(self._order, batch, self._rank, self._world_size)]
        empty = np.empty((count, 0, layout.width), layout.dtype)
        each = (part.records.reshape(count, len(part.records) // count, layout.width) for part in rows)
        records = np.concatenate([empty, *each], axis=1)
        floats = records.view(np.float32)[:, :, layout.first_float : layout.first_float + len(layout.numbers)]
        numbers = {name: np.ascontiguousarray(floats[:, :, columns]) for name, columns in self._columns.items()}
        ids = np.ascontiguousarray(records[:, :, : len(layout.single)].transpose(0, 2, 1)).astype(np.int64)
        for index in range(count):
            jagged = (
                _jagged_fields(schema, ids[index], rows) if layout.has_lists else _single_valued(schema, ids[index])
            )
            fields = {
                field.name: jagged[field.name] if field.is_jagged else torch.from_numpy(numbers[field.name][index])
                for field in schema.fields
            }
            yield Batch(fields, self._order.batch_rows(batch + index))

    def _lane_rows(self, part: LanePart, count: int) -> Block:
        """Returns one lane's rows of ``count`` batches, batch by batch."""
        if part.lane not in self._lanes:
            self._lanes[part.lane] = _LaneCursor(self._order, self._decoder, self._epoch, part.lane)
        starts = self._order.lane_start(part.lane, 1) * np.arange(count)[:, None]
        return self._lanes[part.lane].gather((starts + np.arange(part.start, part.stop)).reshape(-1))


def _float_columns(schema: Schema, layout: RecordLayout) -> dict[str, slice | int]:
    """Returns where each field of numbers stands among a record's: a range of columns, or the one of a vector."""
    columns: dict[str, slice | int] = {}
    for field in schema.fields:
        if not field.is_jagged:
            first = layout.numbers.index(field.columns[0]) if field.columns else 0
            columns[field.name] = first if field.is_vector else slice(first, first + len(field.columns))
    return columns


class _LaneCursor:
    """Reads a lane's rows from front to back, and holds one decoded window."""

    def __init__(self, order: EpochOrder, decoder: Decoder, epoch: int, lane: int) -> None:
        self._order, self._decoder, self._epoch, self._lane = order, decoder, epoch, lane
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
            self._block = None  # before the next is decoded, so that two are never held
            self._window = next(self._windows)
            if position < self._window.start + self._window.num_rows:
                segments = [(segment.group, segment.start, segment.stop) for segment in self._window.segments]
                self._block = self._decoder.decode(segments)
                self._permutation = self._order.window_permutation(self._epoch, self._lane, self._window)
        return self._block


def _single_valued(schema: Schema, ids: NDArray[np.int64]) -> dict[str, KeyedJaggedTensor]:
    """Returns the jagged field of features with one id a row, ``[num_keys, num_rows]``."""
    # what depends on the shape alone is made once, so that no batch pays for sums of ones
    num_keys, num_rows = ids.shape
    lengths, offsets = _unit_bags(num_keys, num_rows)
    features = KeyedJaggedTensor(
        list(schema.categorical_names),
        torch.from_numpy(ids.reshape(-1)),
        lengths=lengths,
        offsets=offsets,
        stride=num_rows,
        length_per_key=[num_rows] * num_keys,
        offset_per_key=[num_rows * key for key in range(num_keys + 1)],
    )
    return {SPARSE_FEATURES: features}


@lru_cache(maxsize=8)
def _unit_bags(num_keys: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Returns lengths and offsets of bags of one id, int32."""
    bags = num_keys * num_rows
    return torch.ones(bags, dtype=torch.int32), torch.arange(bags + 1, dtype=torch.int32)


def _jagged_fields(schema: Schema, ids: NDArray[np.int64], blocks: list[Block]) -> dict[str, KeyedJaggedTensor]:
    """Returns the jagged fields of a batch.

    Args:
        schema: Columns of the batch.
        ids: The single-valued features' ids, ``[num_keys, num_rows]``.
        blocks: The rows, in order; there may be none.
    """
    num_rows = ids.shape[1]
    ones = np.ones(num_rows, np.int64)
    columns = {
        feature.name: [Jagged.from_lengths(values, ones)]
        for feature, values in zip((each for each in schema.categorical if not each.multi_hot), ids, strict=True)
    }
    lists = (name for field in schema.fields if field.is_jagged for name in field.columns if name not in columns)
    columns |= {name: [block.jagged[name] for block in blocks] for name in lists}
    dtypes = {SPARSE_FEATURES: np.int64, DENSE_SEQUENCES: np.float32}
    return {
        field.name: _keyed_jagged(field.columns, columns, num_rows, np.dtype(dtypes[field.name]))
        for field in schema.fields
        if field.is_jagged
    }


def _keyed_jagged(
    names: Sequence[str], columns: Mapping[str, list[Jagged]], num_rows: int, dtype: np.dtype[Any]
) -> KeyedJaggedTensor:
    """Returns columns, each in parts that are end to end, as one tensor with values of this dtype."""
    parts = [part for name in names for part in columns[name]]
    values = np.concatenate([np.zeros(0, dtype), *(part.values for part in parts)])
    lengths = np.concatenate([np.zeros(0, np.int64), *(part.lengths for part in parts)])
    return KeyedJaggedTensor(
        list(names),
        torch.from_numpy(values),
        lengths=torch.from_numpy(lengths.astype(np.int32)),
        stride=num_rows,
    )


def _check_settings(rank: int, world_size: int, prefetch_batches: int) -> None:
    require_at_least("world_size", world_size, 1)
    require_at_least("prefetch_batches", prefetch_batches, 0)
    if not 0 <= rank < world_size:
        raise UserError(f"rank is {rank}: it must be in [0, {world_size}), the number of ranks")
