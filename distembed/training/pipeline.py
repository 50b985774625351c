"""The TorchRec pipeline around a task, which overlaps the ids' all-to-all with the step before."""

from collections.abc import Iterator

from torch import nn
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.optim.keyed import KeyedOptimizer

from distembed.data.reader.batch import Batch
from distembed.planning.workload import overlaps
from distembed.ranks import Ranks
from distembed.tasks.click import StepOutput


class StepPipeline:
    """TorchRec's pipeline: overlaps the ids' all-to-all with the step, where there is anything to overlap."""

    def __init__(self, task: nn.Module, optimizer: KeyedOptimizer, processes: Ranks) -> None:
        works_ahead = overlaps(processes.device.type, processes.world_size)
        pipeline = TrainPipelineSparseDist if works_ahead else TrainPipelineBase
        self._pipeline = pipeline(task, optimizer, processes.device)
        self._restarts = not works_ahead

    def outputs(self, batches: Iterator[Batch]) -> Iterator[StepOutput]:
        """Steps through all batches; in training mode it updates the weights. All ranks call it."""
        while True:
            try:
                output = self._pipeline.progress(batches)
            except StopIteration:
                break
            yield output
        if self._restarts:
            self._pipeline.reset()
