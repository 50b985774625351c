"""What a task is: the loss and the outputs of a batch, and the metrics of an evaluation.

The ``task`` section of a config names the task. A task knows nothing of ranks, tables and the trainer: the trainer
weighs its loss, gathers its outputs from all ranks and passes them back, by their names, to compute metrics.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from distembed.data.reader.batch import Batch
from distembed.errors import UserError
from distembed.models.base import Model
from distembed.runs.metrics import ReportedMetric

Outputs = Mapping[str, Tensor]
"""What a task stores of each row of a batch, by name: tensors whose first dimension is rows."""

Rows = Mapping[str, npt.NDArray[np.float32]]
"""The outputs of all rows of a split or of some steps, gathered from all ranks, by name."""


class Task(ABC):
    """What a model learns: a loss, metrics and predictions.

    Attributes:
        batch_fields: Names of the batch's fields that the task takes, beside those that the model takes.
        outputs: Names of the outputs of each row that :meth:`step` returns.
        reported_metrics: Metrics that reports show, each with what is better; the first is the headline metric, by
            which models are compared.
        prediction_columns: Names of the columns that :meth:`predictions` returns.
    """

    batch_fields: ClassVar[tuple[str, ...]]
    outputs: ClassVar[tuple[str, ...]]
    reported_metrics: ClassVar[tuple[ReportedMetric, ...]]
    prediction_columns: ClassVar[tuple[str, ...]]

    @property
    def headline(self) -> ReportedMetric:
        """The metric by which models are compared, with its direction."""
        return self.reported_metrics[0]

    @abstractmethod
    def step(self, outputs: Any, batch: Batch) -> tuple[Tensor, Outputs]:
        """Returns the loss, summed over this rank's rows, and what metrics need of each row.

        Args:
            outputs: What the model returned for the batch, maybe in bfloat16.
            batch: This rank's rows.
        """

    @abstractmethod
    def metrics(self, rows: Rows) -> dict[str, float]:
        """Returns all metrics of the rows, first ``rows``, their number; a metric that cannot be computed is NaN.

        There may be no rows. Only rank 0 calls it.
        """

    @abstractmethod
    def training_metrics(self, rows: Rows) -> dict[str, float]:
        """Returns the metrics of the lines that are logged while training, beside the loss."""

    @abstractmethod
    def predictions(self, rows: Rows) -> dict[str, npt.NDArray[np.float32]]:
        """Returns what is predicted of each row, by the names of :attr:`prediction_columns`."""

    @abstractmethod
    def describe(self, metrics: Mapping[str, Any]) -> str:
        """Returns the metrics of an evaluation in one line."""

    @abstractmethod
    def describe_training(self, metrics: Mapping[str, Any]) -> str:
        """Returns the metrics of :meth:`training_metrics` as text, for the line that is shown while training."""

    def details(self, rows: Rows) -> dict[str, Any]:
        """Returns what a report shows beside the metrics, in plain values."""
        return {}


def require_fields(model: Model, task: Task, fields: Mapping[str, Any]) -> None:
    """Makes sure that batches have the fields that a model and its task take.

    Args:
        model: The model, whose ``batch_fields`` are needed.
        task: The task, whose ``batch_fields`` are needed.
        fields: The fields that batches have, by name.

    Raises:
        UserError: A field is missing.
    """
    for owner, names in ((model, model.batch_fields), (task, task.batch_fields)):
        for name in names:
            if name not in fields:
                raise UserError(
                    f"{type(owner).__name__} takes the field {name!r} of a batch, and those of this dataset have "
                    f"{', '.join(fields)}."
                )
