"""Optimizers of the dense part and of the tables, and the learning rate over the steps."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from distembed.errors import UserError
from distembed.training.config import DenseOptimizerConfig, ScheduleConfig, SparseOptimizerConfig

DENSE_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "amsgrad": lambda params, **settings: torch.optim.Adam(params, amsgrad=True, **settings),
    "sgd": torch.optim.SGD,
}
SPARSE_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "row_wise_adagrad": RowWiseAdagrad,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
}
_NEEDS_CUDA = {"adam"}


def fuse_sparse_optimizer(
    parameters: Iterable[nn.Parameter], config: SparseOptimizerConfig, device: torch.device
) -> None:
    """Marks table parameters so that FBGEMM updates them within the backward pass.

    Raises:
        UserError: where FBGEMM has no such optimizer on the device.
    """
    if config.name in _NEEDS_CUDA and device.type != "cuda":
        raise UserError(
            f"train.sparse_optimizer.name is {config.name!r}, which FBGEMM has on CUDA only, and this run is on "
            f"{device.type}; use row_wise_adagrad, adagrad or sgd."
        )
    settings: dict[str, Any] = {"lr": config.learning_rate}
    if config.name != "sgd":
        settings["eps"] = config.eps
    apply_optimizer_in_backward(SPARSE_OPTIMIZERS[config.name], parameters, settings)


def dense_optimizer(model: DistributedModelParallel, config: DenseOptimizerConfig) -> KeyedOptimizer:
    """An optimizer over every parameter that has none fused, in torch's fused form."""
    factory = DENSE_OPTIMIZERS[config.name]
    return KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: factory(params, lr=config.learning_rate, weight_decay=config.weight_decay, fused=True),
    )


class Optimizers:
    """Both optimizers, each under its learning-rate schedule.

    Attributes:
        combined: what a TorchRec pipeline steps and a checkpoint holds.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        dense: DenseOptimizerConfig,
        sparse: SparseOptimizerConfig,
        num_steps: int,
    ) -> None:
        self._fused = model.fused_optimizer
        self._dense = dense_optimizer(model, dense)
        self._scheduled = ((self._fused, sparse), (self._dense, dense))
        self._num_steps = num_steps
        self.combined = CombinedOptimizer([self._fused, self._dense])

    def set_learning_rates(self, step: int) -> float:
        """Applies the schedules to the step that comes next (counted from 0); returns the dense learning rate."""
        rate = 0.0
        for optimizer, config in self._scheduled:
            rate = config.learning_rate * learning_rate_factor(config.schedule, step, self._num_steps)
            for group in optimizer.param_groups:
                group["lr"] = rate
        # fused updates happen in the backward pass: FBGEMM must know the rate before it, and step() only tells it
        self._fused.step()
        return rate

    def init_state(self) -> None:
        """Makes lazily created state, so that a checkpoint can be read into it; call before weights are loaded."""
        self._dense.init_state()


def learning_rate_factor(schedule: ScheduleConfig, step: int, num_steps: int) -> float:
    """Factor on the learning rates at ``step``, counted from 0, of a run of ``num_steps``."""
    warmup_steps = round(schedule.warmup * num_steps)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule.decay == "none":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    remaining = 1.0 - progress if schedule.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return schedule.final_factor + (1.0 - schedule.final_factor) * remaining
