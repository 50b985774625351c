"""A Parquet file of the ids whose vectors are asked for."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from distembed.base.errors import UserError


def id_column(path: Path) -> str:
    """Returns the name of the column ``id``, or of the only column of integers.

    Raises:
        UserError: The file cannot be read, or which column holds the ids is not clear.
    """
    try:
        schema = pq.read_schema(path)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error
    integers = [field.name for field in schema if pa.types.is_integer(field.type)]
    if "id" in integers:
        return "id"
    if len(integers) != 1:
        columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
        raise UserError(f"--ids {path} needs a column 'id' of integers, or one such column only; it has {columns}.")
    return integers[0]


def read_ids(path: Path, column: str) -> Iterator[int]:
    """Yields the ids of a column.

    Raises:
        UserError: The file cannot be read.
    """
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=[column]):
                yield from batch.column(0).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: BaseException) -> UserError:
    """Returns the error of a file of ids that is no Parquet file."""
    return UserError(f"--ids {path} cannot be read as a Parquet file: {error}")
