"""The ``train`` section of a config."""

from dataclasses import field
from typing import Annotated, Literal

import pydantic.dataclasses
from pydantic import Field

from distembed.base.bounds import Count, Interval
from distembed.base.names import STRICT
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
        precision: What the networks compute in: ``bf16`` for autocast, ``fp32``, ``tf32`` for float32 whose products of
            matrices a GPU computes from 10 bits of each factor's fraction, or ``auto`` for bf16 where every
            rank's device multiplies matrices faster in it, else fp32.
        device: Type of the ranks' devices: ``cpu``, ``cuda``, or ``auto`` for CUDA where there is a device.
        quantized_comms: What composed vectors and their gradients are rounded to while they are sent.
        log_every: Steps between two lines of metrics.
        evaluate_every: Steps between two evaluations on the validation split; 0 for the end of each epoch only.
        stop_after_evaluations: Number of evaluations in a row without a better value of the task's headline metric
            after which training stops; null for never.
        min_improvement: What a value has to exceed the best one by to be better.
        keep_best: Whether the checkpoint of the best evaluation is kept beside the newest ones, and is the one that the
            final evaluation and everything later is made with.
        checkpoint_every: Steps between two checkpoints; 0 for the end of each epoch only.
        keep_checkpoints: Number of the newest checkpoints that are not removed.
        checkpoint_dir: Folder for checkpoints, relative to the run's if not absolute, or any URL that fsspec knows,
            such as ``s3://bucket/folder``; null for ``checkpoints`` in the run's folder.
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
        """Whether evaluations decide what is kept, or when training ends."""
        return self.keep_best or self.stop_after_evaluations is not None
