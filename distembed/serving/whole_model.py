"""A run's model whole on one device, without a process group, TorchRec's sharding or optimizers.

It gives the outputs of the sharded model. The unsharded collections look tables up and compose them; the sharded ones
are tested against them. Pooled sums of several ids may differ in the last bits, since FBGEMM adds in another order.

Trade-off: a model has to fit on one device; ``distembed predict`` spreads larger ones over ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import nn

from distembed.base.ranks import Collectives, Ranks
from distembed.checkpoints import load_checkpoint
from distembed.data.dataset.kept import kept_dataset
from distembed.data.reader.batch import Batch
from distembed.tasks import Task
from distembed.training.build import Blueprint
from distembed.training.config import Config
from distembed.training.inference import read_newest
from distembed.training.pipeline import TaskModel
from distembed.training.trained_run import TrainedRun


@dataclass(frozen=True)
class WholeModel:
    """A model with its task, ready to score batches; any number of threads may use it.

    The module is in evaluation mode, with the weights of ``checkpoint``, written after ``step`` steps. The task is
    started on a dataset, or on the run's copy of the dataset's vocabularies and statistics.
    """

    blueprint: Blueprint
    module: TaskModel
    task: Task
    checkpoint: str
    step: int

    @property
    def ranks(self) -> Ranks:
        """This process as the only rank."""
        return Ranks(0, 1, 1, self.blueprint.device)

    def outputs(self, batch: Batch) -> dict[str, npt.NDArray[Any]]:
        """Returns the outputs, by name, for a batch that the task has prepared."""
        with torch.inference_mode():
            _, (_, outputs) = self.module(batch.to(self.blueprint.device))
            return {name: values.cpu().numpy() for name, values in outputs.items()}

    def model_outputs(self, batch: Batch) -> Any:
        """Returns the model's outputs for a batch that the task has prepared, before the task scores them."""
        batch, blueprint = batch.to(self.blueprint.device), self.blueprint
        with (
            torch.inference_mode(),
            torch.autocast(blueprint.device.type, dtype=torch.bfloat16, enabled=blueprint.bf16),
        ):
            return self.module.model(*[batch[name] for name in self.module.model.batch_fields])

    def show_catalogue(self, batch_size: int) -> None:
        """Shows the model the items of the task's catalogue, whose vectors the task stores to rank them."""
        for batch in self.task.catalogue_batches(batch_size):
            self.outputs(batch)

    def on_dataset(self, dataset: str) -> WholeModel:
        """Returns a model that shares this one's weights, with a new task that is started on another dataset."""
        blueprint = dataclasses.replace(self.blueprint)  # a new blueprint makes a new task: this model's stays as it is
        module = _task_model(blueprint, self.module.model)
        blueprint.task.start(blueprint.task_context(dataset, self.ranks))
        return dataclasses.replace(self, blueprint=blueprint, module=module, task=blueprint.task)


def load_whole_model(
    run: TrainedRun, device: torch.device, checkpoint: str | None = None, maps_weights: bool = False
) -> WholeModel:
    """Builds a run's model on one device and reads its weights, without initialising them first.

    ``checkpoint`` is a path or URL; unless given, the best where the run keeps it, else its newest. For
    ``maps_weights`` see :func:`~distembed.checkpoints.checkpoint.load_checkpoint`.
    """
    ranks = Ranks(0, 1, 1, device)
    blueprint = Blueprint.for_ranks(_on_kept_dataset(run), run.manifest.schema, ranks, {})
    # building initialises networks with random numbers, which must not change the caller's random state
    with torch.random.fork_rng(devices=[]):
        module = _task_model(blueprint, blueprint.build_unsharded())
    _allocate(module, device)
    task = blueprint.task
    task.start(blueprint.task_context(run.dataset, ranks))

    def load(path: str) -> tuple[str, Mapping[str, Any]]:
        return path, load_checkpoint(path, module, collectives=Collectives.alone(), maps_weights=maps_weights)

    if checkpoint is not None:
        path_read, progress = load(checkpoint)
    else:
        path_read, progress = read_newest(run.folder, run.config, load, Collectives.alone(), run.checkpoint_choice)
    return WholeModel(blueprint, module, task, path_read, int(progress.get("step", 0)))


def _on_kept_dataset(run: TrainedRun) -> Config:
    """Returns the run's config with its ``data.path`` set to the run's copy of the dataset's parts, if it has one."""
    copied_folder = kept_dataset(run.folder)
    data = run.config.data if copied_folder is None else dataclasses.replace(run.config.data, path=str(copied_folder))
    return dataclasses.replace(run.config, data=data)


def _task_model(blueprint: Blueprint, model: Any) -> TaskModel:
    return TaskModel(model, blueprint.task, 1, blueprint.device, blueprint.bf16).eval()


def _allocate(module: nn.Module, device: torch.device) -> None:
    """Moves a module to its device, in place, without gradients; weights on the meta device become uninitialised."""
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            memory = torch.empty_like(parameter, device=device) if parameter.is_meta else parameter.detach().to(device)
            setattr(child, name, nn.Parameter(memory, requires_grad=False))
    module.to(device)
