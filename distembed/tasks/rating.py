"""The rating that a user gives an item: squared error of a model's score, and RMSE (Koren et al., IEEE Computer 2009).

The loss of a row is ``(r - s - m)^2 + lambda (|u|^2 + |v|^2)``, where m is the mean of the training ratings, or 0, and
u and v are the vectors that the row looks up, biases included: frequent users and items are penalised as often as they
are seen. Of rows with weights the first term is multiplied by the weight over the mean weight; see ``row_weights.py``.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.schema import ITEM, LABELS, SPARSE_FEATURES, WEIGHTS
from distembed.data.reader.batch import Batch
from distembed.models.queries import Queries
from distembed.tasks.base import Outputs, Rows, Sums, Task, TaskContext
from distembed.tasks.reported_metrics import ReportedMetric, headline_first
from distembed.tasks.row_weights import RowWeights, total_weight, weights_of

_METRICS = (ReportedMetric("rmse", "RMSE", better="lower"), ReportedMetric("mae", "MAE", better="lower"))


class NumberTask(Task):
    """Predicts the label, any number, of each row from a model that returns a number for each row [batch].

    Args:
        subtract_mean: Whether the mean of the training labels is added to every number of the model.
        clip: The lowest and the highest number that is predicted in evaluations; None for any number.
        headline: Name of the metric by which models are compared.

    Attributes:
        mean: The number that is added; 0 until a task with ``subtract_mean`` starts.
    """

    batch_fields: ClassVar[tuple[str, ...]] = (LABELS,)
    outputs: tuple[str, ...] = ("predictions", "labels")
    prediction_columns = ("prediction", "label")

    def __init__(
        self, subtract_mean: bool = True, clip: tuple[float, float] | None = None, headline: str = "rmse"
    ) -> None:
        self.subtracts_mean, self.mean = subtract_mean, 0.0
        self._clip = clip
        self._weights = RowWeights()
        self.reported_metrics = headline_first(_METRICS, headline)

    def step(self, outputs: Any, batch: Batch) -> tuple[Tensor, Outputs]:
        predictions, labels = self._predict(outputs), batch[LABELS]
        assert isinstance(labels, Tensor)
        errors, weights = (predictions - labels).square(), self._weights.in_loss(batch)
        loss = errors.sum() if weights is None else (errors * weights).sum()
        return loss, {"predictions": predictions, "labels": labels, **self._weights.of_rows(batch)}

    def evaluate(self, outputs: Any, batch: Batch) -> Outputs:
        labels = batch[LABELS]
        assert isinstance(labels, Tensor)
        return {"predictions": self.score(outputs), "labels": labels, **self._weights.of_rows(batch)}

    def score(self, outputs: Any) -> Float[Tensor, " batch"]:
        predictions = self._predict(outputs)
        return predictions if self._clip is None else predictions.clamp(*self._clip)

    def rows_of_scores(self, scores: npt.NDArray[np.float32]) -> Rows:
        return {"predictions": scores}

    def _predict(self, outputs: Any) -> Float[Tensor, " batch"]:
        numbers: Tensor = outputs.float() + self.mean
        return numbers

    def metrics(self, rows: Rows) -> dict[str, float]:
        return {"rows": len(rows["labels"]), **total_weight(rows), **_errors(rows)}

    def training_sums(self, outputs: Outputs) -> Outputs:
        """Returns the sum of the squared errors, and the sum of the rows' weights."""
        squared = (outputs["predictions"].double() - outputs["labels"]).square()
        weights = outputs[WEIGHTS].double() if WEIGHTS in outputs else torch.ones_like(squared)
        return {"squared": torch.stack([(squared * weights).sum(), weights.sum()])}

    def training_metrics(self, sums: Sums) -> dict[str, float]:
        squared, weight = sums["squared"].tolist()
        return {"rmse": (squared / weight) ** 0.5 if weight else float("nan")}

    def predictions(self, rows: Rows) -> dict[str, npt.NDArray[np.float32]]:
        return {"prediction": rows["predictions"], "label": rows["labels"]}

    def describe(self, metrics: Mapping[str, Any]) -> str:
        return f"RMSE {metrics['rmse']:.4f}  MAE {metrics['mae']:.4f}  ({metrics['rows']:,} rows)"

    def describe_training(self, metrics: Mapping[str, Any]) -> str:
        return f"RMSE {metrics['rmse']:.4f}"


class RatingTask(NumberTask):
    """Predicts the label, any number, of each row from a model that returns queries of users with the rows' items.

    Args:
        regularization: Factor of the squares of a row's vectors in its loss.
        subtract_mean: Whether the mean of the training ratings is added to every score.
        clip: The lowest and the highest rating that is predicted in evaluations; None for any number.
        headline: Name of the metric by which models are compared.
    """

    batch_fields = (LABELS, SPARSE_FEATURES)

    def __init__(
        self,
        regularization: float = 0.0,
        subtract_mean: bool = True,
        clip: tuple[float, float] | None = None,
        headline: str = "rmse",
    ) -> None:
        super().__init__(subtract_mean, clip, headline)
        self._regularization = regularization

    def start(self, context: TaskContext) -> None:
        """Reads the mean of the training split's ratings, and whether rows have weights."""
        self._weights.start(context)
        self.outputs = (*type(self).outputs, *self._weights.outputs)
        if self.subtracts_mean:
            self.mean = Manifest.load(context.data.require_path()).splits[context.data.train].label_rate or 0.0

    def step(self, outputs: Queries, batch: Batch) -> tuple[Tensor, Outputs]:
        loss, rows = super().step(outputs, batch)
        if self._regularization:
            loss = loss + self._regularization * squares(outputs)
        return loss, rows

    def _predict(self, outputs: Queries) -> Float[Tensor, " batch"]:
        return super()._predict(outputs.scores(ITEM).flatten())


class _Squares(torch.autograd.Function):
    """Maps a tensor to the sum of its squares, with nothing of the tensor's size in between."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.save_for_backward(values)
        return torch.linalg.vector_norm(values).square()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        return cast(Tensor, ctx.saved_tensors[0] * (2 * gradients[0]))


def squares(queries: Queries) -> Tensor:
    """Returns the sum of the squares of all vectors that were looked up for a batch."""
    sums: list[Tensor] = [_Squares.apply(vectors.float()) for vectors in queries.looked_up]  # type: ignore[no-untyped-call]
    return torch.stack(sums).sum()


def _errors(rows: Rows) -> dict[str, float]:
    """Returns the root of the mean squared error and the mean absolute error; NaN where no row has a weight above 0."""
    errors, weights = rows["predictions"].astype(np.float64) - rows["labels"], weights_of(rows)
    if len(errors) == 0 or (weights is not None and not weights.any()):
        return {"rmse": float("nan"), "mae": float("nan")}
    squared, absolute = (float(np.average(row_errors, weights=weights)) for row_errors in (errors**2, np.abs(errors)))
    return {"rmse": float(np.sqrt(squared)), "mae": absolute}
