"""Whether a row is clicked: binary cross-entropy of a logit, and the metrics of a binary classifier."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from jaxtyping import Float
from torch import Tensor, nn

from distembed.data.dataset.schema import LABELS
from distembed.data.reader.batch import Batch
from distembed.runs.metrics import CLICK_METRICS
from distembed.tasks.base import Outputs, Rows, Task
from distembed.tasks.binary_metrics import BinaryMetrics, calibration_bins, exact_auc, sigmoid


class ClickTask(Task):
    """Predicts the label, 0 or 1, of each row from a model that returns logits [batch]."""

    batch_fields = (LABELS,)
    outputs = ("logits", "labels")
    reported_metrics = CLICK_METRICS
    prediction_columns = ("prediction", "label")

    def step(self, outputs: Float[Tensor, " batch"], batch: Batch) -> tuple[Tensor, Outputs]:
        logits, labels = outputs.float(), batch[LABELS]
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        return loss, {"logits": logits, "labels": labels}

    def metrics(self, rows: Rows) -> dict[str, float]:
        return dataclasses.asdict(BinaryMetrics.from_logits(rows["logits"], rows["labels"]))

    def training_metrics(self, rows: Rows) -> dict[str, float]:
        return {"auc": exact_auc(rows["logits"], rows["labels"])}

    def predictions(self, rows: Rows) -> dict[str, npt.NDArray[np.float32]]:
        return {"prediction": sigmoid(rows["logits"]).astype(np.float32), "label": rows["labels"]}

    def details(self, rows: Rows) -> dict[str, Any]:
        return {"calibration_bins": calibration_bins(rows["logits"], rows["labels"])}

    def describe(self, metrics: Mapping[str, Any]) -> str:
        return (
            f"logloss {metrics['logloss']:.4f}  AUC {metrics['auc']:.4f}  "
            f"normalised entropy {metrics['normalized_entropy']:.4f}  calibration {metrics['calibration']:.4f}  "
            f"accuracy {metrics['accuracy']:.4f}  ({metrics['rows']:,} rows)"
        )

    def describe_training(self, metrics: Mapping[str, Any]) -> str:
        return f"AUC {metrics['auc']:.4f}"
