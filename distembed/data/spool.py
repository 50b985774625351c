"""Parsed blocks on disk, one Arrow file each, until the vocabulary is known.

Memory stays bounded because what waits lies in these files: they are mapped, so a feature's codes are read without the
rest. ``first_row`` counts the well-formed rows before a block, over all files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distembed.data.parse import IdColumn, ParsedBlock


@dataclass(frozen=True)
class SpooledBlock:
    """Where a parsed block lies, and which rows it holds."""

    path: Path
    index: int
    first_row: int
    num_rows: int
    num_keys: tuple[int, ...]

    @property
    def stop_row(self) -> int:
        """One past the last row."""
        return self.first_row + self.num_rows


def write_block(path: Path, block: ParsedBlock) -> None:
    """Write a block's columns."""
    ids = [pa.DictionaryArray.from_arrays(pa.array(c.codes), pa.array(c.keys), safe=False) for c in block.ids]
    columns = [pa.array(block.labels), *(pa.array(column) for column in block.dense), *ids]
    batch = pa.RecordBatch.from_arrays(columns, [str(index) for index in range(len(columns))])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)


class BlockColumns:
    """A spooled block's columns, mapped into memory: label first, then dense, then ids."""

    def __init__(self, block: SpooledBlock) -> None:
        """Map the file."""
        self._batch = pa.ipc.open_file(pa.memory_map(str(block.path))).get_batch(0)

    def numbers(self, column: int) -> NDArray[Any]:
        """The label or a dense column."""
        values: NDArray[Any] = self._batch.column(column).to_numpy()
        return values

    def ids(self, column: int) -> IdColumn:
        """An id column."""
        encoded = self._batch.column(column)
        return IdColumn(encoded.indices.to_numpy(), encoded.dictionary.to_numpy())


def blocks_within(blocks: Sequence[SpooledBlock], start: int, stop: int) -> Sequence[SpooledBlock]:
    """The blocks that hold any of the rows ``[start, stop)``; the blocks are in the order of their rows."""
    stops = np.array([block.stop_row for block in blocks], np.int64)
    starts = np.array([block.first_row for block in blocks], np.int64)
    return blocks[int(np.searchsorted(stops, start, "right")) : int(np.searchsorted(starts, stop, "left"))]
