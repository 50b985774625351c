"""The ``train`` section of a config, and the steps after which it asks for evaluations and checkpoints."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import pydantic.dataclasses
from pydantic import Field

from distembed.base.names import STRICT
from distembed.base.validation import Count, Interval
from distembed.embedding.exchange import QuantizedCommsConfig
from distembed.optim.config import DenseOptimizerConfig, NonNegativeNumber, SparseOptimizerConfig


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class TrainConfig:
    """How a model is trained.

    Attributes:
        batch_size: Rows of a step on all ranks.
        epochs: How many times each training row is read.
        max_steps: Number of steps after which training ends, even within an epoch; null for no limit.
        seed: Seed of the weights, the order of rows and everything else that is random.
        dense_optimizer: Optimizer of the networks.
        sparse_optimizer: Optimizer of the embedding tables.
        precision: Arithmetic of the networks: ``bf16`` for autocast, ``fp32``, ``tf32`` for float32 whose products of
            matrices a GPU computes from 10 bits of each factor's fraction, or ``auto`` for bf16 where every
            rank's device multiplies matrices faster in it, else fp32.
        device: Type of the ranks' devices: ``cpu``, ``cuda``, or ``auto`` for CUDA where there is a device.
        quantized_comms: Rounding of composed vectors and their gradients while they are sent.
        log_every: Steps between two lines of metrics.
        evaluate_every: Steps between two evaluations on the validation split; 0 for the end of each epoch only.
        stop_after_evaluations: Number of evaluations in a row without a better value of the task's headline metric
            after which training stops; null for never.
        min_improvement: Difference by which a better value exceeds the best one.
        keep_best: Whether the checkpoint of the best evaluation is kept beside the newest ones, and is the one that the
            final evaluation and everything later is made with.
        checkpoint_every: Steps between two checkpoints; 0 for the end of each epoch only.
        keep_checkpoints: Number of the newest checkpoints that are not removed.
        checkpoint_dir: Folder for checkpoints, relative to the run's if not absolute, or any URL that fsspec knows,
            for example ``s3://bucket/folder``; null for ``checkpoints`` in the run's folder.
        init_from: Folder of a run, or folder or URL of one of its checkpoints, whose weights and optimizer states
            training begins with; null for initial weights.
    """

    batch_size: Count = 128
    epochs: Count = 1
    max_steps: Count | None = None
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    dense_optimizer: DenseOptimizerConfig = field(default_factory=DenseOptimizerConfig)
    sparse_optimizer: SparseOptimizerConfig = field(default_factory=SparseOptimizerConfig)
    precision: Literal["auto", "bf16", "tf32", "fp32"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    quantized_comms: QuantizedCommsConfig = field(default_factory=QuantizedCommsConfig)
    log_every: Count = 100
    evaluate_every: Interval = 0
    stop_after_evaluations: Count | None = None
    min_improvement: NonNegativeNumber = 0.0
    keep_best: bool = False
    checkpoint_every: Interval = 0
    keep_checkpoints: Count = 2
    checkpoint_dir: Annotated[str, Field(min_length=1)] | None = None
    init_from: Annotated[str, Field(min_length=1)] | None = None

    @property
    def compares_evaluations(self) -> bool:
        """Whether evaluations decide which checkpoint is kept, or when training ends."""
        return self.keep_best or self.stop_after_evaluations is not None


@dataclass(frozen=True)
class DueSteps:
    """The steps after which a run evaluates and saves: every so many, at the end of each epoch, and at its end.

    Attributes:
        train: The ``train`` section of the config.
        batches_per_epoch: Number of steps of an epoch.
        num_steps: Number of steps of the whole run.
        evaluates: Whether there is a split to evaluate on while training.
    """

    train: TrainConfig
    batches_per_epoch: int
    num_steps: int
    evaluates: bool

    def checkpoint(self, step: int) -> bool:
        """Returns whether a checkpoint is due after so many steps."""
        return self._is_due(step, self.train.checkpoint_every)

    def evaluation(self, step: int) -> bool:
        """Returns whether an evaluation on the validation split is due after so many steps."""
        return self.evaluates and self._is_due(step, self.train.evaluate_every)

    def evaluation_before_checkpoint(self, step: int) -> bool:
        """Returns whether the checkpoint after so many steps waits for an evaluation, which is part of its state."""
        return self.train.compares_evaluations and self.evaluation(step)

    def next_step(self, step: int) -> int:
        """Returns the step after which something is due next."""
        ends = [self.num_steps, (step // self.batches_per_epoch + 1) * self.batches_per_epoch]
        intervals = self.train.evaluate_every, self.train.checkpoint_every
        return min([*ends, *((step // every + 1) * every for every in intervals if every)])

    def _is_due(self, step: int, every: int) -> bool:
        """Returns whether an action of this interval is due; 0 is for the end of each epoch only."""
        at_epoch_end = step % self.batches_per_epoch == 0 or step == self.num_steps
        return step > 0 and (at_epoch_end or (every > 0 and step % every == 0))
