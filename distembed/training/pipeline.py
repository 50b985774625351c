"""The TorchRec pipeline around a task's model, which overlaps the ids' all-to-all with the step before."""

from collections.abc import Iterator

from torch import nn
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.optim.keyed import KeyedOptimizer

from distembed.data.reader.batch import Batch
from distembed.planning.workload import overlaps
from distembed.ranks import Ranks
from distembed.training.task_model import StepOutput


class StepPipeline:
    """Steps a model through batches; works ahead of the step where there is a transfer or an exchange to overlap.

    Args:
        model: A :class:`distembed.training.task_model.TaskModel` under ``DistributedModelParallel``.
        optimizer: The optimizer of all parameters of the model.
        ranks: This rank among all.
    """

    def __init__(self, model: nn.Module, optimizer: KeyedOptimizer, ranks: Ranks) -> None:
        works_ahead = overlaps(ranks.device.type, ranks.world_size)
        pipeline = TrainPipelineSparseDist if works_ahead else TrainPipelineBase
        self._pipeline = pipeline(model, optimizer, ranks.device)
        self._restarts = not works_ahead

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
