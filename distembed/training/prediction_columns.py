"""Writes a task's predictions: as numbers, with raw values of users and items for their ids, in the order of ranks."""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy.typing as npt
import pyarrow as pa

from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.schema import ITEM, USER
from distembed.data.table.vocabulary import raw_values, take_values
from distembed.tasks.base import Task


@dataclass(frozen=True)
class PredictionColumns:
    """The columns of a file of predictions.

    Attributes:
        task: The task, whose :attr:`~distembed.tasks.base.Task.prediction_columns` they are.
        values: The raw value of each id, of users and of items; where there are none, ids are written.
        left_out: Names of columns that are not written, for example an unknown label.
    """

    task: Task
    values: Mapping[str, pa.Array] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def schema(self) -> pa.Schema:
        """Names and types: texts of raw values, int64 of ids, and float32 of everything else."""
        names = [name for name in self.task.prediction_columns if name not in self.left_out]
        return pa.schema([(name, self._type(name)) for name in names])

    def table(self, predictions: Mapping[str, npt.NDArray[Any]]) -> pa.Table:
        """Returns the values of :meth:`~distembed.tasks.base.Task.predictions` as these columns."""
        return pa.table({name: self._column(name, predictions[name]) for name in self.schema.names}, schema=self.schema)

    def _type(self, name: str) -> pa.DataType:
        if name not in self.task.id_columns:
            return pa.float32()
        return pa.string() if _feature(name) in self.values else pa.int64()

    def _column(self, name: str, numbers: npt.NDArray[Any]) -> Any:
        values = self.values.get(_feature(name)) if name in self.task.id_columns else None
        if values is not None:
            return take_values(values, numbers)
        return pa.array(numbers, from_pandas=name in self.task.unknown_columns)  # a label that a row lacks is null


def recommended_values(dataset: str | os.PathLike[str], task: Task) -> dict[str, pa.Array]:
    """Returns the raw values of users and items by their ids, as far as a dataset has vocabularies of them.

    The keys are ``user`` and ``item``, for any names of the task's features.
    """
    folder, manifest = Path(dataset), Manifest.load(dataset)
    return {
        role: raw_values(folder, manifest, feature)
        for role, feature in task.id_features.items()
        if feature in manifest.vocabularies
    }


def _feature(column: str) -> str:
    """Returns the feature whose ids a column of predictions has."""
    return USER if column == USER else ITEM


class RankOrder:
    """Writes tables that arrive a step at a time from all ranks, rank after rank.

    Rank 0 uses it as a context manager. Tables of rank 0 are written at once. Tables of other ranks wait in unnamed
    files in ``folder``, one for each rank, so that memory holds the tables of a single step.
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
        """Takes a step's tables, one for each rank, maybe empty; writes that of rank 0, and stores the others."""
        first, *other_tables = tables
        self._pass_on(first, write)
        for table, spool in zip(other_tables, self._spools, strict=True):
            spool.write_table(table)

    def finish(self, write: Callable[[pa.Table], None]) -> int:
        """Writes the stored tables, rank after rank, and returns the number of rows of all ranks."""
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
