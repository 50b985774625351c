"""A model with its task as one module, which TorchRec shards, plans and steps."""

from typing import Any

import torch
from torch import Tensor, nn

from distembed.data.reader.batch import Batch
from distembed.models import Model
from distembed.tasks import Task
from distembed.tasks.base import Outputs

StepOutput = tuple[Tensor, Outputs]
"""This rank's share of the mean loss times the number of ranks, and what metrics need of its rows."""


class TaskModel(nn.Module):
    """A model with its task: maps a batch to its loss and step output, with the networks in bf16 where asked.

    A rank's loss is the sum over its own rows times ``world_size / global_batch_size``: the gradients' mean over ranks
    is then that of the whole batch, also when ranks hold unequally many rows.

    Args:
        model: A model, as :mod:`distembed.models.base` describes it.
        task: The task that the model learns.
        world_size: Number of ranks.
        device: The device of this rank.
        bf16: Whether the model computes under autocast in bfloat16.
    """

    def __init__(self, model: Model, task: Task, world_size: int, device: torch.device, bf16: bool) -> None:
        super().__init__()
        self.model = model
        self.task = task
        self._task_step = _TaskStep(task)
        self._world_size = world_size
        self._device_type = device.type
        self._bf16 = bf16

    def forward(self, batch: Batch) -> tuple[Tensor, StepOutput]:
        """Returns the loss of this rank's rows, to go backward from, and the step output without gradients."""
        with torch.autocast(self._device_type, dtype=torch.bfloat16, enabled=self._bf16):
            outputs = self.model(*[batch[name] for name in self.model.batch_fields])
        total, rows = self._task_step(outputs, batch)
        loss = total * (self._world_size / batch.global_batch_size)
        return loss, (loss.detach(), rows)


class _TaskStep(nn.Module):
    """Calls a task: for its loss and outputs in training, for its outputs in evaluation.

    It is a module, since TorchRec's pipeline traces down to modules that hold no tables: a task sees real values.

    Args:
        task: The task that the model learns.
    """

    def __init__(self, task: Task) -> None:
        super().__init__()
        self._task = task
        self.perturbations = task.perturbations  # which are counted, and follow the step, as all of a model's are

    def forward(self, outputs: Any, batch: Batch) -> tuple[Tensor, Outputs]:
        if self.training:
            total, rows = self._task.step(outputs, batch)
        else:
            total, rows = torch.zeros(()), self._task.evaluate(outputs, batch)
        return total, {name: values.detach() for name, values in rows.items()}
