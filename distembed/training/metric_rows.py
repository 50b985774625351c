"""Collects the outputs of an evaluation that a task's metrics take, batch after batch, and gathers them from all ranks.

Outputs for predictions alone, such as scores of recommended items, are dropped. Of an output whose distinct ids are
enough, such as recommended items for the coverage, each rank stores one boolean for each id, for any number of
rows; rank 0 gets the union.
"""

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from distembed.base.ranks import Ranks
from distembed.tasks import Task
from distembed.tasks.base import Rows


class MetricRows:
    """The outputs of this rank's rows that :meth:`distembed.tasks.Task.metrics` takes.

    Args:
        task: The task, started.
    """

    def __init__(self, task: Task) -> None:
        left_out = {*task.prediction_outputs, *task.distinct_outputs}
        self._parts: dict[str, list[Tensor]] = {name: [] for name in task.outputs if name not in left_out}
        self._occurs = {name: torch.zeros(num_ids, dtype=torch.bool) for name, num_ids in task.distinct_outputs.items()}

    def add(self, outputs: Mapping[str, Tensor | npt.NDArray[Any]]) -> None:
        """Adds the task's outputs for a batch, by name, on the CPU."""
        for name, parts in self._parts.items():
            parts.append(torch.as_tensor(outputs[name]))
        for name, occurs in self._occurs.items():
            ids = torch.as_tensor(outputs[name])
            occurs[ids[ids >= 0]] = True

    def gathered(self, ranks: Ranks) -> Rows:
        """Returns, on rank 0, the outputs of all ranks' rows in rank order, and distinct ids in ascending order.

        Other ranks get the same names without rows. All ranks call it.
        """
        # ranks have equally many batches, some maybe empty: without any batch, no rank has tensors to concatenate
        rows = {name: torch.cat(parts) if parts else torch.empty(0) for name, parts in self._parts.items()}
        gathered = {name: ranks.gather_rows(values) for name, values in rows.items()}
        return gathered | {name: ranks.any_set(occurs).nonzero()[0] for name, occurs in self._occurs.items()}
