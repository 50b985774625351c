"""The live states of optimizers, read and set in place: FBGEMM's fused ones, and torch's.

FBGEMM holds states in its own modules, torch in ``optimizer.state``. For each shard of a parameter on this rank, both
are given here as views: ``[rows, columns]`` of a state with a number for each weight, ``[rows]`` with one for each row,
``[1]`` with one for the parameter.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.batched_embedding_kernel import EmbeddingFusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper

from distembed.base.errors import UserError
from distembed.optim.kinds import OPTIMIZERS, NumberPer, fused_optimizer_name, torch_optimizer_name
from distembed.optim.replicated import ReplicatedOptimizer, first_state


@dataclass(frozen=True)
class LocalShard:
    """A part of a tensor that lies on this rank."""

    offsets: tuple[int, ...]  # place of its first element within the whole tensor, one number a dimension
    tensor: Tensor  # its elements, a view of the live tensor


Shards = Mapping[str, Sequence[LocalShard]]


@dataclass(frozen=True)
class ParameterState:
    """The states of one parameter on this rank."""

    parameter: str  # name of the parameter, as in the model's state dict
    optimizer: str  # name of the optimizer, a key of ``OPTIMIZERS``
    shards: Sequence[LocalShard]  # the parameter's shards on this rank
    values: Mapping[str, Sequence[Tensor]]  # by state, a view for each of the shards


def optimizer_names(optimizer: KeyedOptimizer) -> dict[str, str]:
    """Returns the name of the optimizer, a key of ``OPTIMIZERS``, of every parameter that is trained on this rank."""
    return {parameter: leaf.name for leaf in _leaves(optimizer) for parameter, _ in leaf.named()}


def parameter_states(optimizer: KeyedOptimizer, weights: Shards) -> Iterator[ParameterState]:
    """Yields the states of all parameters on this rank; torch's are made where no step has made them yet.

    Args:
        optimizer: The optimizer, which may combine several.
        weights: The shards on this rank of all parameters, by their names in the model's state dict.
    """
    for leaf in _leaves(optimizer):
        yield from leaf.states(weights)


def set_step_count(optimizer: KeyedOptimizer, step: int) -> None:
    """Sets the number of steps done in all optimizers; the bias correction of Adam and its kin depends on it."""
    for leaf in _leaves(optimizer):
        leaf.set_step_count(step)


@dataclass(frozen=True)
class _Leaf:
    """An optimizer that combines no others, and the path of its parameters."""

    prefix: str
    optimizer: Any

    def named(self) -> Iterator[tuple[str, Any]]:
        """Yields each parameter with its name in the model's state dict."""
        for key, parameter in self.optimizer.params.items():
            yield CombinedOptimizer.prepend_opt_key(key, self.prefix), parameter


class _FusedLeaf(_Leaf):
    """FBGEMM's optimizer of one group of tables."""

    @property
    def name(self) -> str:
        fused = self.optimizer._emb_module.optimizer
        return _require_known(fused_optimizer_name(fused), f"FBGEMM's {fused.value}")

    def states(self, _weights: Shards) -> Iterator[ParameterState]:
        states = OPTIMIZERS[self.name].states
        for parameter, weight in self.named():
            # this module's local_shards leaves out empty shards of the parameter: leave out their states too
            has_weights = [shard.tensor.numel() > 0 for shard in weight.local_shards()]
            values = {}
            for (state, per), live in zip(states.items(), self.optimizer.state[weight].values(), strict=True):
                views = [shard.tensor.detach() for shard in compress(live.local_shards(), has_weights)]
                values[state] = [view.view(-1) if per is NumberPer.ROW else view for view in views]
            yield ParameterState(parameter, self.name, local_shards(weight), values)

    def set_step_count(self, step: int) -> None:
        lookup = self.optimizer._emb_module
        lookup.iter.fill_(step)
        lookup.iter_cpu.fill_(step)  # FBGEMM uses this one, and copies the other into it only while it is 0


class _TorchLeaf(_Leaf):
    """One of torch's optimizers, or one of their form."""

    @property
    def name(self) -> str:
        inner = self.optimizer._optimizer
        return _require_known(torch_optimizer_name(inner), repr(inner).splitlines()[0].rstrip(" ("))

    def live(self, parameter: Tensor) -> dict[str, Tensor]:
        """Returns torch's states of a parameter; makes the states of a first step where no step was done yet."""
        live: dict[str, Tensor] = self.optimizer.state[parameter]
        if not live:
            groups = self.optimizer.param_groups
            group = next(group for group in groups if any(member is parameter for member in group["params"]))
            live.update(first_state(OPTIMIZERS[self.name], parameter, group))
        return live

    def states(self, weights: Shards) -> Iterator[ParameterState]:
        for name, parameter in self.named():
            live, shards = self.live(parameter), weights[name]
            values = {
                state: [_view_of_shard(live[state].detach(), per, shard.tensor, parameter) for shard in shards]
                for state, per in OPTIMIZERS[self.name].states.items()
            }
            yield ParameterState(name, self.name, shards, values)

    def set_step_count(self, step: int) -> None:
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"].fill_(step)


class _ReplicatedLeaf(_TorchLeaf):
    """Torch's form of a fused optimizer, of weights that every rank has."""

    @property
    def name(self) -> str:
        return str(self.optimizer.name)

    def live(self, parameter: Tensor) -> dict[str, Tensor]:
        return self.optimizer.live[parameter]

    def set_step_count(self, step: int) -> None:
        self.optimizer.set_optimizer_step(step)


def _leaves(optimizer: KeyedOptimizer, prefix: str = "") -> Iterator[_FusedLeaf | _TorchLeaf]:
    """Yields the optimizers inside of combined and wrapped ones; a :class:`UserError` for an unknown class."""
    if isinstance(optimizer, CombinedOptimizer):
        for name, inner in optimizer.optimizers:
            yield from _leaves(inner, CombinedOptimizer.prepend_opt_key(name, prefix))
    elif isinstance(optimizer, OptimizerWrapper):
        yield from _leaves(optimizer._optimizer, prefix)
    elif isinstance(optimizer, EmbeddingFusedOptimizer):
        yield _FusedLeaf(prefix, optimizer)
    elif isinstance(optimizer, ReplicatedOptimizer):
        yield _ReplicatedLeaf(prefix, optimizer)
    elif isinstance(optimizer, KeyedOptimizerWrapper):
        yield _TorchLeaf(prefix, optimizer)
    else:
        _require_known(None, type(optimizer).__name__)


def _require_known(name: str | None, described: str) -> str:
    """Returns the name; a :class:`UserError` for None, an optimizer that :data:`OPTIMIZERS` does not have."""
    if name is None:
        raise UserError(
            f"{described} is an optimizer whose state a checkpoint has no names for; known: {', '.join(OPTIMIZERS)}, "
            "fused by FBGEMM or in a KeyedOptimizerWrapper. Others can be added to distembed.optim.OPTIMIZERS."
        )
    return name


def _view_of_shard(live: Tensor, per: NumberPer, shard: Tensor, parameter: Tensor) -> Tensor:
    """Returns a view of the numbers of a state, ``live``, that belong to one shard of the parameter."""
    if per is NumberPer.PARAMETER:
        return live.view(1)
    # a shard is a view into the parameter's memory: its address tells its first weight, and so its first number
    start = (shard.data_ptr() - parameter.data_ptr()) // parameter.itemsize
    weights_per_number = shard.shape[1] if per is NumberPer.ROW else 1
    count = shard.numel() // weights_per_number
    values = live.view(-1)[start // weights_per_number :][:count]
    return values if per is NumberPer.ROW else values.view(shard.shape)


def local_shards(value: Tensor | ShardedTensor) -> list[LocalShard]:
    """Returns the shards on this rank of a state dict's entry, without empty ones; a plain tensor is one shard."""
    if isinstance(value, ShardedTensor):
        shards = [LocalShard(tuple(it.metadata.shard_offsets), it.tensor.detach()) for it in value.local_shards()]
    else:
        shards = [LocalShard((0,) * value.dim(), value.detach())]
    return [shard for shard in shards if shard.tensor.numel()]
