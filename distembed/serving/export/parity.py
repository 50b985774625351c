"""Whether an exported model scores as the trained one: row by row on a sample, and by the task's metric on a split."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distembed.base.errors import RunError
from distembed.data.reader import Batch
from distembed.serving.export.batches import SplitRows, made_up_batch
from distembed.serving.export.score_program import ScoredModel
from distembed.serving.model_folder.manifest import Parity, Precision
from distembed.serving.model_folder.programs import Program
from distembed.serving.whole_model import WholeModel

MOST_DIFFERENCE = 1e-6
"""Largest difference of a score from the trainer's where tables are in fp32, or of it relative to scores above 1."""
MOST_METRIC_DIFFERENCE = 5e-4
"""Largest difference of the headline metric, such as AUC."""
_BATCH_SIZE = 8192

Scores = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class ParityCheck:
    """Compares an exported model with the trained one.

    Attributes:
        whole: The trained model, in float32.
        model: The same as programs are made of it.
        program: Inputs -> scores, as whoever serves the exported model computes them.
        precision: How its tables are stored.
    """

    whole: WholeModel
    model: ScoredModel
    program: Program
    precision: Precision

    def sample(self, rows: SplitRows | None, num_rows: int) -> Batch:
        """Returns a batch of the first rows, or of made-up ones where there are none."""
        if rows is None:
            return made_up_batch(self.whole.blueprint.batch_schema, num_rows)
        return next(iter(rows.batches(num_rows, num_rows)))

    def outputs(self, batch: Batch) -> Mapping[str, Sequence[Any]]:
        """Returns the exported model's scores of a batch in plain values, by the name of the output."""
        return {"prediction": self.scores(batch).tolist()}

    def scores(self, batch: Batch) -> NDArray[np.float32]:
        """Returns the exported model's scores of a batch."""
        with torch.inference_mode():
            found: NDArray[np.float32] = self.program(*self.model.inputs(batch).tensors.values()).numpy()
        return found

    def trained_scores(self, batch: Batch) -> NDArray[np.float32]:
        """Returns the trained model's scores of a batch."""
        found: NDArray[np.float32] = self.whole.task.predictions(self.whole.outputs(batch))["prediction"]
        return found

    def on_sample(self, batch: Batch) -> Parity:
        """Compares the scores of a batch.

        Raises:
            RunError: They differ by more than rounding does, or are no numbers.
        """
        found, trained = self.scores(batch), self.trained_scores(batch)
        if not np.isfinite(found).all():
            raise RunError(
                f"{np.count_nonzero(~np.isfinite(found))} of {len(found)} scores of the exported model are no numbers: "
                f"the tables have values that {self.precision} does not hold; choose --precision fp32."
            )
        scale = np.maximum(1, np.abs(trained))
        relative, absolute = np.abs(found - trained) / scale, np.abs(found - trained)
        if self.precision == "fp32" and relative.size and relative.max() > MOST_DIFFERENCE:
            row = int(relative.argmax())
            raise RunError(
                f"the exported model scores otherwise than the trained one: row {row} of the sample {found[row]:.8g} "
                f"in place of {trained[row]:.8g}, and at most {MOST_DIFFERENCE:g} is rounding. Nothing was written; "
                "please report this with the run's config."
            )
        return Parity(len(found), float(absolute.max()) if absolute.size else 0.0)

    def on_split(self, rows: SplitRows, most_rows: int) -> tuple[str, float, float]:
        """Returns the name of the task's headline metric, and its values for the exported and the trained model.

        Args:
            rows: The rows to compare on.
            most_rows: So many of the first are.

        Raises:
            RunError: The values differ by more than :data:`MOST_METRIC_DIFFERENCE`.
        """
        whole = self.whole.on_dataset(rows.dataset)
        trained, exported = _Rows(), _Rows()
        for batch in rows.batches(_BATCH_SIZE, most_rows):
            outputs = whole.outputs(whole.task.prepare_batch(batch, None))
            trained.add(outputs)
            exported.add({**outputs, **whole.task.rows_of_scores(self.scores(batch))})
        headline = whole.task.headline.name
        found, wanted = (float(whole.task.metrics(rows.joined())[headline]) for rows in (exported, trained))
        require_close_metric(whole.task.headline.heading, rows.split, (found, wanted), self.precision)
        return headline, found, wanted


def require_close_metric(heading: str, split: str, values: tuple[float, float], precision: Precision) -> None:
    """Makes sure that a metric of the exported and of the trained model is about the same.

    Raises:
        RunError: The values differ by more than :data:`MOST_METRIC_DIFFERENCE`.
    """
    found, wanted = values
    is_undefined = math.isnan(found) and math.isnan(wanted)  # such as the AUC of one class
    if not (is_undefined or abs(found - wanted) <= MOST_METRIC_DIFFERENCE):
        raise RunError(
            f"the exported model's {heading} on {split} is {found:.6f}, and the trained one's {wanted:.6f}: more than "
            f"{MOST_METRIC_DIFFERENCE} apart, so that nothing was written. Choose another --precision than {precision}."
        )


@dataclass
class _Rows:
    """The outputs of batches, by name."""

    parts: list[Scores] = field(default_factory=list)

    def add(self, outputs: Scores) -> None:
        self.parts.append(outputs)

    def joined(self) -> dict[str, NDArray[Any]]:
        return {name: np.concatenate([part[name] for part in self.parts]) for name in self.parts[0]}
