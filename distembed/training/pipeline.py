"""Reads a run's training rows, and steps a model with its task through them by a TorchRec pipeline.

The pipeline overlaps the ids' all-to-all with the previous step.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from torchrec.distributed.train_pipeline.pipeline_context import TrainPipelineContext
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan
from torchrec.optim.keyed import KeyedOptimizer

from distembed.base.errors import RunError
from distembed.base.ranks import Collectives, Ranks
from distembed.data.dataset.row_groups import too_many_unreadable
from distembed.data.reader import Batch, BatchOrder, BatchReader, Decoding
from distembed.data.reader.age import AgeWeights
from distembed.data.stream.reader import StreamReader
from distembed.models import Model
from distembed.planning.request import overlaps
from distembed.sharding.lookup import sharded_lookups
from distembed.tasks import Task
from distembed.tasks.base import BatchPosition, Outputs
from distembed.training.config import Config

StepOutput = tuple[Tensor, Outputs]
"""This rank's share of the mean loss times the number of ranks, and its task's outputs for metrics."""


class TaskModel(nn.Module):
    """A model with its task: maps a batch to its loss and step output, with the networks in bf16 where asked.

    A rank's loss is the sum over its own rows times ``world_size / global_batch_size``: the gradients' mean over ranks
    is then that of the whole batch, also when ranks hold unequally many rows.
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
    """

    def __init__(self, task: Task) -> None:
        super().__init__()
        self._task = task
        self.perturbations = task.perturbations  # registered, so that set_step and take_counts find them

    def forward(self, outputs: Any, batch: Batch) -> tuple[Tensor, Outputs]:
        if self.training:
            total, rows = self._task.step(outputs, batch)
        else:
            total, rows = torch.zeros(()), self._task.evaluate(outputs, batch)
        return total, {name: values.detach() for name, values in rows.items()}


class StepPipeline:
    """Steps a model through batches; prepares batches ahead where a copy to a GPU or a collective can overlap a step.

    Rows of tables in host memory are also fetched into the device's cache a step ahead.

    Args:
        model: A :class:`TaskModel`, sharded.
        optimizer: The optimizer of all parameters of the model.
        ranks: This rank among all.
    """

    def __init__(self, model: DistributedModelParallel, optimizer: KeyedOptimizer, ranks: Ranks) -> None:
        works_ahead = overlaps(ranks.device.type, ranks.world_size)
        self._prefetches = works_ahead and _caches_rows(model.plan)
        self._pipeline = _make_pipeline(works_ahead, self._prefetches)(model, optimizer, ranks.device)
        self._restarts = not works_ahead
        self._model = model

    def outputs(self, batches: Iterator[Batch]) -> Iterator[StepOutput]:
        """Steps through all batches and yields each step's outputs; all ranks call it.

        A model in training mode has its weights updated.
        """
        while True:
            try:
                output = self._pipeline.progress(batches)
            except StopIteration:
                break
            yield output
        # TorchRec's basic pipeline remembers that an iterator was exhausted until it is reset
        if self._restarts:
            self._pipeline.reset()
        if self._prefetches:
            _unlock_caches(self._model)


class _KeepsNothing(dict[str, Any]):
    """A dictionary that drops each value at once."""

    def __setitem__(self, key: str, value: Any) -> None:
        pass


class _Context(TrainPipelineContext):
    """TorchRec's context without a batch's vectors, which TorchRec 1.6 keeps for the whole step and never reads."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.output_dist_embeddings_requests = _KeepsNothing()


def _make_pipeline(works_ahead: bool, caches_rows: bool) -> Callable[..., TrainPipelineBase[Any, Any]]:
    if not works_ahead:
        return TrainPipelineBase
    return PrefetchTrainPipelineSparseDist if caches_rows else partial(TrainPipelineSparseDist, context_type=_Context)


def _unlock_caches(model: nn.Module) -> None:
    """Unlocks all rows in the devices' caches of tables, so that other rows may replace them; no batch is in progress.

    FBGEMM locks the rows of a batch in the cache until its backward pass. An evaluation has no backward pass: without
    this call, its rows would stay locked until the cache is full of them.
    """
    for lookup in sharded_lookups(model):
        for module in lookup.modules():
            locks = getattr(module, "lxu_cache_locking_counter", None)
            if isinstance(locks, Tensor) and locks.numel():
                locks.zero_()
                if locks.device.type == "cuda":  # another stream may fetch rows next
                    torch.cuda.current_stream(locks.device).synchronize()


def _caches_rows(plan: ShardingPlan) -> bool:
    """Returns whether a table lies in host memory and is read through a cache on the device."""
    kernels = {
        table.compute_kernel
        for module in plan.plan.values()
        if isinstance(module, EmbeddingModuleShardingPlan)
        for table in module.values()
    }
    return EmbeddingComputeKernel.FUSED_UVM_CACHING.value in kernels


def prepared_batch(task: Task, batch: Batch, position: BatchPosition | None, device: torch.device) -> Batch:
    """Returns a batch with the task's additions, in page-locked memory where a GPU will copy it.

    ``position`` is None for an evaluation; ``device`` is the one on which the model computes.
    """
    prepared = task.prepare_batch(batch, position)
    return prepared.pin_memory() if device.type == "cuda" else prepared


def training_reader(config: Config, ranks: Ranks, run: Path) -> BatchReader | StreamReader:
    """Returns a reader of this rank's rows of the training split, at its beginning, or of the stream in place of it.

    ``run`` is the run's folder. All ranks call it.
    """
    if config.data.stream is not None:
        return StreamReader(config.data, config.train.batch_size, run)
    data, half_life = config.data, config.train.half_life_days
    if half_life is None:
        return split_reader(config, ranks)

    def ages() -> AgeWeights:
        return AgeWeights.of_split(data.require_path(), data.train, half_life, data.skip_unreadable)

    # a group of its own: rank 0 reads the whole split, which may take longer than the default timeout
    return split_reader(config, ranks, Collectives.in_own_group().on_first(ages))


def split_reader(
    config: Config, ranks: Ranks, ages: AgeWeights | None = None, prefetch_batches: int = 4
) -> BatchReader:
    """Returns a reader of the split; with ``prefetch_batches=0`` nothing is made or decoded ahead."""
    return BatchReader(
        config.data.require_path(),
        config.data.train,
        BatchOrder(config.train.batch_size, seed=config.train.seed),
        rank=ranks.rank,
        world_size=ranks.world_size,
        prefetch_batches=prefetch_batches,
        decoding=Decoding(
            config.data.threads_of_rank(ranks.local_world_size) if prefetch_batches else 0,
            config.data.skip_unreadable,
            pins=ranks.device.type == "cuda",
            ages=ages,
        ),
    )


def gather_unreadable(
    known: Mapping[str, str], reader: BatchReader, most: int, say: Callable[[str], None]
) -> dict[str, str]:
    """Returns the reason for each row group that some rank could not read, by name; all ranks call it.

    Adds the ranks' new row groups to ``known``, and prints them by ``say``.

    Raises:
        UserError: There are more than ``most``; raised on every rank.
    """
    unreadable = dict(known)
    for rank_unreadable in Collectives().gather(reader.unreadable):
        unreadable |= rank_unreadable
    if len(unreadable) > most:
        raise too_many_unreadable(unreadable, most)
    for name in sorted(unreadable.keys() - known.keys()):
        say(f"warning: rows of others take the place of those of {name}: {unreadable[name]}")
    return unreadable


def keep_batch(config: Config, ranks: Ranks, folder: Path, step: int, loss: float, ages: AgeWeights | None) -> RunError:
    """Writes this rank's rows of a step to a file in the run's folder, and returns the error, which names the file.

    Rows of a stream are not written. The first step of a run is 1. ``ages`` are the training reader's ages.
    """
    place, rows = f"step {step}", "Look"
    if config.data.stream is None:
        reader = split_reader(config, ranks, ages, prefetch_batches=0)
        epoch, batch = divmod(step - 1, reader.batches_per_epoch)
        path = folder / f"not-finite-step-{step}-rank-{ranks.rank}.npz"
        reader.load_state_dict({**reader.state_dict(), "epoch": epoch, "batch": batch})
        next(iter(reader)).write(path)
        place, rows = (
            f"{place} (epoch {epoch}, batch {batch}, rank {ranks.rank})",
            f"This rank's rows of that batch are in {path}; look",
        )
    return RunError(
        f"The loss is {loss} at {place}. {rows} for extreme values among the dense features. "
        "Checkpoints are from before it. Try lower train.dense_optimizer.learning_rate and "
        "train.sparse_optimizer.learning_rate, a warm-up (train.dense_optimizer.schedule.warmup=0.1), "
        "or train.precision=fp32."
    )
