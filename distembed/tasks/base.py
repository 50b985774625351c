"""What a task is: the loss and the outputs of a batch, and the metrics of an evaluation.

The ``task`` section of a config names the task. A task knows nothing of ranks, tables and the trainer: the trainer
weighs its loss, gathers its outputs from all ranks and passes them back, by their names, to compute metrics. While
training it gathers no rows: a task sums up those of each step on the device, and the trainer adds these sums up.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from distembed.base.errors import UserError
from distembed.base.ranks import Ranks
from distembed.data.dataset.config import DataConfig
from distembed.data.dataset.schema import Schema
from distembed.data.reader.batch import Batch
from distembed.models.base import Model
from distembed.sse import SSE
from distembed.tasks.reported_metrics import ReportedMetric

Outputs = Mapping[str, Tensor]
"""What a task stores of each row of a batch, by name: tensors whose first dimension is rows."""

Rows = Mapping[str, npt.NDArray[Any]]
"""The outputs of all rows of a split, gathered from all ranks, by name, in the tensors' types."""

Sums = Mapping[str, npt.NDArray[Any]]
"""What a task has summed up of training steps, added up over steps and ranks, by name."""


@dataclass(frozen=True)
class TaskContext:
    """What a task has beside batches.

    Attributes:
        data: The dataset and its splits.
        dataset: The folder of the dataset that is at hand, which may be another than the one trained on.
        schema: The columns of the dataset.
        ranks: This rank among all.
        seed: The seed of everything that is random.
        sse: The rules of the features whose ids the task replaces itself, by feature.
    """

    data: DataConfig
    dataset: str
    schema: Schema
    ranks: Ranks
    seed: int
    sse: Mapping[str, SSE]


@dataclass(frozen=True)
class BatchPosition:
    """Where a rank's rows stand in training, on which random numbers depend, whatever the number of ranks.

    Attributes:
        step: Number of the step over all epochs, from 0.
        first_row: Number of the rank's first row among the rows of the step on all ranks.
    """

    step: int
    first_row: int


class Task(ABC):
    """What a model learns: a loss, metrics and predictions.

    Attributes:
        batch_fields: Names of the batch's fields that the task takes, beside those that the model takes.
        outputs: Names of the outputs of each row that :meth:`evaluate` returns.
        replaced_features: Names of the features whose ids the task replaces itself, where ``sse`` says so; those of
            all others are replaced as they are looked up.
        dense_tables: Names of the tables that the loss has gradients in all rows of, as a softmax over all ids has.
        scored_tables: Names of the tables all of whose vectors an evaluation scores.
        reported_metrics: Metrics that reports show, each with what is better; the first is the headline metric, by
            which models are compared.
        prediction_columns: Names of the columns that :meth:`predictions` returns.
        id_columns: Names of those that hold ids, int64; all others hold numbers, float32.
    """

    batch_fields: ClassVar[tuple[str, ...]]
    outputs: tuple[str, ...]
    replaced_features: ClassVar[tuple[str, ...]] = ()
    dense_tables: tuple[str, ...] = ()
    scored_tables: tuple[str, ...] = ()
    reported_metrics: tuple[ReportedMetric, ...]
    prediction_columns: tuple[str, ...]
    id_columns: tuple[str, ...] = ()

    @property
    def headline(self) -> ReportedMetric:
        """The metric by which models are compared, with its direction."""
        return self.reported_metrics[0]

    @cached_property
    def perturbations(self) -> nn.ModuleDict:
        """The modules that replace the ids of :attr:`replaced_features`, by feature; :meth:`start` may add them."""
        return nn.ModuleDict()

    def start(self, context: TaskContext) -> None:  # noqa: B027  (a task may have nothing to start)
        """Takes what the task needs beside batches, such as each user's items; called once, before the first batch."""

    def start_lines(self) -> list[str]:
        """Returns what a run says of the task before its first step; all ranks call it, after :meth:`start`."""
        return []

    def prepare_batch(self, batch: Batch, position: BatchPosition | None) -> Batch:
        """Returns a batch with what the task adds to it, such as negative items, which its config declares.

        See :class:`distembed.tasks.config.AddingTaskConfig`. It is called on this rank's rows before the model's
        pipeline sees them.

        Args:
            batch: This rank's rows.
            position: Where the rows stand in training; None for an evaluation.
        """
        return batch

    def prediction_batch(self, batch: Batch) -> Batch:
        """Returns the batch of raw rows, of which nothing is known but what they hold, with what the task adds to it.

        Args:
            batch: Rows with the dataset's columns, whose labels are NaN where they are not known.
        """
        return self.prepare_batch(batch, None)

    def evaluation_batches(self, split: str, batch_size: int) -> Iterator[Batch] | None:
        """Returns this rank's batches of an evaluation; None where they are the rows of the split.

        All ranks return equally many batches, some of which may have no rows. Predictions are written rank after rank,
        as :class:`distembed.data.reader.BatchShares` divides rows.

        Args:
            split: Name of the split.
            batch_size: Most rows of a batch on one rank.
        """
        return None

    @abstractmethod
    def step(self, outputs: Any, batch: Batch) -> tuple[Tensor, Outputs]:
        """Returns the loss, summed over this rank's rows, and what metrics need of each row.

        Args:
            outputs: What the model returned for the batch, maybe in bfloat16.
            batch: This rank's rows.

        Returns:
            The loss, and the outputs of each row, by names of the task's own.
        """

    def evaluate(self, outputs: Any, batch: Batch) -> Outputs:
        """Returns what the metrics of an evaluation need of each row; all ranks call it.

        Args:
            outputs: What the model returned for the batch, maybe in bfloat16.
            batch: This rank's rows, which may be none.
        """
        return self.step(outputs, batch)[1]

    def score(self, outputs: Any) -> Tensor:
        """Returns the number that is predicted of each row [batch], where the task predicts one: in float32.

        An exported model ends with it, so that it is made of operations on tensors alone.

        Args:
            outputs: What the model returned for a batch.

        Raises:
            UserError: The task has none.
        """
        raise UserError(f"{type(self).__name__} does not say which number is predicted of a row; define its score().")

    def rows_of_scores(self, scores: npt.NDArray[np.float32]) -> Rows:
        """Returns what the metrics of an evaluation need that follows from the scores of rows, of :meth:`score`.

        Raises:
            UserError: The task has none.
        """
        raise UserError(f"{type(self).__name__} does not say what scores mean; define its rows_of_scores().")

    @abstractmethod
    def metrics(self, rows: Rows) -> dict[str, float]:
        """Returns all metrics of the rows, first ``rows``, their number; a metric that cannot be computed is NaN.

        There may be no rows. Only rank 0 calls it.
        """

    @abstractmethod
    def training_sums(self, outputs: Outputs) -> Outputs:
        """Returns what the lines that are logged while training need of a step, summed over the rows of its outputs.

        It is called after every step, and what it returns is added up over steps and ranks. So names, shapes and types
        are the same for all batches, sums of many rows are in int64 or float64, and nothing asks the device for a
        number: the next step would wait for that.

        Args:
            outputs: What :meth:`step` returned of this rank's rows.
        """

    @abstractmethod
    def training_metrics(self, sums: Sums) -> dict[str, float]:
        """Returns the metrics of a line that is logged while training, beside the loss; only rank 0 calls it.

        Args:
            sums: What :meth:`training_sums` returned, added up.
        """

    @abstractmethod
    def predictions(self, rows: Rows) -> dict[str, npt.NDArray[Any]]:
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
