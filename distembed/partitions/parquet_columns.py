"""Reads assignments from the columns of a Parquet file, column by column and in batches.

Each column is read twice: first its distinct values are collected, then they are numbered. In memory at once are a
batch, the distinct values of one column and the numbers of all columns.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from distembed.base.errors import UserError
from distembed.base.names import one_of

_BATCH_ROWS = 2**20
_MIN_PENDING_VALUES = 2**20
"""Pending values are merged with the known ones once they are as many, and at least this many."""


def read_assignments(
    path: str | Path, columns: Sequence[str], num_embeddings: int
) -> tuple[list[NDArray[np.integer]], list[int]]:
    """Returns the row of every id in each column, and each column's number of rows.

    Rows are numbered by ascending value, null last.

    Raises:
        UserError: The file or a column is missing, is given twice or cannot be used, or the file does not have one row
            for each id.
    """
    if isinstance(columns, str) or len(columns) == 0:
        raise UserError(f"columns is {columns!r}; give a list of one column name or more.")
    file = _open(path)
    with file:
        if file.metadata.num_rows != num_embeddings:
            raise UserError(
                f"{path} has {file.metadata.num_rows} rows, for num_embeddings={num_embeddings}; row x describes id x, "
                "so there must be one row an id."
            )
        for position, column in enumerate(columns):
            _require_usable(file, column, list(columns[:position]))
        numbered = [_number_values(file, path, column) for column in columns]
    return [rows for rows, _ in numbered], [count for _, count in numbered]


def _open(path: str | Path) -> pq.ParquetFile:
    """Opens a Parquet file, or raises a :class:`UserError` where it is none."""
    if not Path(path).is_file():
        raise UserError(f"{str(path)!r} is no file; give the path of a Parquet file.")
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{str(path)!r} cannot be read as a Parquet file: {error}") from error


def _require_usable(file: pq.ParquetFile, column: str, before: Sequence[str]) -> None:
    """Raises a :class:`UserError` unless a column exists once, is of plain values, and is not among ``before``."""
    one_of("column", column, file.schema_arrow.names)
    if column in before:
        raise UserError(f"columns holds {column!r} twice; the same partition again tells no more ids apart.")
    if file.schema_arrow.names.count(column) > 1:
        raise UserError(f"the file has several columns named {column!r}; rename them.")
    kind = file.schema_arrow.field(column).type
    if pa.types.is_nested(kind):
        raise UserError(f"column {column!r} has the nested type {kind}; use a column of plain values.")


def _number_values(file: pq.ParquetFile, path: str | Path, column: str) -> tuple[NDArray[np.integer], int]:
    """Returns the number of each id's value among the distinct ones, and how many these are."""
    values = _distinct_values(file, path, column)
    rows = np.empty(file.metadata.num_rows, dtype=np.min_scalar_type(len(values)))
    start = 0
    for batch in _batches(file, path, column):
        rows[start : start + len(batch)] = pc.index_in(batch, value_set=values).to_numpy()
        start += len(batch)
    return rows, len(values)


def _distinct_values(file: pq.ParquetFile, path: str | Path, column: str) -> pa.Array:
    """Returns the distinct values of a column, ascending, null last."""
    known, pending, num_pending = None, [], 0
    for batch in _batches(file, path, column):
        pending.append(batch.unique())
        num_pending += len(pending[-1])
        # known values are hashed again only once their number may have doubled
        if num_pending >= max(_MIN_PENDING_VALUES, 0 if known is None else len(known)):
            known = _union(known, pending)
            pending, num_pending = [], 0
    values = _union(known, pending)
    try:
        return values.take(pc.sort_indices(values))
    except pa.ArrowNotImplementedError as error:
        raise UserError(f"column {column!r} has the type {values.type}, whose values have no order.") from error


def _union(known: pa.Array | None, pending: list[pa.Array]) -> pa.Array:
    """Returns the distinct values of known and pending ones."""
    return pa.chunked_array(pending if known is None else [known, *pending]).unique()


def _batches(file: pq.ParquetFile, path: str | Path, column: str) -> Iterator[pa.Array]:
    """Yields the values of a column, batch by batch; dictionaries are decoded.

    Raises:
        UserError: The column cannot be read.
    """
    try:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=[column]):
            values = batch.column(0)
            yield values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"{str(path)!r}: column {column!r} cannot be read, the file may be damaged; write it anew: {error}"
        ) from error
