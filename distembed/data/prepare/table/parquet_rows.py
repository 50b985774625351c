"""Rows of Parquet files: some row groups of a file, batch by batch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from distembed.base.errors import UserError
from distembed.data.prepare.table.raw_rows import RawRows
from distembed.data.remote import is_url, open_remote

_BYTES_A_VALUE = 8
"""Memory that a value takes at least, however often it is repeated in the file."""


@dataclass(frozen=True)
class ParquetBlock:
    """Some rows of a Parquet file."""

    table: pa.Table

    def rows(self, columns: Sequence[str], numbers: Collection[str] = ()) -> RawRows:
        """Returns the rows of the block, with these columns as they are."""
        return RawRows(self.table.select(list(columns)), np.arange(self.table.num_rows), self.table.num_rows)


@contextmanager
def opened_parquet(place: str) -> Iterator[pq.ParquetFile]:
    """Yields the Parquet file of a path or a URL; that it cannot be read, or is damaged, is a UserError."""
    try:
        source: Any = open_remote(place) if is_url(place) else Path(place)
        with pq.ParquetFile(source, pre_buffer=False) as file:  # which would hold whole row groups
            yield file
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{place} cannot be read as Parquet: {error}; write it again.") from error


def parquet_batches(
    place: str, groups: Sequence[int], columns: Sequence[str], block_bytes: int
) -> Iterator[tuple[ParquetBlock, float]]:
    """Yields the rows of some row groups, with the share of these that was read.

    The columns of a batch take about ``block_bytes`` in memory.
    """
    with opened_parquet(place) as file:
        described = [file.metadata.row_group(group) for group in groups]
        num_rows, done = sum(group.num_rows for group in described), 0
        encoded = sum(group.total_byte_size for group in described) / max(1, num_rows)
        batch_rows = max(1, int(block_bytes / max(1.0, encoded, _BYTES_A_VALUE * len(columns))))
        for batch in file.iter_batches(batch_rows, row_groups=list(groups), columns=list(columns), use_threads=False):
            done += batch.num_rows
            yield ParquetBlock(pa.table(batch)), done / num_rows


def row_group_bytes(place: str, num_bytes: int | None) -> tuple[pa.Schema, list[int]]:
    """Returns the columns of a file, and about how many of its bytes each row group has.

    The file's ``num_bytes`` are shared out by the sizes before compression, and are these where they are not known: the
    sizes of columns, of a damaged file, end the process.
    """
    with opened_parquet(place) as file:
        sizes = [file.metadata.row_group(number).total_byte_size for number in range(file.metadata.num_row_groups)]
        total = sum(sizes)
        if num_bytes is not None and total > 0:
            sizes = [size * num_bytes // total for size in sizes]
        return file.schema_arrow, sizes
