"""The TorchRec pipeline around a task's model, which overlaps the ids' all-to-all with the step before."""

from collections.abc import Callable, Iterator
from functools import partial
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

from distembed.base.ranks import Ranks
from distembed.data.reader.batch import Batch
from distembed.planning.workload import overlaps
from distembed.sharding.lookup import sharded_lookups
from distembed.training.task_model import StepOutput


class StepPipeline:
    """Steps a model through batches; works ahead of the step where there is a transfer or an exchange to overlap.

    Where tables lie in host memory, their rows are brought into the device's cache a step ahead too.

    Args:
        model: A :class:`distembed.training.task_model.TaskModel`, sharded.
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
        """Steps through all batches and yields what each step returns; all ranks call it.

        A model in training mode has its weights updated.
        """
        while True:
            try:
                output = self._pipeline.progress(batches)
            except StopIteration:
                break
            yield output
        if self._restarts:
            self._pipeline.reset()
        if self._prefetches:
            _unlock_caches(self._model)


class _KeepsNothing(dict[str, Any]):
    """A dictionary that what is put into is gone from."""

    def __setitem__(self, key: str, value: Any) -> None:
        pass


class _Context(TrainPipelineContext):
    """TorchRec's, without the vectors of a batch, which TorchRec 1.6 keeps for the whole step and reads nowhere."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.output_dist_embeddings_requests = _KeepsNothing()


def _make_pipeline(works_ahead: bool, caches_rows: bool) -> Callable[..., TrainPipelineBase[Any, Any]]:
    if not works_ahead:
        return TrainPipelineBase
    return PrefetchTrainPipelineSparseDist if caches_rows else partial(TrainPipelineSparseDist, context_type=_Context)


def _unlock_caches(model: nn.Module) -> None:
    """Lets all rows in the caches of devices be replaced again; no batch may be under way.

    FBGEMM keeps the rows of a batch in the cache until its backward pass. An evaluation has none: the rows of its
    batches would stay for good, until nothing else fitted in.
    """
    for lookup in sharded_lookups(model):
        for module in lookup.modules():
            locks = getattr(module, "lxu_cache_locking_counter", None)
            if isinstance(locks, Tensor) and locks.numel():
                locks.zero_()
                if locks.device.type == "cuda":  # before another stream fetches rows
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
