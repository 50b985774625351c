"""The contract of a task: the loss and the outputs of a batch, and the metrics of an evaluation.

The ``task`` section of a config names the task. A task does not know ranks, tables or the trainer. The trainer weighs
its loss, gathers its outputs from all ranks, and hands them back by name to compute metrics. In training no rows are
gathered: a task sums numbers over the rows of each step on the device, and the trainer adds up these sums.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from distembed.base.errors import UserError
from distembed.base.ranks import Ranks
from distembed.data.dataset.config import DataConfig
from distembed.data.dataset.schema import ITEM, USER, Schema
from distembed.data.reader.batch import Batch
from distembed.models.base import Model
from distembed.sse import SSE
from distembed.tasks.reported_metrics import ReportedMetric

Outputs = Mapping[str, Tensor]
"""The numbers that a task stores of each row of a batch, by name: tensors whose first dimension is rows."""

Rows = Mapping[str, npt.NDArray[Any]]
"""The outputs of all rows of a split, gathered from all ranks, by name, in the tensors' types."""

Sums = Mapping[str, npt.NDArray[Any]]
"""A task's sums over the rows of training steps, added up over steps and ranks, by name."""


@dataclass(frozen=True)
class TaskContext:
    """The dataset and the ranks that a task works with.

    Attributes:
        data: The dataset and its splits.
        dataset: The dataset's folder, which may be another than the one trained on.
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
    """The place of a rank's rows in training. Random numbers depend on it, and not on the number of ranks.

    Attributes:
        step: Number of the step over all epochs, from 0.
        first_row: Number of the rank's first row among the rows of the step on all ranks.
    """

    step: int
    first_row: int


class Task(ABC):
    """The objective of a model: a loss, metrics and predictions.

    Attributes:
        batch_fields: Names of the batch's fields that the task takes, beside the model's.
        outputs: Names of the outputs of each row that :meth:`evaluate` returns.
        prediction_outputs: Names of the outputs that :meth:`predictions` alone takes; an evaluation drops them.
        distinct_outputs: Outputs of ids whose distinct ids are enough for :meth:`metrics`, with the number of possible
            ids; :meth:`start` may set it. An evaluation stores one boolean for each id instead of all rows' ids.
        replaced_features: Names of the features whose ids the task replaces itself, where ``sse`` says so; ids of other
            features are replaced in the lookup.
        dense_tables: Names of the tables whose every row gets a gradient, as in a softmax over all ids.
        scored_tables: Names of the tables all of whose vectors an evaluation scores.
        reported_metrics: Metrics that reports show; the first is the headline metric, by which models are compared.
        prediction_columns: Names of the columns that :meth:`predictions` returns.
        scores: Names of the numbers that are predicted of a row, columns of :meth:`predictions` and of :meth:`score`.
        unknown_columns: Names of the prediction columns that are not known of raw rows.
        id_columns: Names of the prediction columns that hold ids, int64; other columns hold numbers, float32.
        added_rows: Number of rows that :meth:`prepare_batch` adds to a step on all ranks, by the categorical feature
            that they have. A plan adds them to the rows of the batch.
        id_features: The dataset's features whose ids the columns ``user`` and ``item_1``, ``item_2``, ... hold.
    """

    batch_fields: ClassVar[tuple[str, ...]]
    outputs: tuple[str, ...]
    prediction_outputs: tuple[str, ...] = ()
    distinct_outputs: Mapping[str, int] = MappingProxyType({})
    replaced_features: ClassVar[tuple[str, ...]] = ()
    dense_tables: tuple[str, ...] = ()
    scored_tables: tuple[str, ...] = ()
    reported_metrics: tuple[ReportedMetric, ...]
    prediction_columns: tuple[str, ...]
    scores: tuple[str, ...] = ("prediction",)
    unknown_columns: tuple[str, ...] = ("label",)
    id_columns: tuple[str, ...] = ()
    added_rows: Mapping[str, int] = MappingProxyType({})
    id_features: Mapping[str, str] = MappingProxyType({USER: USER, ITEM: ITEM})

    @property
    def headline(self) -> ReportedMetric:
        """The metric by which models are compared, with its direction."""
        return self.reported_metrics[0]

    @cached_property
    def perturbations(self) -> nn.ModuleDict:
        """The modules that replace the ids of :attr:`replaced_features`, by feature; :meth:`start` may add them."""
        return nn.ModuleDict()

    def start(self, context: TaskContext) -> None:  # noqa: B027  (a task may have nothing to start)
        """Prepares the task, for example by reading each user's items; called once, before the first batch."""

    def start_lines(self) -> list[str]:
        """Returns lines that a run prints before its first step; all ranks call it, after :meth:`start`."""
        return []

    def prepare_batch(self, batch: Batch, position: BatchPosition | None) -> Batch:
        """Returns this rank's batch with the task's additions, for example negative items, for the model's pipeline.

        The task's config declares them: :class:`distembed.tasks.config.AddingTaskConfig`. ``position`` is None for an
        evaluation.
        """
        return batch

    def prediction_batch(self, batch: Batch) -> Batch:
        """Returns a batch of raw rows with the task's additions; a label is NaN where it is not known."""
        return self.prepare_batch(batch, None)

    def catalogue_batches(self, batch_size: int) -> Iterator[Batch]:
        """Yields this rank's batches that the model has to see before predictions; ranks have equally many.

        A task over items with features has the model compute their vectors so. Their outputs have no rows. The batches
        of an evaluation include them.
        """
        return iter(())

    def evaluation_batches(self, split: str, batch_size: int) -> Iterator[Batch] | None:
        """Returns this rank's batches of an evaluation, or None to evaluate the rows of the split themselves.

        All ranks must return equally many batches; a batch may have no rows. Predictions are written in the order of
        the ranks, so an override must divide rows as :class:`distembed.data.reader.BatchShares` does.
        """
        return None

    @abstractmethod
    def step(self, outputs: Any, batch: Batch) -> tuple[Tensor, Outputs]:
        """Returns the loss, summed over this rank's rows, and the outputs of each row, named by the task.

        Args:
            outputs: The model's outputs for the batch, maybe in bfloat16.
            batch: This rank's rows.
        """

    def evaluate(self, outputs: Any, batch: Batch) -> Outputs:
        """Returns the outputs of each row for the metrics; the batch may have no rows. All ranks call it."""
        return self.step(outputs, batch)[1]

    def score(self, outputs: Any) -> Tensor:
        """Returns the predicted number of each row [batch], in float32, given the model's outputs.

        A task with several ``scores`` returns a column for each of them [batch, scores]. An exported model ends with
        it, so that it is made of operations on tensors alone.

        Raises:
            UserError: The task predicts no number.
        """
        raise UserError(f"{type(self).__name__} does not say which number is predicted of a row; define its score().")

    def rows_of_scores(self, scores: npt.NDArray[np.float32]) -> Rows:
        """Returns the outputs that metrics are computed from, given the values that :meth:`score` returns of all rows.

        Raises:
            UserError: The task predicts no number.
        """
        raise UserError(f"{type(self).__name__} does not say what scores mean; define its rows_of_scores().")

    @abstractmethod
    def metrics(self, rows: Rows) -> dict[str, float]:
        """Returns all metrics of the rows, first ``rows``, their number; a metric that cannot be computed is NaN.

        There may be no rows, and none of :attr:`prediction_outputs`. Only rank 0 calls it.
        """

    @abstractmethod
    def training_sums(self, outputs: Outputs) -> Outputs:
        """Returns the sums over the rows of a step from which the logged training metrics are computed.

        It is called after every step, and the sums are added up over steps and ranks. So names, shapes and types are
        equal for all batches, sums of many rows are in int64 or float64, and nothing asks the device for a number: the
        next step would wait for it. ``outputs`` are this rank's, of :meth:`step`.
        """

    @abstractmethod
    def training_metrics(self, sums: Sums) -> dict[str, float]:
        """Returns the training metrics beside the loss, given the sums of all steps; only rank 0 calls it."""

    @abstractmethod
    def predictions(self, rows: Rows) -> dict[str, npt.NDArray[Any]]:
        """Returns the prediction of each row, by the names of :attr:`prediction_columns`."""

    @abstractmethod
    def describe(self, metrics: Mapping[str, Any]) -> str:
        """Returns the metrics of an evaluation in one line."""

    @abstractmethod
    def describe_training(self, metrics: Mapping[str, Any]) -> str:
        """Returns the metrics of :meth:`training_metrics` as text, for the line that is shown while training."""

    def details(self, rows: Rows) -> dict[str, Any]:
        """Returns plain values that a report shows beside the metrics."""
        return {}


def require_fields(model: Model, task: Task, fields: Mapping[str, Any]) -> None:
    """Makes sure that batches have the ``batch_fields`` of a model and its task.

    Args:
        model: The model.
        task: The task.
        fields: The fields of a batch, by name.

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
