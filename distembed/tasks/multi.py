"""Several labels of a row at once, of which a row may lack some: a loss and metrics for each label.

Label l of kind ``binary`` has the loss and the metrics of :class:`distembed.tasks.ClickTask`, and one of kind
``number`` the squared error and the metrics of :class:`distembed.tasks.RatingTask`. The loss of row i is::

    L_i = sum over l of v_l m_il loss_l(output_il, y_il)        v_l  weight of label l (task.labels.NAME.weight)
                                                                m_il 0 where row i lacks label l, and 1 elsewhere

The loss of a step is the mean of L_i over **all** rows of the global batch, also rows that lack labels, multiplied by
the rows' weights as in ``row_weights.py``. A label that a share q of the rows has therefore counts q v_l; raise its
weight to make up for it. No rank needs another's number of labels, and the gradient is that of the mean over the split.

Metrics of a label are over the rows of the split that have it; ``click.rows`` is their number.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from distembed.base.names import one_of
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.schema import LABELS, WEIGHTS, Label, Schema
from distembed.data.reader.batch import Batch
from distembed.tasks.base import BatchPosition, Outputs, Rows, Sums, Task, TaskContext
from distembed.tasks.click import ClickTask
from distembed.tasks.click_config import ClickConfig, ClickLossConfig, require_binary
from distembed.tasks.multi_config import LabelConfig, MultiConfig
from distembed.tasks.rating import NumberTask
from distembed.tasks.rating_config import NumberConfig
from distembed.tasks.reported_metrics import ReportedMetric, headline_first
from distembed.tasks.row_weights import RowWeights, total_weight, weights_of


@dataclass(frozen=True)
class _Part:
    """A label with the task of it alone, which is never started: weights of rows are in its batches."""

    label: Label
    config: LabelConfig
    task: ClickTask | NumberTask

    @classmethod
    def of(cls, label: Label, config: LabelConfig) -> "_Part":
        if label.kind == "number":
            return cls(label, config, NumberTask(**config.settings(NumberConfig)))
        return cls(label, config, ClickTask(ClickConfig(**config.settings(ClickLossConfig))))

    def named(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns values of this label by the names that they have among all labels, such as ``click.auc``."""
        return {f"{self.label.name}.{name}": value for name, value in values.items()}

    def own(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns this label's values out of all, by the names that its task knows."""
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
        self._parts = [_Part.of(label, config.labels.get(label.name, LabelConfig())) for label in labels]
        self._weights = RowWeights()
        reported = [
            dataclasses.replace(metric, name=name, heading=f"{part.label.name} {metric.heading}")
            for part in self._parts
            for name, metric in part.named({each.name: each for each in part.task.reported_metrics}).items()
        ]
        self.reported_metrics = _with_headline(reported, config.headline)
        names = [label.name for label in labels]
        self.scores = tuple(names)
        self.unknown_columns = tuple(f"{name}.label" for name in names)
        self.prediction_columns = (*self.scores, *self.unknown_columns)
        self.outputs = self._outputs = tuple(name for part in self._parts for name in part.named(_keys(part.task)))

    def start(self, context: TaskContext) -> None:
        """Reads the mean of each number in the training split, and whether rows have weights.

        Raises:
            UserError: The dataset cannot be read.
        """
        self._weights.start(context)
        self.outputs = (*self._outputs, *self._weights.outputs)
        numbers = [part for part in self._parts if isinstance(part.task, NumberTask) and part.task.subtracts_mean]
        if numbers:
            split = Manifest.load(context.data.require_path()).splits[context.data.train]
            means = {name: summary.mean for name, summary in (split.labels or {}).items()}
            for part in numbers:
                part.task.mean = means.get(part.label.name, split.label_rate) or 0.0  # type: ignore[union-attr]

    def prepare_batch(self, batch: Batch, position: BatchPosition | None) -> Batch:
        """Returns the batch with the labels [batch, labels] that the model learns, and checks binary labels.

        Raises:
            UserError: A binary label is neither 0 nor 1 nor missing.
        """
        labels = batch[LABELS]
        assert isinstance(labels, Tensor)
        columns = dict(zip(self._all_labels, labels.view(-1, len(self._all_labels)).unbind(1), strict=True))
        for part in self._parts:
            if part.label.kind == "binary":
                require_binary(
                    columns[part.label.name].cpu().numpy(),
                    f"task.name is 'multi', which takes 0 and 1 of the binary label {part.label.name!r}, and a batch",
                    "Prepare the data with `at_least: 4` at the label in the schema, which makes 0 and 1 of numbers; "
                    "or with `kind: number`.",
                )
        chosen = [_after(columns, self._labels, part.label.name) for part in self._parts]
        return dataclasses.replace(batch, fields={**batch.fields, LABELS: torch.stack(chosen, dim=1)})

    def step(self, outputs: Float[Tensor, "batch labels"], batch: Batch) -> tuple[Tensor, Outputs]:
        """Returns the loss, and each label's outputs; where a label is missing, it is 0 and has the weight 0."""
        loss, rows = torch.zeros((), device=outputs.device), dict[str, Tensor]()
        for part, own, labels in self._columns(outputs, batch):
            is_there = ~labels.isnan()
            weights, row_weights = is_there.float(), self._weights.in_loss(batch)
            if row_weights is not None:
                weights = weights * row_weights
            # not 0 times the loss of NaN, whose gradient would be NaN
            present = {LABELS: labels.masked_fill(~is_there, 0.0), WEIGHTS: weights}
            own_loss, own_rows = part.task.step(own, Batch(present, batch.global_batch_size))
            loss = loss + part.config.weight * own_loss
            rows |= part.named(own_rows)
        return loss, rows

    def evaluate(self, outputs: Float[Tensor, "batch labels"], batch: Batch) -> Outputs:
        """Returns each label's outputs, NaN where a label is missing, and the weights of rows."""
        rows = dict[str, Tensor]()
        for part, own, labels in self._columns(outputs, batch):
            rows |= part.named(part.task.evaluate(own, Batch({LABELS: labels}, batch.global_batch_size)))
        return {**rows, **self._weights.of_rows(batch)}

    def _columns(
        self, outputs: Float[Tensor, "batch labels"], batch: Batch
    ) -> Iterator[tuple[_Part, Float[Tensor, " batch"], Float[Tensor, " batch"]]]:
        """Yields each label's part, with the model's outputs and the labels of all rows."""
        labels = batch[LABELS]
        assert isinstance(labels, Tensor)
        yield from zip(self._parts, outputs.unbind(1), labels.view(outputs.shape).unbind(1), strict=True)

    def score(self, outputs: Float[Tensor, "batch labels"]) -> Float[Tensor, "batch labels"]:
        own = zip(self._parts, outputs.unbind(1), strict=True)
        return torch.stack([part.task.score(numbers) for part, numbers in own], dim=1)

    def rows_of_scores(self, scores: npt.NDArray[np.float32]) -> Rows:
        rows: dict[str, npt.NDArray[Any]] = {}
        for part, own in zip(self._parts, scores.reshape(len(scores), -1).T, strict=True):
            rows |= part.named(part.task.rows_of_scores(own))
        return rows

    def metrics(self, rows: Rows) -> dict[str, float]:
        weights = weights_of(rows)
        metrics: dict[str, float] = {"rows": len(rows[self._outputs[0]]), **total_weight(rows)}
        for part, own, is_there in self._own_rows(rows):
            own_weights = {} if weights is None else {WEIGHTS: weights[is_there]}
            metrics |= part.named(part.task.metrics({**own, **own_weights}))
        return metrics

    def _own_rows(self, rows: Rows) -> Iterator[tuple[_Part, Rows, Bool[npt.NDArray[np.bool_], " rows"]]]:
        """Yields each label's part, the outputs of the rows that have the label, and which rows these are."""
        for part in self._parts:
            own = part.own(rows)
            is_there = ~np.isnan(own["labels"])
            yield part, {name: values[is_there] for name, values in own.items()}, is_there

    def training_sums(self, outputs: Outputs) -> Outputs:
        sums = dict[str, Tensor]()
        for part in self._parts:
            sums |= part.named(part.task.training_sums(part.own(outputs)))
        return sums

    def training_metrics(self, sums: Sums) -> dict[str, float]:
        metrics = dict[str, float]()
        for part in self._parts:
            metrics |= part.named(part.task.training_metrics(part.own(sums)))
        return metrics

    def predictions(self, rows: Rows) -> dict[str, npt.NDArray[np.float32]]:
        own = [part.task.predictions(part.own(rows)) for part in self._parts]
        numbers = zip(self.scores, (columns["prediction"] for columns in own), strict=True)
        labels = zip(self.unknown_columns, (columns["label"] for columns in own), strict=True)
        return {**dict(numbers), **dict(labels)}

    def details(self, rows: Rows) -> dict[str, Any]:
        """Returns the details of the headline metric's label."""
        weights, label = weights_of(rows), self.headline.name.rpartition(".")[0]
        details: dict[str, Any] = {}
        for part, own, is_there in self._own_rows(rows):
            if part.label.name == label:
                own_weights = {} if weights is None else {WEIGHTS: weights[is_there]}
                details = part.task.details({**own, **own_weights})
        return details

    def describe(self, metrics: Mapping[str, Any]) -> str:
        return "; ".join(f"{part.label.name}: {part.task.describe(part.own(metrics))}" for part in self._parts)

    def describe_training(self, metrics: Mapping[str, Any]) -> str:
        return "  ".join(f"{part.label.name} {part.task.describe_training(part.own(metrics))}" for part in self._parts)


def _keys(task: Task) -> dict[str, None]:
    return dict.fromkeys(task.outputs)


def _with_headline(reported: list[ReportedMetric], headline: str | None) -> tuple[ReportedMetric, ...]:
    """Returns the metrics with the headline first; refuses a headline without a better direction."""
    names = [metric.name for metric in reported if metric.better is not None]
    return headline_first(reported, None if headline is None else one_of("task.headline", headline, names))


def _after(
    columns: Mapping[str, Float[Tensor, " batch"]], settings: Mapping[str, LabelConfig], name: str
) -> Float[Tensor, " batch"]:
    """Returns a label's column; of one after another label, 0 where that label is 0, and NaN where it is missing.

    In a chain, such as a click, a purchase after it and a return after that, each label follows the one before.
    """
    after = settings[name].after if name in settings else None
    if after is None:
        return columns[name]
    before = _after(columns, settings, after)
    return torch.where(before == 1, columns[name], before)
