"""The weights of rows in a loss and in metrics, of datasets that have them in a column (``Schema.weight``).

The loss of a step is the sum of ``w_i l_i / m`` over the rows of the global batch, divided by their number, where m is
the mean weight of the training split's rows. Its gradient is an unbiased estimate of the gradient of the weighted mean
over the split. Dividing by the batch's own weights would count a row more where the rest of its batch weighs little.
Since m is a constant of the dataset, no rank needs the weights of another, and a common factor of all weights changes
nothing. In metrics a row counts as w_i equal rows.
"""

import numpy as np
from torch import Tensor

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.schema import WEIGHTS
from distembed.data.reader.batch import Batch
from distembed.tasks.base import Outputs, Rows, TaskContext
from distembed.tasks.binary_metrics import Floats


class RowWeights:
    """The weights of a task's rows; all weigh 1 until a task starts with a dataset that has weights."""

    def __init__(self) -> None:
        self._context: TaskContext | None = None
        self._known_mean: float | None = None

    def start(self, context: TaskContext) -> None:
        """Stores the context, whose training split gives the mean weight, and forgets an earlier mean."""
        self._context, self._known_mean = context, None

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the outputs that :meth:`of_rows` returns of the dataset's batches."""
        return (WEIGHTS,) if self._context is not None and self._context.schema.weight is not None else ()

    def _mean(self) -> float:
        """The mean weight of the training split, which is read when a step first needs it."""
        # not started: in an estimate of a step, and for one of several labels, whose weights are divided; a dataset
        # without weights: in training by age, whose weights have the mean 1
        if self._context is None or self._context.schema.weight is None:
            return 1.0
        if self._known_mean is not None:
            return self._known_mean
        data = self._context.data
        mean = Manifest.load(data.require_path()).splits[data.train].mean_weight
        if not mean:
            fault = "are all 0" if mean == 0.0 else "have no known mean"
            raise UserError(
                f"data.train is {data.train!r}, whose weights {fault} in the dataset {data.path}; prepare the data "
                "again, with rows that have weights above 0."
            )
        self._known_mean = mean
        return mean

    def in_loss(self, batch: Batch) -> Tensor | None:
        """Returns the factor of each row's loss [batch]; None where rows have no weights.

        Raises:
            UserError: The mean weight of the training split is not known, or is 0.
        """
        if WEIGHTS not in batch:
            return None
        weights = batch[WEIGHTS]
        assert isinstance(weights, Tensor)
        return weights / self._mean()

    @staticmethod
    def of_rows(batch: Batch) -> Outputs:
        """Returns the weights as an output of the task's rows; nothing where they have none."""
        if WEIGHTS not in batch:
            return {}
        weights = batch[WEIGHTS]
        assert isinstance(weights, Tensor)
        return {WEIGHTS: weights}


def weights_of(rows: Rows) -> Floats | None:
    """Returns the weights of gathered rows [N]; None where they have none."""
    return rows.get(WEIGHTS)


def total_weight(rows: Rows) -> dict[str, float]:
    """Returns the metric ``weight``, the sum of the rows' weights; nothing where they have none."""
    weights = weights_of(rows)
    return {} if weights is None else {"weight": float(weights.sum(dtype=np.float64))}
