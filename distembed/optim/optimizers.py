"""The optimizers of a sharded model: which one trains each parameter, and the learning rate over the steps.

The *sparse* optimizer trains the vectors of tables, in one of three ways:

- FBGEMM has it fused: FBGEMM updates a table within the backward pass.
- Every rank has the table: torch's optimizer of that name updates it (:mod:`distembed.optim.replicated`).
- FBGEMM does not have it: torch's optimizer updates all tables after the backward pass.

The *dense* optimizer trains all other parameters: networks, path functions, and tables with ``dense_gradient``, whose
rows all have gradients.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from distembed.base.errors import UserError
from distembed.base.lazy import imported
from distembed.base.names import nearest
from distembed.base.units import enumerate_names
from distembed.embedding.tables import CompositionalTables
from distembed.optim.config import DenseOptimizerConfig, ScheduleConfig, SparseOptimizerConfig
from distembed.optim.kinds import OPTIMIZERS, sparse_names
from distembed.optim.live_state import set_step_count


def fuse_sparse_optimizer(
    parameters: Iterable[nn.Parameter], config: SparseOptimizerConfig, device: torch.device
) -> None:
    """Marks vectors of tables so that FBGEMM updates them in the backward pass; marks none if it lacks the optimizer.

    A UserError refuses an optimizer that FBGEMM has on CUDA only, on another device. Frozen vectors stay unmarked.

    Args:
        parameters: The vectors, as :func:`distembed.optim.optimizers.table_parameters` returns them.
        config: The optimizer.
        device: The device that will train them.
    """
    kind = OPTIMIZERS[config.name]
    if kind.fused_needs_cuda and device.type != "cuda":
        elsewhere = ", ".join(name for name in sparse_names() if not OPTIMIZERS[name].fused_needs_cuda)
        raise UserError(
            f"train.sparse_optimizer.name is {config.name!r}, which FBGEMM has on CUDA only, and this run is on "
            f"{device.type}; use one of {elsewhere}."
        )
    if kind.fused_class is not None:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        apply_optimizer_in_backward(imported(kind.fused_class), trained, _sparse_settings(config))


def _sparse_settings(config: SparseOptimizerConfig) -> dict[str, float]:
    return {"lr": config.learning_rate} | ({"eps": config.eps} if OPTIMIZERS[config.name].has_eps else {})


def _sparse_optimizer(tables: Mapping[str, Tensor], config: SparseOptimizerConfig) -> KeyedOptimizer:
    """Makes torch's form of the sparse optimizer for tables that FBGEMM does not update; refuses one without it."""
    kind = OPTIMIZERS[config.name]
    if kind.torch_class is None:
        trained_by_torch = ", ".join(name for name in sparse_names() if OPTIMIZERS[name].torch_class is not None)
        raise UserError(
            f"train.sparse_optimizer.name is {config.name!r}, which only FBGEMM has, but torch trains what every "
            f"rank has, such as {next(iter(tables))}; place tables table_wise or column_wise, or use one of "
            f"{trained_by_torch}."
        )
    settings = _sparse_settings(config)
    return KeyedOptimizerWrapper(tables, lambda params: kind.make(params, **settings))


def _dense_optimizers(
    parameters: Mapping[str, Tensor],
    config: DenseOptimizerConfig,
    clipped: Iterable[tuple[set[str], GradientClipping, float | None]],
) -> list[KeyedOptimizer]:
    """Makes the optimizers of everything that the sparse optimizer does not train.

    Args:
        parameters: The parameters by name; they are empty for tables that lie on other ranks, which train them.
        config: The dense optimizer.
        clipped: Names of parameters whose gradients are clipped, how, and the limit; None for no limit.
    """
    kind, decays = OPTIMIZERS[config.name], weight_decays(parameters, config)
    parameters = {name: parameter for name, parameter in parameters.items() if parameter.numel()}

    def make(names: Iterable[str]) -> KeyedOptimizer:
        trained = {name: parameters[name] for name in names}
        groups = [
            {
                "params": [parameter for name, parameter in trained.items() if decays[name] == decay],
                "weight_decay": decay,
            }
            for decay in dict.fromkeys(decays[name] for name in trained)
        ]
        return KeyedOptimizerWrapper(
            trained, lambda _: kind.make(groups, lr=config.learning_rate, weight_decay=config.weight_decay)
        )

    optimizers: list[KeyedOptimizer] = []
    unclipped = dict.fromkeys(parameters)
    for names, how, limit in clipped:
        members = [name for name in unclipped if name in names]
        if members and limit is not None:
            optimizers.append(GradientClippingOptimizer(make(members), how, max_gradient=limit))
            unclipped = {name: None for name in unclipped if name not in names}
    return [*optimizers, make(unclipped)] if unclipped else optimizers


def weight_decays(names: Iterable[str], config: DenseOptimizerConfig) -> dict[str, float]:
    """Returns the weight decay of each parameter: that of the first group whose pattern matches its path.

    Args:
        names: Names of all parameters of the dense optimizer, with or without the prefix ``model.`` of a trained model.
        config: The dense optimizer.

    Raises:
        UserError: A pattern matches no parameter, or only parameters of earlier groups.
    """
    paths = {name: name.removeprefix("model.") for name in names}
    decays: dict[str, float] = {}
    for index, group in enumerate(config.weight_decay_groups):
        matching = [name for name, path in paths.items() if fnmatchcase(path, group.pattern)]
        members = [name for name in matching if name not in decays]
        if not members:
            raise UserError(_without_members(index, group.pattern, bool(matching), paths.values()))
        decays |= dict.fromkeys(members, group.weight_decay)
    return {name: decays.get(name, config.weight_decay) for name in paths}


def _without_members(index: int, pattern: str, are_taken: bool, paths: Iterable[str]) -> str:
    """Returns the error text of a group of weight decay that has no parameters."""
    where = f"train.dense_optimizer.weight_decay_groups[{index}].pattern is {pattern!r}, which matches"
    if are_taken:
        return f"{where} only parameters that earlier groups match; put it before them, or leave it out."
    paths = list(paths)
    guess = nearest(pattern, paths)
    hint = f" Did you mean {guess!r}?" if guess else ""
    return f"{where} no parameter of the dense optimizer.{hint} Parameters: {enumerate_names(paths)}."


class Optimizers:
    """All optimizers of a model, each under its learning-rate schedule.

    Attributes:
        combined: The one optimizer that a TorchRec pipeline steps and a checkpoint holds.
        steps_before: Number of steps that its states had when the run began, 0 unless they were another run's. Adam
            and its kin correct their states by how long these have gathered; learning rates follow the run's own steps.

    Args:
        model: The sharded model, whose tables :func:`fuse_sparse_optimizer` has marked.
        dense: The optimizer of everything but vectors of tables.
        sparse: The optimizer of vectors.
        num_steps: Number of steps of the whole run, for the schedules.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        dense: DenseOptimizerConfig,
        sparse: SparseOptimizerConfig,
        num_steps: int,
    ) -> None:
        parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
        vectors = {id(parameter) for parameter in table_parameters(model)}
        others = {name: parameter for name, parameter in parameters.items() if id(parameter) not in vectors}
        # a rank that owns nothing of a table has an empty parameter for it
        tables = {name: own for name, own in parameters.items() if name not in others and own.numel()}
        self._fused = model.fused_optimizer
        self._scheduled: list[tuple[KeyedOptimizer, SparseOptimizerConfig | DenseOptimizerConfig]] = [
            (self._fused, sparse)
        ]
        if tables:
            self._scheduled.append((_sparse_optimizer(tables, sparse), sparse))
        in_tables = {id(parameter) for _, _, parameter in _all_vectors(model)}
        clipped = [
            # every rank has the networks and their averaged gradients, so all ranks scale them alike
            (_network_names(model), GradientClipping.NORM, dense.clip_norm),
            # each rank has some rows of a table with dense_gradient: its numbers are cut one by one
            (
                {name for name, own in others.items() if id(own) in in_tables},
                GradientClipping.VALUE,
                sparse.max_gradient,
            ),
        ]
        for optimizer in _dense_optimizers(others, dense, clipped):
            self._scheduled.append((optimizer, dense))
        kind = OPTIMIZERS[sparse.name]
        self._fused_corrects_bias = kind.corrects_bias and kind.fused_class is not None
        self._dense = dense
        self._num_steps = num_steps
        self.steps_before = 0
        self.step = 0  # number of the step whose rates are set, counted from 0
        self.combined = CombinedOptimizer([optimizer for optimizer, _ in self._scheduled])

    def set_learning_rates(self, step: int) -> float:
        """Sets all learning rates for the next step, and FBGEMM's step count; call it before the backward pass.

        Args:
            step: Number of the step, counted from 0.

        Returns:
            The learning rate of the dense optimizer.
        """
        self.step = step
        for optimizer, config in self._scheduled:
            for group in optimizer.param_groups:
                group["lr"] = self._rate(config, step)
        # step() of a fused optimizer updates nothing: it hands FBGEMM the rate, before the backward pass updates tables
        self._fused.step()
        if self._fused_corrects_bias:
            # set anew in each step, as FBGEMM counts the batches of evaluations too
            set_step_count(self._fused, self.steps_before + step)
        return self._rate(self._dense, step)

    def _rate(self, config: SparseOptimizerConfig | DenseOptimizerConfig, step: int) -> float:
        return config.learning_rate * learning_rate_factor(config.schedule, step, self._num_steps)


def learning_rate_factor(schedule: ScheduleConfig, step: int, num_steps: int) -> float:
    """Returns the factor on the learning rates at ``step``, counted from 0, of a run of ``num_steps``.

    It grows linearly to 1 in the warm-up. Then it stays, or falls to ``final_factor`` at the run's end: by a line, half
    a cosine wave, or an equal ratio a step. ``inverse_sqrt`` falls as ``sqrt(w / (step + 1))`` after w steps of warm-up
    (Vaswani et al., NeurIPS 2017, section 5.3).
    """
    warmup_steps = round(schedule.warmup * num_steps)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule.decay == "none":
        return 1.0
    if schedule.decay == "inverse_sqrt":
        return math.sqrt(max(1, warmup_steps) / (step + 1))
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    if schedule.decay == "exponential":
        return math.pow(schedule.final_factor, progress)
    remaining = 1.0 - progress if schedule.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return schedule.final_factor + (1.0 - schedule.final_factor) * remaining


# the sharded compositional collections are TorchRec's too
_COLLECTIONS = (
    CompositionalTables,
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
)
_VECTORS = ("embedding_bags", "embeddings")
"""Where collections of bags and of sequences hold their vectors; functions of path-based tables lie elsewhere."""


def _network_names(model: nn.Module) -> set[str]:
    """Returns the names of the parameters outside of all collections."""
    in_collections = {
        id(parameter)
        for collection in model.modules()
        if isinstance(collection, _COLLECTIONS)
        for parameter in collection.parameters()
    }
    return {name for name, parameter in model.named_parameters() if id(parameter) not in in_collections}


def table_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that hold vectors of tables, compositional or TorchRec's own, in any collection.

    Tables with ``dense_gradient`` are not among them: they are trained like networks.

    Args:
        model: A model as it was built, or the ``DistributedModelParallel`` of it.
    """
    return [parameter for collection, name, parameter in _all_vectors(model) if name not in _dense_weights(collection)]


def averaged_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that are trained and that every rank has: networks and path functions, by name.

    Tables are not among them, and tables with ``dense_gradient`` are not either.
    """
    in_tables = {id(parameter) for _, _, parameter in _all_vectors(model)}
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in in_tables
    }


def _all_vectors(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yields each collection with the name of a table or partition and the parameter of its vectors."""
    for collection in model.modules():
        for attribute in _VECTORS if isinstance(collection, _COLLECTIONS) else ():
            vectors = getattr(collection, attribute, None)
            for name, module in vectors.items() if isinstance(vectors, nn.ModuleDict) else ():
                for parameter in module.parameters():
                    yield collection, name, parameter


def _dense_weights(collection: nn.Module) -> set[str]:
    """Returns the names of the weights of a collection's tables with ``dense_gradient``."""
    tables: Any = getattr(collection, "tables", list)  # TorchRec's own have none
    return {part.name for table in tables() if table.dense_gradient for part in table.lookup_tables()}
