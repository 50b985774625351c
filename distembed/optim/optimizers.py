"""Optimizers of the tables and of all else, and the learning rate over the steps.

Tables are trained by the *sparse* optimizer: within the backward pass where FBGEMM has fused it, else by torch's of the
same name. Torch trains what every rank has, and all tables under ``amsgrad``, which FBGEMM does not have. All other
parameters, those of path functions among them, are trained by the *dense* one.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim import LAMB, PartialRowWiseAdam, PartialRowWiseLAMB
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from distembed.checkpoints.optimizer_state import set_step
from distembed.errors import UserError
from distembed.optim.config import DenseOptimizerConfig, ScheduleConfig, SparseOptimizerConfig

OptimizerFactory = Callable[..., torch.optim.Optimizer]

DENSE_OPTIMIZERS: dict[str, OptimizerFactory] = {
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "amsgrad": lambda params, **settings: torch.optim.Adam(params, amsgrad=True, **settings),
    "sgd": torch.optim.SGD,
}


@dataclass(frozen=True)
class SparseOptimizer:
    """One of the optimizers of tables.

    Attributes:
        fused: the class by which TorchRec knows FBGEMM's; None where FBGEMM has none.
        torch_form: makes torch's of ``params``, ``lr`` and, but for SGD, ``eps``; None where torch has none.
        needs_cuda: whether FBGEMM has it on CUDA only; so it has all that divide by a factor of the number of steps.
    """

    fused: type[torch.optim.Optimizer] | None
    torch_form: OptimizerFactory | None
    needs_cuda: bool = False


def _fused_by_torch(factory: OptimizerFactory) -> OptimizerFactory:
    return lambda params, **settings: factory(params, fused=True, **settings)


SPARSE_OPTIMIZERS: dict[str, SparseOptimizer] = {
    "row_wise_adagrad": SparseOptimizer(RowWiseAdagrad, RowWiseAdagrad),
    "adagrad": SparseOptimizer(torch.optim.Adagrad, _fused_by_torch(torch.optim.Adagrad)),
    "sgd": SparseOptimizer(torch.optim.SGD, _fused_by_torch(torch.optim.SGD)),
    "amsgrad": SparseOptimizer(None, _fused_by_torch(DENSE_OPTIMIZERS["amsgrad"])),
    "adam": SparseOptimizer(torch.optim.Adam, _fused_by_torch(torch.optim.Adam), needs_cuda=True),
    "partial_row_wise_adam": SparseOptimizer(PartialRowWiseAdam, None, needs_cuda=True),
    "lamb": SparseOptimizer(LAMB, None, needs_cuda=True),
    "partial_row_wise_lamb": SparseOptimizer(PartialRowWiseLAMB, None, needs_cuda=True),
}

_TABLE = re.compile(r"(^|\.)(embedding_bags|embeddings)\.[^.]+__p\d+\.weight")


def needs_dense_kernel(config: SparseOptimizerConfig) -> bool:
    """Whether tables are to be placed with TorchRec's ``dense`` kernel, which leaves the update to torch."""
    return SPARSE_OPTIMIZERS[config.name].fused is None


def fuse_sparse_optimizer(
    parameters: Iterable[nn.Parameter], config: SparseOptimizerConfig, device: torch.device
) -> None:
    """Marks table parameters so that FBGEMM updates them within the backward pass, where it can.

    Raises:
        UserError: where FBGEMM has no such optimizer on the device.
    """
    optimizer = SPARSE_OPTIMIZERS[config.name]
    if optimizer.needs_cuda and device.type != "cuda":
        elsewhere = ", ".join(name for name, other in SPARSE_OPTIMIZERS.items() if not other.needs_cuda)
        raise UserError(
            f"train.sparse_optimizer.name is {config.name!r}, which FBGEMM has on CUDA only, and this run is on "
            f"{device.type}; use one of {elsewhere}."
        )
    if optimizer.fused is not None:
        apply_optimizer_in_backward(optimizer.fused, parameters, _sparse_settings(config))


def is_table(name: str) -> bool:
    """Whether a parameter holds the vectors of a compositional table's partition, from its name in a model."""
    return _TABLE.search(name) is not None


def _sparse_settings(config: SparseOptimizerConfig) -> dict[str, Any]:
    return {"lr": config.learning_rate} | ({} if config.name == "sgd" else {"eps": config.eps})


def _sparse_optimizer(tables: Mapping[str, Tensor], config: SparseOptimizerConfig) -> KeyedOptimizer:
    """Torch's form of the sparse optimizer, over tables that have none fused."""
    factory = SPARSE_OPTIMIZERS[config.name].torch_form
    if factory is None:
        others = ", ".join(name for name, other in SPARSE_OPTIMIZERS.items() if other.torch_form is not None)
        raise UserError(
            f"train.sparse_optimizer.name is {config.name!r}, which only FBGEMM has, but torch trains what every "
            f"rank has, such as {next(iter(tables))}; place tables table_wise or column_wise, or use one of {others}."
        )
    settings = _sparse_settings(config)
    return KeyedOptimizerWrapper(tables, lambda params: factory(params, **settings))


def _dense_optimizer(parameters: Mapping[str, Tensor], config: DenseOptimizerConfig) -> KeyedOptimizer:
    factory = _fused_by_torch(DENSE_OPTIMIZERS[config.name])
    return KeyedOptimizerWrapper(
        parameters, lambda params: factory(params, lr=config.learning_rate, weight_decay=config.weight_decay)
    )


class Optimizers:
    """All optimizers of a model, each under its learning-rate schedule.

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
        # a rank that owns nothing of a table has an empty parameter for it
        parameters = {
            name: parameter
            for name, parameter in in_backward_optimizer_filter(model.named_parameters())
            if parameter.numel()
        }
        tables = {name: parameter for name, parameter in parameters.items() if is_table(name)}
        others = {name: parameter for name, parameter in parameters.items() if name not in tables}
        self._fused = model.fused_optimizer
        self._scheduled: list[tuple[KeyedOptimizer, SparseOptimizerConfig | DenseOptimizerConfig]] = [
            (self._fused, sparse)
        ]
        if tables:
            self._scheduled.append((_sparse_optimizer(tables, sparse), sparse))
        if others:
            self._scheduled.append((_dense_optimizer(others, dense), dense))
        self._corrects_bias = SPARSE_OPTIMIZERS[sparse.name].needs_cuda
        self._dense = dense
        self._num_steps = num_steps
        self.combined = CombinedOptimizer([optimizer for optimizer, _ in self._scheduled])

    def set_learning_rates(self, step: int) -> float:
        """Applies the schedules to the step that comes next (counted from 0); returns the dense learning rate."""
        for optimizer, config in self._scheduled:
            for group in optimizer.param_groups:
                group["lr"] = self._rate(config, step)
        # fused updates happen in the backward pass: FBGEMM must know the rate before it, and step() only tells it
        self._fused.step()
        if self._corrects_bias:
            # FBGEMM counts the batches of evaluations too
            set_step(self._fused, step)
        return self._rate(self._dense, step)

    def _rate(self, config: SparseOptimizerConfig | DenseOptimizerConfig, step: int) -> float:
        return config.learning_rate * learning_rate_factor(config.schedule, step, self._num_steps)


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
