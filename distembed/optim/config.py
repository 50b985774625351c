"""The optimizers' sections of a config: names, rates, and schedules of the rates."""

from dataclasses import field
from typing import Annotated, Literal

import pydantic.dataclasses
from pydantic import ConfigDict, Field

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
