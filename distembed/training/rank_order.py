"""Tables that come a step at a time from all ranks, written rank after rank.

Rank 0's are passed on at once. Those of the others wait in unnamed files beside the output, a file a rank, so that
memory stays that of a step.
"""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO

import pyarrow as pa


class RankOrder:
    """Puts the tables of ranks in the order of ranks; rank 0 uses it as a context, which removes its files.

    Args:
        columns: Columns of the tables.
        num_ranks: Number of ranks.
        folder: Folder whose disk has room for the tables of all ranks but the first.
    """

    def __init__(self, columns: pa.Schema, num_ranks: int, folder: Path) -> None:
        self._num_rows = 0
        with ExitStack() as resources:
            self._files: list[IO[bytes]] = [
                resources.enter_context(tempfile.TemporaryFile(dir=folder)) for _ in range(1, num_ranks)
            ]
            self._spools = [resources.enter_context(pa.ipc.new_stream(file, columns)) for file in self._files]
            self._resources = resources.pop_all()

    def __enter__(self) -> "RankOrder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    def write(self, tables: Sequence[pa.Table], write: Callable[[pa.Table], None]) -> None:
        """Takes the table of each rank of a step, each of which may have no rows.

        Raises:
            OSError: There is no room for them.
        """
        first, *others = tables
        self._pass_on(first, write)
        for table, spool in zip(others, self._spools, strict=True):
            spool.write_table(table)

    def finish(self, write: Callable[[pa.Table], None]) -> int:
        """Passes on the tables that wait, rank after rank, and returns the number of rows of all.

        Raises:
            OSError: They cannot be read back.
        """
        for file, spool in zip(self._files, self._spools, strict=True):
            spool.close()
            file.seek(0)
            for batch in pa.ipc.open_stream(file):
                self._pass_on(pa.Table.from_batches([batch]), write)
        return self._num_rows

    def _pass_on(self, table: pa.Table, write: Callable[[pa.Table], None]) -> None:
        if len(table):
            self._num_rows += len(table)
            write(table)
