"""The ``train`` section of a config."""

from dataclasses import field
from typing import Annotated, Literal

import pydantic.dataclasses
from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt

_STRICT = ConfigDict(extra="forbid", strict=True)
PositiveNumber = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeNumber = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@pydantic.dataclasses.dataclass(frozen=True, config=_STRICT)
class ScheduleConfig:
    """A learning rate over the steps of a run, as a factor on the optimizer's.

    Attributes:
        warmup: share of the run's steps over which the factor grows linearly to 1.
        decay: ``none``, ``linear`` or ``cosine``, from the end of the warm-up to the last step.
        final_factor: what the decay ends at.
    """

    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.0
    decay: Literal["none", "linear", "cosine"] = "none"
    final_factor: Annotated[float, Field(ge=0, le=1)] = 0.0


@pydantic.dataclasses.dataclass(frozen=True, config=_STRICT)
class DenseOptimizerConfig:
    """Optimizer of everything but the embedding tables.

    Attributes:
        name: ``adagrad``, ``adam``, ``adamw``, ``amsgrad`` or ``sgd``.
        learning_rate: at the end of the warm-up.
        weight_decay: decoupled for ``adamw``, an L2 penalty for the others.
        schedule: of the learning rate.
    """

    name: Literal["adagrad", "adam", "adamw", "amsgrad", "sgd"] = "adagrad"
    learning_rate: PositiveNumber = 0.02
    weight_decay: NonNegativeNumber = 0.0
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)


@pydantic.dataclasses.dataclass(frozen=True, config=_STRICT)
class SparseOptimizerConfig:
    """Optimizer of the embedding tables.

    FBGEMM fuses it into the backward pass, where it updates the rows of the batch alone. Tables that every rank has
    (data-parallel ones, and the small partitions of row-wise ones) are trained by torch's optimizer of the same name;
    ``lamb`` and the ``partial_row_wise`` ones have none, so that they take no such tables.

    Attributes:
        name: ``row_wise_adagrad`` (one accumulator a row), ``adagrad``, ``sgd``; ``amsgrad``, which is never fused and
            steps through all rows; on CUDA only: ``adam``, ``partial_row_wise_adam`` (one second moment a row),
            ``lamb``, ``partial_row_wise_lamb``.
        learning_rate: at the end of the warm-up.
        eps: added to the root of the accumulator.
        schedule: of the learning rate.
    """

    name: Literal[
        "row_wise_adagrad",
        "adagrad",
        "sgd",
        "amsgrad",
        "adam",
        "partial_row_wise_adam",
        "lamb",
        "partial_row_wise_lamb",
    ] = "row_wise_adagrad"
    learning_rate: PositiveNumber = 0.02
    eps: PositiveNumber = 1e-8
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)


@pydantic.dataclasses.dataclass(frozen=True, config=_STRICT)
class TrainConfig:
    """How to train.

    Attributes:
        batch_size: rows of a step over all ranks together.
        epochs: times that each training row is read.
        max_steps: stop after so many steps, even within an epoch; null for no limit.
        seed: of the weights, the order of rows and all else that is random.
        dense_optimizer: of the networks.
        sparse_optimizer: of the embedding tables.
        precision: of the networks: ``bf16`` autocast, ``fp32``, or ``auto`` for bf16 where the processor does that.
        device: ``cpu``, ``cuda``, or ``auto`` for CUDA where there is a device.
        log_every: steps between two lines of metrics.
        evaluate_every: steps between two evaluations on the validation split; 0 for the end of each epoch only.
        checkpoint_every: steps between two checkpoints; 0 for the end of each epoch only.
        keep_checkpoints: how many of the newest checkpoints are kept.
        checkpoint_dir: where checkpoints go: a folder, relative to the run's if not absolute, or any URL that fsspec
            knows, such as ``s3://bucket/folder``; null for ``checkpoints`` in the run's folder.
    """

    batch_size: PositiveInt = 128
    epochs: PositiveInt = 1
    max_steps: PositiveInt | None = None
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    dense_optimizer: DenseOptimizerConfig = field(default_factory=DenseOptimizerConfig)
    sparse_optimizer: SparseOptimizerConfig = field(default_factory=SparseOptimizerConfig)
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    log_every: PositiveInt = 100
    evaluate_every: NonNegativeInt = 0
    checkpoint_every: NonNegativeInt = 0
    keep_checkpoints: PositiveInt = 2
    checkpoint_dir: Annotated[str, Field(min_length=1)] | None = None
