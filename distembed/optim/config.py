"""The optimizers' sections of a config: names, rates, and schedules of the rates."""

from dataclasses import field
from typing import Annotated, Literal

import pydantic.dataclasses
from pydantic import AfterValidator, Field, model_validator

from distembed.base.errors import UserError
from distembed.base.names import STRICT, one_of
from distembed.optim.kinds import OPTIMIZERS, dense_names, sparse_names

PositiveNumber = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeNumber = Annotated[float, Field(ge=0, allow_inf_nan=False)]


# the names are looked up when a config is validated: rows may have been added to the table by then
def _dense_name(name: str) -> str:
    names = dense_names()
    if name in OPTIMIZERS and name not in names:
        raise UserError(f"name is {name!r}, which trains tables only; use one of {', '.join(names)}.")
    return one_of("name", name, names)


def _sparse_name(name: str) -> str:
    names = sparse_names()
    if name in OPTIMIZERS and name not in names:
        raise UserError(f"name is {name!r}, which trains networks only; use one of {', '.join(names)}.")
    return one_of("name", name, names)


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class ScheduleConfig:
    """A learning rate over the steps of a run, as a factor on the optimizer's."""

    # share of the run's steps over which the factor grows linearly to 1
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.0
    # how the factor falls from the end of the warm-up to the last step: ``none``, ``linear``, ``cosine``,
    # ``exponential``, or ``inverse_sqrt``, which falls with the root of the step and does not look at final_factor
    decay: Literal["none", "linear", "cosine", "exponential", "inverse_sqrt"] = "none"
    final_factor: Annotated[float, Field(ge=0, le=1)] = 0.0  # the factor at the end of the decay

    @model_validator(mode="after")
    def _final_factor_is_reached(self) -> "ScheduleConfig":
        if self.decay == "exponential" and self.final_factor == 0:
            raise ValueError(
                "decay is 'exponential', which never falls to final_factor=0; set it above 0, such as 0.01"
            )
        return self

    @property
    def depends_on_length(self) -> bool:
        """Whether the factor of a step depends on how many steps the run has."""
        return self.warmup > 0 or (self.decay not in ("none", "inverse_sqrt") and self.final_factor < 1)


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class WeightDecayGroupConfig:
    """Parameters of the dense optimizer that have a weight decay of their own."""

    # pattern of parameters' paths in the model, in the syntax of Python's fnmatch: ``*.bias``, ``deep.*``
    pattern: Annotated[str, Field(min_length=1)]
    weight_decay: NonNegativeNumber


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class DenseOptimizerConfig:
    """Optimizer of everything but the embedding tables."""

    # an optimizer that trains networks: ``adagrad``, ``adam``, ``adamw``, ``amsgrad``, ``sgd``, or one that was
    # added to ``distembed.optim.OPTIMIZERS``
    name: Annotated[str, AfterValidator(_dense_name)] = "adagrad"
    learning_rate: PositiveNumber = 0.02  # the rate at the end of the warm-up
    weight_decay: NonNegativeNumber = 0.0  # decay of the weights, decoupled for ``adamw``, an L2 penalty for the others
    # groups of parameters with other decays; a parameter is in the first group whose pattern matches its path, and has
    # ``weight_decay`` where none does
    weight_decay_groups: list[WeightDecayGroupConfig] = field(default_factory=list)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)  # the learning rate over the steps
    # largest norm of the gradients of all networks together, which larger gradients are scaled to; null for no limit.
    # Path functions belong to the tables and are not counted. Nor are tables in which all rows have gradients: each
    # rank has only some of their rows.
    clip_norm: PositiveNumber | None = None


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class EMAConfig:
    """Exponential moving averages of the networks' weights; see :mod:`distembed.optim.averages`."""

    # share of the averages that a step keeps, and (1 + n) / (10 + n) where that is smaller, n steps after start_step;
    # the averages reach over about 1 / (1 - decay) steps
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    start_step: Annotated[int, Field(ge=0)] = 0  # number of steps until which the averages are the weights themselves


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class SparseOptimizerConfig:
    """Optimizer of the embedding tables.

    FBGEMM fuses it into the backward pass, where it updates the rows of the batch alone. Tables that every rank has
    (data-parallel ones, and the small partitions of row-wise ones) are trained by torch's optimizer of the same name;
    ``lamb`` and the ``partial_row_wise`` ones have no torch optimizer, so that they train no replicated tables.
    """

    # an optimizer that trains tables: ``row_wise_adagrad`` (one accumulator a row), ``adagrad``, ``sgd``;
    # ``amsgrad``, which is never fused and steps through all rows, as does an optimizer added to
    # ``distembed.optim.OPTIMIZERS`` without a fused class; on CUDA only ``adam``, ``partial_row_wise_adam`` (one
    # second moment a row), ``lamb``, ``partial_row_wise_lamb``
    name: Annotated[str, AfterValidator(_sparse_name)] = "row_wise_adagrad"
    learning_rate: PositiveNumber = 0.02  # the rate at the end of the warm-up
    eps: PositiveNumber = 1e-8  # small number that is added to the root of the accumulator
    # largest magnitude of each number of the gradient of a composed vector (of a bag, or of an id of a sequence), which
    # larger numbers are cut to; null for no limit. See distembed.sharding.limit_gradients. Of tables in which all rows
    # have gradients, the numbers of the rows' own gradients are cut.
    max_gradient: PositiveNumber | None = None
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)  # the learning rate over the steps
    # where updated rows of fp16 tables are rounded up or down at random, so that small updates are kept in the mean, in
    # place of to the nearest number: ``cuda``, as by FBGEMM, or ``everywhere``, also by the one-pass kernels of a CPU.
    # Rows that every rank has are rounded to the nearest, and are refused by ``everywhere`` on a CPU.
    stochastic_rounding: Literal["cuda", "everywhere"] = "cuda"

    @property
    def is_fused(self) -> bool:
        """Whether FBGEMM updates tables within the backward pass; else they have TorchRec's ``dense`` kernel."""
        return OPTIMIZERS[self.name].fused_class is not None
