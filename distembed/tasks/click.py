"""Whether a row is clicked: binary cross-entropy of a logit, and the metrics of a binary classifier.

Rows may have weights in the loss and the metrics; see ``row_weights.py``. With a group, for example the user,
evaluations also tell how well each group's rows are ordered (GAUC). A training step does not: its ids
may have been replaced (SSE), and it has too few rows of any group. The AUC of training steps is binned, that of
evaluations exact.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.schema import LABELS, SPARSE_FEATURES, WEIGHTS
from distembed.data.reader.batch import Batch
from distembed.data.table.vocabulary import reserved_ids
from distembed.tasks.base import BatchPosition, Outputs, Rows, Sums, Task, TaskContext
from distembed.tasks.binary_metrics import (
    BinaryMetrics,
    bin_counts,
    binary_entropy,
    binned_auc,
    calibration_bins,
    grouped_auc,
    sigmoid,
)
from distembed.tasks.click_config import ClickConfig
from distembed.tasks.reported_metrics import CLICK_METRICS, GROUPED_METRICS, headline_first
from distembed.tasks.row_weights import RowWeights, total_weight, weights_of

GROUPS = "groups"
"""Name of the output that has the id of each row's group."""


class ClickTask(Task):
    """Predicts the label, 0 or 1, of each row from a model that returns logits [batch]."""

    batch_fields = (LABELS,)
    outputs: tuple[str, ...] = ("logits", "labels")
    prediction_columns = ("prediction", "label")

    def __init__(self, config: ClickConfig | None = None) -> None:
        config = config or ClickConfig()
        self._config, self._group = config, config.group
        self._weights = RowWeights()
        self._no_groups: tuple[int, ...] = ()
        auc, *other_metrics = CLICK_METRICS
        reported = CLICK_METRICS if config.group is None else (auc, *GROUPED_METRICS, *other_metrics)
        self.reported_metrics = headline_first(reported, config.headline)

    def start(self, context: TaskContext) -> None:
        """Stores whether rows have weights, and the reserved ids of the group; adds weights and groups to ``outputs``.

        Raises:
            UserError: The dataset cannot be read.
        """
        self._weights.start(context)
        self.outputs = (*type(self).outputs, *self._weights.outputs)
        if self._group is not None:
            self.outputs = (*self.outputs, GROUPS)
            self._no_groups = reserved_ids(Manifest.load(context.dataset), self._group)

    def prepare_batch(self, batch: Batch, position: BatchPosition | None) -> Batch:
        labels = batch[LABELS]
        assert isinstance(labels, Tensor)
        self._config.check_labels(labels.cpu().numpy(), "a batch of rows")
        return batch

    def step(self, outputs: Float[Tensor, " batch"], batch: Batch) -> tuple[Tensor, Outputs]:
        logits, labels = outputs.float(), batch[LABELS]
        assert isinstance(labels, Tensor)
        config, weights = self._config, self._weights.in_loss(batch)
        smoothing = config.label_smoothing
        targets = labels * (1 - smoothing) + smoothing / 2 if smoothing > 0 else labels
        if config.positive_weight != 1:
            by_class = torch.where(labels == 1, config.positive_weight, 1.0)
            weights = by_class if weights is None else weights * by_class
        cross_entropy = nn.functional.binary_cross_entropy_with_logits
        if config.focal_gamma == 0:
            loss = cross_entropy(logits, targets, weight=weights, reduction="sum")
        else:
            # of p, the probability of the row's label, log(1 - p) is log sigmoid of the logit for the other label
            log_other = nn.functional.logsigmoid(torch.where(labels == 1, -logits, logits))
            focus = (config.focal_gamma * log_other).exp()
            loss = (cross_entropy(logits, targets, weight=weights, reduction="none") * focus).sum()
        return loss, {"logits": logits, "labels": labels, **self._weights.of_rows(batch)}

    def evaluate(self, outputs: Float[Tensor, " batch"], batch: Batch) -> Outputs:
        rows = {"logits": outputs.float(), "labels": batch[LABELS], **self._weights.of_rows(batch)}
        if self._group is None:
            return rows
        features = batch[SPARSE_FEATURES]
        assert isinstance(features, KeyedJaggedTensor)
        return {**rows, GROUPS: features[self._group].values()}

    def score(self, outputs: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
        return outputs.float().sigmoid()

    def rows_of_scores(self, scores: npt.NDArray[np.float32]) -> Rows:
        inside = np.clip(scores.astype(np.float64), 2.0**-100, 1 - 2.0**-25)  # of 0 and 1 logits are infinite
        return {"logits": np.log(inside) - np.log1p(-inside)}

    def metrics(self, rows: Rows) -> dict[str, float]:
        weights = weights_of(rows)
        metrics = dataclasses.asdict(BinaryMetrics.from_logits(rows["logits"], rows["labels"], weights))
        metrics |= total_weight(rows)
        if GROUPS not in rows:
            return metrics
        # a reserved id, of missing or unknown values, stands for no single group: its rows are left out of the GAUC
        is_grouped = ~np.isin(rows[GROUPS], self._no_groups)
        grouped_weights = None if weights is None else weights[is_grouped]
        logits, labels, groups = (rows[name][is_grouped] for name in ("logits", "labels", GROUPS))
        grouped = grouped_auc(logits, labels, groups, grouped_weights)
        return metrics | {"gauc": grouped.value, "gauc_groups": grouped.num_groups, "gauc_rows": grouped.num_rows}

    def training_sums(self, outputs: Outputs) -> Outputs:
        weights = outputs.get(WEIGHTS)
        logits, labels = outputs["logits"].double(), outputs["labels"]
        losses = nn.functional.binary_cross_entropy_with_logits(logits, labels.double(), reduction="none")
        numbers = torch.stack([losses, logits.sigmoid()])
        totals = (numbers if weights is None else numbers * weights.double()).sum(dim=1)
        return {"bins": bin_counts(outputs["logits"], labels, weights), "losses": totals}

    def training_metrics(self, sums: Sums) -> dict[str, float]:
        (loss, predicted), (_, positive) = sums["losses"].tolist(), sums["bins"].sum(axis=1).tolist()
        total = float(sums["bins"].sum())
        if total == 0:
            return dict.fromkeys(("auc", "logloss", "normalized_entropy", "calibration"), math.nan)
        entropy = binary_entropy(positive / total)
        return {
            "auc": binned_auc(sums["bins"]),
            "logloss": loss / total,
            "normalized_entropy": loss / total / entropy if entropy > 0 else math.nan,
            "calibration": predicted / positive if positive else math.nan,
        }

    def predictions(self, rows: Rows) -> dict[str, npt.NDArray[np.float32]]:
        return {"prediction": sigmoid(rows["logits"]).astype(np.float32), "label": rows["labels"]}

    def details(self, rows: Rows) -> dict[str, Any]:
        return {"calibration_bins": calibration_bins(rows["logits"], rows["labels"], weights_of(rows))}

    def describe(self, metrics: Mapping[str, Any]) -> str:
        grouped = f"GAUC {metrics['gauc']:.4f} of {metrics['gauc_groups']:,} groups  " if "gauc" in metrics else ""
        return (
            f"logloss {metrics['logloss']:.4f}  AUC {metrics['auc']:.4f}  {grouped}"
            f"normalised entropy {metrics['normalized_entropy']:.4f}  calibration {metrics['calibration']:.4f}  "
            f"accuracy {metrics['accuracy']:.4f}  ({metrics['rows']:,} rows)"
        )

    def describe_training(self, metrics: Mapping[str, Any]) -> str:
        return f"AUC {metrics['auc']:.4f}"
