"""Which batches each rank takes where rows are read once and in order, as in an evaluation.

The batches of a split are cut without regard to the number of ranks, and each rank takes some that follow each other::

    batches   0    1    2    3    4
    ranks     |  0   |      1     |        rank r of W takes [r*n//W, (r+1)*n//W) of n batches

So a rank decodes only its own rows, rank after rank is the order of the split, and every batch is the same on any
number of ranks, to the bit.

Trade-off: a split of fewer batches than ranks leaves ranks without rows; a batch takes milliseconds.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass

from distembed.data.dataset.manifest import Manifest
from distembed.data.reader.assemble import BatchAssembler
from distembed.data.reader.batch import Batch
from distembed.data.reader.decode import Decoding
from distembed.data.reader.order import BatchOrder
from distembed.data.reader.reader import BatchReader


@dataclass(frozen=True)
class BatchShares:
    """The batches of rows in order, divided over ranks."""

    num_rows: int  # of all ranks
    batch_size: int  # rows of a batch; the last one may have fewer
    world_size: int

    @property
    def num_steps(self) -> int:
        """Number of batches of the rank that has most; all ranks take as many steps, the last maybe without rows."""
        return -(-self.num_rows // (self.batch_size * self.world_size))

    def rows(self, rank: int) -> range:
        """Returns the rows of a rank."""
        num_batches = -(-self.num_rows // self.batch_size)
        first, last = (each * num_batches // self.world_size * self.batch_size for each in (rank, rank + 1))
        return range(min(first, self.num_rows), min(last, self.num_rows))

    def steps(self, rank: int) -> Iterator[range]:
        """Yields the rows of each step of a rank, of which those that make up for another rank's batch are none."""
        own = self.rows(rank)
        for first in range(own.start, own.start + self.num_steps * self.batch_size, self.batch_size):
            yield own[first - own.start :][: self.batch_size]


def read_share(
    dataset_dir: str | os.PathLike[str],
    split: str,
    batch_size: int,
    *,
    rank: int,
    world_size: int,
    decode_threads: int = 0,
) -> Generator[Batch, None, None]:
    """Yields a rank's batches of a split in order, equally many on every rank, the last maybe without rows.

    Args:
        dataset_dir: Folder with ``manifest.json``.
        split: Name of a split in the manifest.
        batch_size: Rows of a batch.
        rank: Rank whose share is read.
        world_size: Number of ranks.
        decode_threads: Number of threads that decode rows ahead.

    Raises:
        UserError: The dataset is not as its manifest says.
    """
    manifest = Manifest.load(dataset_dir)
    shares = BatchShares(manifest.split(split).num_rows, batch_size, world_size)
    order = BatchOrder(batch_size, shuffle=False)
    rows = shares.rows(rank)
    with closing(BatchReader(dataset_dir, split, order, decoding=Decoding(decode_threads), rows=rows)) as reader:
        yield from reader
    num_missing = shares.num_steps - reader.batches_per_epoch
    yield from BatchAssembler(manifest.schema).assemble([], [1] * num_missing)
