"""A loss and metrics for each label of a row; labels may be missing.

Label l of kind ``binary`` has the loss and the metrics of :class:`distembed.tasks.ClickTask`, and one of kind
``number`` the squared error and the metrics of :class:`distembed.tasks.RatingTask`. The loss of row i is::

    L_i = sum over l of v_l m_il loss_l(output_il, y_il)        v_l  weight of label l (task.labels.NAME.weight)
                                                                m_il 0 where row i lacks label l, and 1 elsewhere

The loss of a step is the mean of L_i over **all** rows of the global batch, including rows without labels. Each L_i is
multiplied by the row's weight as in ``row_weights.py``. A label that a share q of the rows has counts q v_l; raise its
weight to compensate. Ranks need not exchange their numbers of labels, and the gradient is that of the mean over the
split.

Metrics of a label are over the rows of the split that have it; ``click.rows`` is their number. A label after another
one, such as a conversion after a click, also has the AUC of the conversion rate p(conversion) / p(click), the pCVR of
ESMM (Ma et al., SIGIR 2018), among clicked rows: ``conversion.cvr_auc``, of ``conversion.cvr_rows`` rows.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from distembed.base.names import one_of
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.schema import LABELS, WEIGHTS, Label, Schema
from distembed.data.reader.batch import Batch
from distembed.tasks.base import BatchPosition, Outputs, Rows, Sums, Task, TaskContext
from distembed.tasks.binary_metrics import exact_auc
from distembed.tasks.click import ClickTask
from distembed.tasks.click_config import ClickConfig, ClickLossConfig
from distembed.tasks.multi_config import CVR_AUC, LabelConfig, MultiConfig
from distembed.tasks.rating import NumberTask
from distembed.tasks.rating_config import NumberConfig
from distembed.tasks.reported_metrics import ReportedMetric, headline_first
from distembed.tasks.row_weights import RowWeights, total_weight, weights_of


@dataclass(frozen=True)
class _LabelTask:
    """A label and the task of this label alone, which is never started: its batches have weights of rows."""

    label: Label
    config: LabelConfig
    task: ClickTask | NumberTask

    @classmethod
    def of(cls, label: Label, config: LabelConfig) -> "_LabelTask":
        if label.kind == "number":
            return cls(label, config, NumberTask(**config.settings(NumberConfig)))
        return cls(label, config, ClickTask(ClickConfig(**config.settings(ClickLossConfig))))

    def reported_metrics(self, has_rate: bool) -> Iterator[ReportedMetric]:
        """Yields the label's metrics; ``has_rate`` says whether the label before it is learned too."""
        rates = (ReportedMetric(CVR_AUC, "CVR AUC", better="higher"),) if has_rate else ()
        for metric in (*self.task.reported_metrics, *rates):
            name, heading = f"{self.label.name}.{metric.name}", f"{self.label.name} {metric.heading}"
            yield dataclasses.replace(metric, name=name, heading=heading)

    def with_prefix(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns values of this label by their names among all labels, such as ``click.auc``."""
        return {f"{self.label.name}.{name}": value for name, value in values.items()}

    def without_prefix(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the values of this label among the values of all labels, by their names in this label's task."""
        prefix = f"{self.label.name}."
        return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


class MultiTask(Task):
    """Predicts labels of each row from a model that returns a number for each row and label [batch, labels].

    Args:
        config: The labels with their settings, and the headline metric.
        schema: The columns of the dataset.

    Raises:
        UserError: The dataset lacks a label, a setting is for another kind of label, or the headline is no metric.
    """

    batch_fields = (LABELS,)

    def __init__(self, config: MultiConfig, schema: Schema) -> None:
        labels = config.chosen_labels(schema)
        self._all_labels, self._labels = schema.label_names, config.labels
        self._tasks = [_LabelTask.of(label, config.labels.get(label.name, LabelConfig())) for label in labels]
        self._weights = RowWeights()
        self.scores = tuple(label.name for label in labels)
        learned = dict(zip(self.scores, self._tasks, strict=True))
        self._rates = [(learned[each.config.after], each) for each in self._tasks if each.config.after in learned]
        has_rate = {each.label.name for _, each in self._rates}
        reported = [metric for name in self.scores for metric in learned[name].reported_metrics(name in has_rate)]
        self.reported_metrics = _with_headline(reported, config.headline)
        self.unknown_columns = tuple(f"{name}.label" for name in self.scores)
        self.prediction_columns = (*self.scores, *self.unknown_columns)
        self.outputs = self._outputs = tuple(
            f"{each.label.name}.{name}" for each in self._tasks for name in each.task.outputs
        )

    def start(self, context: TaskContext) -> None:
        """Reads the mean of each number in the training split, and whether rows have weights.

        Raises:
            UserError: The dataset cannot be read.
        """
        self._weights.start(context)
        self.outputs = (*self._outputs, *self._weights.outputs)
        tasks = {each.label: each.task for each in self._tasks}
        numbers = {label: task for label, task in tasks.items() if isinstance(task, NumberTask) and task.subtracts_mean}
        if numbers:
            manifest = Manifest.load(context.data.require_path())
            summaries = manifest.splits[context.data.train].label_summaries(manifest.schema)
            for label, task in numbers.items():
                task.mean = summaries[label].mean or 0.0

    def prepare_batch(self, batch: Batch, position: BatchPosition | None) -> Batch:
        """Returns the batch with the labels [batch, labels] that the model learns."""
        labels = batch[LABELS]
        assert isinstance(labels, Tensor)
        columns = dict(zip(self._all_labels, labels.view(-1, len(self._all_labels)).unbind(1), strict=True))
        chosen = [_masked_column(columns, self._labels, name) for name in self.scores]
        return dataclasses.replace(batch, fields={**batch.fields, LABELS: torch.stack(chosen, dim=1)})

    def step(self, outputs: Float[Tensor, "batch labels"], batch: Batch) -> tuple[Tensor, Outputs]:
        """Returns the loss, and each label's outputs; where a label is missing, it is 0 and has the weight 0."""
        loss, rows = torch.zeros((), device=outputs.device), dict[str, Tensor]()
        for each, numbers, labels in self._columns(outputs, batch):
            has_label = ~labels.isnan()
            weights, row_weights = has_label.float(), self._weights.in_loss(batch)
            if row_weights is not None:
                weights = weights * row_weights
            # not 0 times the loss of NaN, whose gradient would be NaN
            present = {LABELS: labels.masked_fill(~has_label, 0.0), WEIGHTS: weights}
            label_loss, label_rows = each.task.step(numbers, Batch(present, batch.global_batch_size))
            loss = loss + each.config.weight * label_loss
            rows |= each.with_prefix(label_rows)
        return loss, rows

    def evaluate(self, outputs: Float[Tensor, "batch labels"], batch: Batch) -> Outputs:
        """Returns each label's outputs, NaN where a label is missing, and the weights of rows."""
        rows = dict[str, Tensor]()
        for each, numbers, labels in self._columns(outputs, batch):
            rows |= each.with_prefix(each.task.evaluate(numbers, Batch({LABELS: labels}, batch.global_batch_size)))
        return {**rows, **self._weights.of_rows(batch)}

    def _columns(
        self, outputs: Float[Tensor, "batch labels"], batch: Batch
    ) -> Iterator[tuple[_LabelTask, Float[Tensor, " batch"], Float[Tensor, " batch"]]]:
        """Yields each label's task, with the model's outputs and the labels of all rows."""
        labels = batch[LABELS]
        assert isinstance(labels, Tensor)
        yield from zip(self._tasks, outputs.unbind(1), labels.view(outputs.shape).unbind(1), strict=True)

    def score(self, outputs: Float[Tensor, "batch labels"]) -> Float[Tensor, "batch labels"]:
        columns = zip(self._tasks, outputs.unbind(1), strict=True)
        return torch.stack([each.task.score(numbers) for each, numbers in columns], dim=1)

    def rows_of_scores(self, scores: npt.NDArray[np.float32]) -> Rows:
        rows: dict[str, npt.NDArray[Any]] = {}
        for each, label_scores in zip(self._tasks, scores.reshape(len(scores), -1).T, strict=True):
            rows |= each.with_prefix(each.task.rows_of_scores(label_scores))
        return rows

    def metrics(self, rows: Rows) -> dict[str, float]:
        metrics: dict[str, float] = {"rows": len(rows[self._outputs[0]]), **total_weight(rows)}
        for each in self._tasks:
            metrics |= each.with_prefix(each.task.metrics(_rows_with_label(each, rows)))
        for before, each in self._rates:
            metrics |= each.with_prefix(_rate_metrics(before, each, rows))
        return metrics

    def training_sums(self, outputs: Outputs) -> Outputs:
        sums = dict[str, Tensor]()
        for each in self._tasks:
            sums |= each.with_prefix(each.task.training_sums(each.without_prefix(outputs)))
        return sums

    def training_metrics(self, sums: Sums) -> dict[str, float]:
        metrics = dict[str, float]()
        for each in self._tasks:
            metrics |= each.with_prefix(each.task.training_metrics(each.without_prefix(sums)))
        return metrics

    def predictions(self, rows: Rows) -> dict[str, npt.NDArray[np.float32]]:
        columns = [each.task.predictions(each.without_prefix(rows)) for each in self._tasks]
        numbers = zip(self.scores, (label["prediction"] for label in columns), strict=True)
        labels = zip(self.unknown_columns, (label["label"] for label in columns), strict=True)
        return {**dict(numbers), **dict(labels)}

    def details(self, rows: Rows) -> dict[str, Any]:
        """Returns the details of the headline metric's label."""
        each = self._tasks[self.scores.index(self.headline.label)]
        return each.task.details(_rows_with_label(each, rows))

    def describe(self, metrics: Mapping[str, Any]) -> str:
        texts = []
        for each in self._tasks:
            own = each.without_prefix(metrics)
            rate = f"CVR AUC {own[CVR_AUC]:.4f} ({own['cvr_rows']:,} rows)  " if CVR_AUC in own else ""
            texts.append(f"{each.label.name}: {rate}{each.task.describe(own)}")
        return "; ".join(texts)

    def describe_training(self, metrics: Mapping[str, Any]) -> str:
        return "  ".join(
            f"{each.label.name} {each.task.describe_training(each.without_prefix(metrics))}" for each in self._tasks
        )


def _with_headline(reported: list[ReportedMetric], headline: str | None) -> tuple[ReportedMetric, ...]:
    """Returns the metrics with the headline first; refuses a headline without a better direction."""
    names = [metric.name for metric in reported if metric.better is not None]
    return headline_first(reported, None if headline is None else one_of("task.headline", headline, names))


def _rows_with_label(label_task: _LabelTask, rows: Rows) -> Rows:
    """Returns a label's outputs in the rows that have the label, with the weights of these rows if they have any."""
    outputs = label_task.without_prefix(rows)
    if WEIGHTS in rows:
        outputs[WEIGHTS] = rows[WEIGHTS]
    has_label = ~np.isnan(outputs["labels"])
    return {name: values[has_label] for name, values in outputs.items()}


def _rate_metrics(before: _LabelTask, after: _LabelTask, rows: Rows) -> dict[str, float]:
    """Returns how well p(after) / p(before) orders the rows in which the label before is 1 and the other is known."""
    first, second = before.without_prefix(rows), after.without_prefix(rows)
    is_counted = (first["labels"] == 1) & ~np.isnan(second["labels"])
    log_before, log_after = (
        -np.logaddexp(0, -each["logits"][is_counted].astype(np.float64)) for each in (first, second)
    )
    weights = weights_of(rows)
    counted_weights = None if weights is None else weights[is_counted].astype(np.float64)
    auc = exact_auc(log_after - log_before, second["labels"][is_counted], counted_weights)
    return {CVR_AUC: auc, "cvr_rows": int(is_counted.sum())}


def _masked_column(
    columns: Mapping[str, Float[Tensor, " batch"]], settings: Mapping[str, LabelConfig], name: str
) -> Float[Tensor, " batch"]:
    """Returns a label's column; of one after another label, 0 where that label is 0, and NaN where it is missing.

    In a chain, such as a click, a purchase after it and a return after that, each label follows the one before.
    """
    after = settings[name].after if name in settings else None
    if after is None:
        return columns[name]
    before = _masked_column(columns, settings, after)
    return torch.where(before == 1, columns[name], before)
