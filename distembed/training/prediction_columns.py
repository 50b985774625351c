"""What a task's predictions become in a file: numbers, and the raw values of users and items in place of their ids."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
        left_out: Names of columns that are not written, such as a label that is not known.
    """

    task: Task
    values: Mapping[str, pa.Array] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def schema(self) -> pa.Schema:
        """Names and types: texts of raw values, int64 of ids, and float32 of everything else."""
        names = [name for name in self.task.prediction_columns if name not in self.left_out]
        return pa.schema([(name, self._type(name)) for name in names])

    def table(self, found: Mapping[str, npt.NDArray[Any]]) -> pa.Table:
        """Returns what :meth:`~distembed.tasks.base.Task.predictions` returned as these columns."""
        return pa.table({name: self._column(name, found[name]) for name in self.schema.names}, schema=self.schema)

    def _type(self, name: str) -> pa.DataType:
        if name not in self.task.id_columns:
            return pa.float32()
        return pa.string() if _feature(name) in self.values else pa.int64()

    def _column(self, name: str, found: npt.NDArray[Any]) -> Any:
        values = self.values.get(_feature(name)) if name in self.task.id_columns else None
        return pa.array(found) if values is None else take_values(values, found)


def recommended_values(dataset: str | os.PathLike[str]) -> dict[str, pa.Array]:
    """Returns the raw values of users and items by their ids, as far as a dataset has vocabularies of them.

    Raises:
        UserError: A vocabulary is damaged.
    """
    folder, manifest = Path(dataset), Manifest.load(dataset)
    return {name: raw_values(folder, manifest, name) for name in (USER, ITEM) if name in manifest.vocabularies}


def _feature(column: str) -> str:
    """Returns the feature whose ids a column of predictions has."""
    return USER if column == USER else ITEM
