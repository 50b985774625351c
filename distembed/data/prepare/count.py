"""SQL on Arrow batches in bounded memory: the only module that talks to DuckDB.

Counts, ranks and joins over all rows are queries on temporary tables, which are filled from streams of Arrow batches.
DuckDB keeps the tables within a memory limit, and writes larger ones to files of a folder::

    with Database(folder, memory_bytes=1 << 30) as database:
        database.add("pairs", batches)                               key, num_rows of each block
        database.run("create table counted as select key, sum(num_rows)::bigint as num_rows from pairs group by key")
        for batch in database.batches("select key, num_rows from counted order by num_rows desc, key"):
            ...

Queries name the order that they need: DuckDB's joins and groups have none. Texts are ordered by their bytes in UTF-8.

Trade-off: the limit is DuckDB's own; of 400 MB, 500 were measured.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distembed.base.errors import RunError

_LEAST_BYTES, _MOST_BYTES = 64 << 20, 1 << 60
BATCH_ROWS = 131_072


class Database:
    """Temporary tables, which are gone when the database is closed."""

    def __init__(self, folder: Path, memory_bytes: int) -> None:
        self.memory_bytes = min(max(_LEAST_BYTES, memory_bytes), _MOST_BYTES)
        self._connection = duckdb.connect(
            config={
                "memory_limit": f"{self.memory_bytes >> 20}MiB",
                "temp_directory": str(folder),
                "threads": 1,
                "preserve_insertion_order": False,  # of a table: it would be kept in memory
            }
        )

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def add(self, table: str, batches: Iterable[pa.RecordBatch], schema: pa.Schema, query: str | None = None) -> None:
        """Creates or replaces a table from a stream, read batch by batch as the view ``given`` of ``query``."""
        raised: list[BaseException] = []

        def watched() -> Iterator[pa.RecordBatch]:
            try:
                yield from batches
            except BaseException as error:  # KeyboardInterrupt too, which DuckDB would hide
                raised.append(error)
                raise

        self._connection.register("given", pa.RecordBatchReader.from_batches(schema, watched()))
        try:
            self.run(f"create or replace table {table} as {query or 'select * from given'}")
        except Exception:
            if raised:
                raise raised[0] from None
            raise
        finally:
            self._connection.unregister("given")

    def append(self, table: str, batch: pa.RecordBatch) -> None:
        self._connection.register("given", batch)
        self.run(f"insert into {table} select * from given")
        self._connection.unregister("given")

    def run(self, query: str, *values: Any) -> None:
        with _explained():
            self._connection.execute(query, list(values))

    def row(self, query: str, *values: Any) -> tuple[Any, ...]:
        with _explained():
            (values_,) = self._connection.execute(query, list(values)).fetchall()
        return tuple(values_)

    def batches(self, query: str, *values: Any, rows: int = BATCH_ROWS) -> Iterator[pa.RecordBatch]:
        """Yields a query's result in batches of at most ``rows`` rows; consume them all before the next query."""
        with _explained():
            yield from self._connection.sql(query, params=list(values) or None).to_arrow_reader(rows)


@contextmanager
def _explained() -> Iterator[None]:
    """Converts DuckDB's exceptions in the block: interrupts, a full disk (OSError) and lack of memory (RunError)."""
    try:
        yield
    except (duckdb.Error, RuntimeError, OSError) as error:
        if isinstance(error, RuntimeError) and "interrupted" in str(error):
            raise KeyboardInterrupt from error
        first_line = str(error).partition("\n")[0]  # the lines after it advise on DuckDB's own settings
        is_disk_full = "No space left" in first_line or "max_temp_directory_size" in str(error)
        if is_disk_full:  # DuckDB leaves a tenth of the disk free
            raise OSError(errno.ENOSPC, first_line) from error
        if isinstance(error, duckdb.OutOfMemoryException):
            raise RunError(
                f"the memory limit is too small for counting ({first_line}); allow more (--memory-limit)"
            ) from error
        if isinstance(error, duckdb.IOException):
            raise OSError(errno.EIO, first_line) from error
        raise


def count_distinct(database: Database, arrays: Iterable[NDArray[Any]], type_: pa.DataType) -> int:
    """Fills the table ``counted`` (value, count) with distinct values of all parts; returns the number of values."""
    schema = pa.schema([("value", type_), ("count", pa.int64())])
    counts = (np.unique(array, return_counts=True) for array in arrays)
    batches = (pa.record_batch([pa.array(values), pa.array(count)], schema=schema) for values, count in counts)
    database.add("counted", batches, schema, "select value, sum(count)::bigint as count from given group by value")
    return int(database.row("select coalesce(sum(count), 0)::bigint from counted")[0])


def values_at_ranks(database: Database, ranks: Sequence[int], type_: pa.DataType) -> NDArray[Any]:
    """Returns element ``r`` of the sorted list of all values in ``counted``, for each of the ascending ``ranks``."""
    values, num_before = [np.zeros(0, type_.to_pandas_dtype())], 0
    for batch in database.batches("select value, count from counted order by value"):
        # a value has the ranks from the end of the value before it up to its own end, exclusive
        ends = num_before + np.cumsum(batch.column(1).to_numpy())
        ranks_here = np.array([rank for rank in ranks if num_before <= rank < ends[-1]], np.int64)
        values.append(batch.column(0).to_numpy()[np.searchsorted(ends, ranks_here, side="right")])
        num_before = int(ends[-1])
    return np.concatenate(values)
