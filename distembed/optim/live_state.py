"""The live states of optimizers, read and set in place: FBGEMM's fused ones, and torch's.

Both hold the same numbers in different places. Here both give, for each shard of a parameter on this rank, a view of
each state: ``[rows, columns]`` where a weight has a number, ``[rows]`` where a row has one, ``[1]`` where the parameter
has one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

from torch import Tensor
from torchrec.distributed.batched_embedding_kernel import EmbeddingFusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper

from distembed.base.errors import UserError
from distembed.optim.first_state import first_state
from distembed.optim.kinds import OPTIMIZERS, NumberPer, fused_optimizer_name, torch_optimizer_name
from distembed.optim.local_shards import LocalShard, local_shards
from distembed.optim.replicated import ReplicatedOptimizer

Shards = Mapping[str, Sequence[LocalShard]]


@dataclass(frozen=True)
class ParameterState:
    """The states of one parameter on this rank.

    Attributes:
        parameter: Name of the parameter, as in the model's state dict.
        optimizer: Name of the optimizer, a key of ``OPTIMIZERS``.
        shards: The parameter's shards on this rank.
        values: By state, a view for each of the shards.
    """

    parameter: str
    optimizer: str
    shards: Sequence[LocalShard]
    values: Mapping[str, Sequence[Tensor]]


def optimizer_names(optimizer: KeyedOptimizer) -> dict[str, str]:
    """Returns the name of the optimizer, a key of ``OPTIMIZERS``, of every parameter that is trained on this rank.

    Raises:
        UserError: An optimizer is not in ``OPTIMIZERS``.
    """
    return {parameter: leaf.name for leaf in _leaves(optimizer) for parameter in leaf.parameter_names()}


def parameter_states(optimizer: KeyedOptimizer, weights: Shards) -> Iterator[ParameterState]:
    """Yields the states of all parameters on this rank; torch's are made where no step has made them yet.

    Args:
        optimizer: The optimizer, which may combine several.
        weights: The shards on this rank of all parameters, by their names in the model's state dict.

    Raises:
        UserError: An optimizer is not in ``OPTIMIZERS``.
    """
    for leaf in _leaves(optimizer):
        yield from leaf.states(weights)


def set_step_count(optimizer: KeyedOptimizer, step: int) -> None:
    """Sets the number of steps done, on which the bias correction of Adam and its kin depends."""
    for leaf in _leaves(optimizer):
        leaf.set_step_count(step)


@dataclass(frozen=True)
class _FusedLeaf:
    """FBGEMM's optimizer of one group of tables."""

    prefix: str
    optimizer: EmbeddingFusedOptimizer

    @property
    def name(self) -> str:
        fused = self.optimizer._emb_module.optimizer
        return _known(fused_optimizer_name(fused), f"FBGEMM's {fused.value}")

    def parameter_names(self) -> Iterator[str]:
        for key in self.optimizer.params:
            yield CombinedOptimizer.prepend_opt_key(key, self.prefix)

    def states(self, _weights: Shards) -> Iterator[ParameterState]:
        states = OPTIMIZERS[self.name].states
        for parameter, weight in zip(self.parameter_names(), self.optimizer.params.values(), strict=True):
            has_weights = [shard.tensor.numel() > 0 for shard in weight.local_shards()]
            values = {}
            for (state, per), live in zip(states.items(), self.optimizer.state[weight].values(), strict=True):
                views = [shard.tensor.detach() for shard in compress(live.local_shards(), has_weights)]
                values[state] = [view.view(-1) if per is NumberPer.ROW else view for view in views]
            yield ParameterState(parameter, self.name, local_shards(weight), values)

    def set_step_count(self, step: int) -> None:
        lookup = self.optimizer._emb_module
        lookup.iter.fill_(step)
        lookup.iter_cpu.fill_(step)  # what is used; copied from the other only while it is 0


@dataclass(frozen=True)
class _TorchLeaf:
    """One of torch's optimizers, or one of their form."""

    prefix: str
    optimizer: KeyedOptimizerWrapper

    @property
    def name(self) -> str:
        inner = self.optimizer._optimizer
        return _known(torch_optimizer_name(inner), repr(inner).splitlines()[0].rstrip(" ("))

    def parameter_names(self) -> Iterator[str]:
        for key in self.optimizer.params:
            yield CombinedOptimizer.prepend_opt_key(key, self.prefix)

    def states(self, weights: Shards) -> Iterator[ParameterState]:
        kind = OPTIMIZERS[self.name]
        groups = {parameter: group for group in self.optimizer.param_groups for parameter in group["params"]}
        for name, parameter in zip(self.parameter_names(), self.optimizer.params.values(), strict=True):
            live = self.optimizer.state[parameter]
            if not live:
                live.update(first_state(kind, parameter, groups[parameter]))
            shards = weights[name]
            values = {
                state: [_view_of_shard(live[state], per, shard.tensor, parameter) for shard in shards]
                for state, per in kind.states.items()
            }
            yield ParameterState(name, self.name, shards, values)

    def set_step_count(self, step: int) -> None:
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"].fill_(step)


@dataclass(frozen=True)
class _ReplicatedLeaf:
    """Torch's form of a fused optimizer, of weights that every rank has."""

    prefix: str
    optimizer: ReplicatedOptimizer

    @property
    def name(self) -> str:
        return self.optimizer.name

    def parameter_names(self) -> Iterator[str]:
        for key in self.optimizer.params:
            yield CombinedOptimizer.prepend_opt_key(key, self.prefix)

    def states(self, weights: Shards) -> Iterator[ParameterState]:
        for name, parameter in zip(self.parameter_names(), self.optimizer.params.values(), strict=True):
            live, values = self.optimizer.live[parameter], {}
            for state, per in OPTIMIZERS[self.name].states.items():
                values[state] = [live[state].detach().view(-1) if per is NumberPer.ROW else live[state].detach()]
            yield ParameterState(name, self.name, weights[name], values)

    def set_step_count(self, step: int) -> None:
        self.optimizer.set_optimizer_step(step)


def _leaves(optimizer: KeyedOptimizer, prefix: str = "") -> Iterator[_FusedLeaf | _ReplicatedLeaf | _TorchLeaf]:
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
        _known(None, type(optimizer).__name__)


def _known(name: str | None, described: str) -> str:
    if name is None:
        raise UserError(
            f"{described} is an optimizer whose state a checkpoint has no names for; known: {', '.join(OPTIMIZERS)}, "
            "fused by FBGEMM or in a KeyedOptimizerWrapper. Others can be added to distembed.optim.OPTIMIZERS."
        )
    return name


def _view_of_shard(live: Tensor, per: NumberPer, shard: Tensor, parameter: Tensor) -> Tensor:
    """Returns the numbers of a state that belong to one shard of the parameter."""
    if per is NumberPer.PARAMETER:
        return live.view(1)
    # shards of one table are views of one parameter, one behind the other
    start = (shard.data_ptr() - parameter.data_ptr()) // parameter.itemsize
    weights_per_number = shard.shape[1] if per is NumberPer.ROW else 1
    count = shard.numel() // weights_per_number
    values = live.view(-1)[start // weights_per_number :][:count]
    return values if per is NumberPer.ROW else values.view(shard.shape)
