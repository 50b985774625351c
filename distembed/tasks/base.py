"""What a task is: the loss and the outputs of a batch, and the metrics of an evaluation.

The ``task`` section of a config names the task. A task knows nothing of ranks, tables and the trainer: the trainer
weighs its loss, gathers its outputs from all ranks and passes them back, by their names, to compute metrics.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import Field as DataclassField
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

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


class TaskConfig(Protocol):
    """A task's section of a config: a frozen pydantic dataclass beside the task that it builds."""

    __dataclass_fields__: ClassVar[dict[str, DataclassField[Any]]]

    @property
    def name(self) -> str:
        """The task's name in ``TASKS``."""

    def build(self) -> Task:
        """Builds the task."""


StepOutput = tuple[Tensor, Outputs]
"""This rank's share of the mean loss times the number of ranks, and what metrics need of its rows."""


class TaskModel(nn.Module):
    """A model with its task: maps a batch to its loss and step output, with the networks in bf16 where asked.

    A rank's loss is the sum over its own rows times ``world_size / global_batch_size``: the gradients' mean over ranks
    is then that of the whole batch, also when ranks hold unequally many rows.

    Args:
        model: A model, as :mod:`distembed.models.base` describes it.
        task: The task that the model learns.
        world_size: Number of ranks.
        device: The device of this rank.
        bf16: Whether the model computes under autocast in bfloat16.
    """

    def __init__(self, model: Model, task: Task, world_size: int, device: torch.device, bf16: bool) -> None:
        super().__init__()
        self.model = model
        self.task = task
        self._world_size = world_size
        self._device_type = device.type
        self._bf16 = bf16

    def forward(self, batch: Batch) -> tuple[Tensor, StepOutput]:
        """Returns the loss of this rank's rows, to go backward from, and the step output without gradients."""
        with torch.autocast(self._device_type, dtype=torch.bfloat16, enabled=self._bf16):
            outputs = self.model(*[batch[name] for name in self.model.batch_fields])
        total, rows = self.task.step(outputs, batch)
        loss = total * (self._world_size / batch.global_batch_size)
        return loss, (loss.detach(), {name: values.detach() for name, values in rows.items()})


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
