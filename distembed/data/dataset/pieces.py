"""Parquet files in pieces that have a checksum each, and whether a file has the columns of a schema.

::

    | PAR1 row group 0 | row group 1 | ... | last row group | footer PAR1 |
      piece 0            piece 1             piece n - 1      piece n

Every byte of a file is in one of its pieces. ``checksums.bin`` has 24 bytes a piece: its size (int64, little-endian)
and its XXH3. It lists the files of all splits in the manifest's order; the manifest has its checksum. A terabyte in row
groups of 7 MB takes 4 MB.

Trade-off: Parquet's own checksums of pages need no file, but leave out the headers of the pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from distembed.base.checksums import file_checksum
from distembed.base.errors import UserError
from distembed.data.dataset.schema import Schema

CHECKSUMS_NAME = "checksums.bin"
REMEDY = "prepare the data again, or fetch the file again from where a whole copy is"
PIECE = np.dtype([("bytes", "<i8"), ("checksum", "V16")])
Pieces: TypeAlias = NDArray[np.void]
"""The pieces of a file, or of several end to end, each of the type ``PIECE``."""


def file_pieces(path: Path) -> Pieces:
    """Returns the pieces of a Parquet file as it is, with a few megabytes in memory at a time."""
    metadata = pq.read_metadata(path)
    starts: list[int] = []
    stop = 0
    for index in range(metadata.num_row_groups):
        begin, end = _row_group_bounds(metadata.row_group(index), stop)
        if begin < stop or end < begin:
            raise UserError(f"{path}, row group {index} does not come after the one before it; write the file anew")
        starts.append(begin if starts else 0)
        stop = end
    sizes = np.diff([*starts, stop, path.stat().st_size] if starts else [0, path.stat().st_size]).tolist()
    return read_checksums(path, sizes)


def read_checksums(path: Path, sizes: Sequence[int]) -> Pieces:
    """Returns pieces of these sizes with the checksums of a file as it is, read a few megabytes at a time."""
    with path.open("rb") as file:
        return np.array([(size, bytes.fromhex(file_checksum(file, size))) for size in sizes], PIECE)


def _row_group_bounds(row_group: pq.RowGroupMetaData, before: int) -> tuple[int, int]:
    """Returns where a row group's columns begin and end; where the one before ends, if it has no bytes."""
    starts, stops = [], []
    for column in (row_group.column(index) for index in range(row_group.num_columns)):
        # a column without rows may have a dictionary and no page, which is then said to be at 0
        pages = [offset for offset in (column.dictionary_page_offset, column.data_page_offset) if offset]
        if pages and column.total_compressed_size:
            starts.append(min(pages))
            stops.append(min(pages) + column.total_compressed_size)
    return (min(starts), max(stops)) if starts else (before, before)


def check_columns(path: str, columns: pa.Schema, schema: Schema) -> None:
    """Makes sure that a file has a schema's columns, and that their types fit their roles."""
    missing = [name for name in schema.columns if name not in columns.names]
    if missing:
        raise UserError(f"{path} lacks the columns {', '.join(missing)}: it has {', '.join(columns.names)}")
    numeric = [name for name in (schema.label, schema.weight, *schema.dense) if name is not None]
    roles = [(name, False, _is_numeric, "a label, weight or dense column is numeric") for name in numeric]
    roles += [(name, True, _is_numeric, "a dense sequence is a list of numbers") for name in schema.dense_sequences]
    for feature in schema.categorical:
        law = f"multi_hot={feature.multi_hot} needs {'a list of integers' if feature.multi_hot else 'integer'}"
        roles.append((feature.name, feature.multi_hot, pa.types.is_integer, law))
    for name, is_list, fits, law in roles:
        kind = columns.field(name).type
        if _is_list(kind) != is_list or not fits(kind.value_type if is_list else kind):
            raise UserError(f"{path}, column {name!r}: its type is {kind}; {law}")


def _is_list(kind: pa.DataType) -> bool:
    return any(check(kind) for check in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))


def _is_numeric(kind: pa.DataType) -> bool:
    return any(check(kind) for check in (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean))
