"""What a rank writes of a checkpoint: its part of the live model, its optimizers, and its random state."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from torch import Tensor, nn
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.optim.keyed import KeyedOptimizer

from distembed.base.errors import UserError
from distembed.base.ranks import Collectives
from distembed.checkpoints.host_copies import host_copies
from distembed.checkpoints.optimizer_state import named_states
from distembed.checkpoints.random_state import random_state
from distembed.checkpoints.shards import TensorShards
from distembed.embedding.config import meaning_of_weights
from distembed.embedding.tables import CompositionalTables
from distembed.optim.kinds import OPTIMIZERS
from distembed.optim.live_state import optimizer_names, parameter_states
from distembed.sharding.parameters import ShardedParameters

RANKS = "ranks"
"""The section of what each rank has for itself: ``ranks.NAME.RANK``."""


@dataclass(frozen=True)
class Progress:
    """How far training has come, as a checkpoint keeps it.

    Attributes:
        values: What is the same on all ranks, as JSON holds it.
        tensors: What this rank alone has, by name.
    """

    values: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointContent:
    """What this rank writes of a checkpoint.

    Attributes:
        name: Name of the checkpoint within its store.
        state: Shards by section (``model``, ``optimizer``, ``random``, ``ranks``) and by name.
        last_file: What ``progress.json`` holds.
    """

    name: str
    state: Mapping[str, Mapping[str, TensorShards]]
    last_file: Mapping[str, Any]

    @classmethod
    def collect(
        cls,
        name: str,
        model: nn.Module,
        optimizer: KeyedOptimizer | None,
        progress: Progress,
        collectives: Collectives,
    ) -> "CheckpointContent":
        """Returns views of the live model; all ranks call it.

        Raises:
            UserError: An optimizer's states have no names, or the progress lacks the step that an optimizer needs.
        """
        weights = live_weights(model)
        states: dict[str, TensorShards] = {}
        optimizers: dict[str, str] = {}
        if optimizer is not None:
            states = live_states(optimizer, weights)
            optimizers = all_optimizer_names(optimizer, collectives)
            _require_step(optimizers.values(), progress.values)
        rank, world_size = collectives.rank, collectives.world_size
        state = {
            section: {key: shards.to_save(key, rank, world_size) for key, shards in entries.items()}
            for section, entries in (("model", weights), ("optimizer", states))
        }
        for section, tensors in (("random", random_state()), (RANKS, progress.tensors)):
            state[section] = {f"{name}.{rank}": TensorShards.from_value(value) for name, value in tensors.items()}
        last_file = {
            "world_size": world_size,
            "tables": describe_tables(model),
            "optimizers": {
                kind: sorted(name for name in optimizers if optimizers[name] == kind)
                for kind in set(optimizers.values())
            },
            "progress": dict(progress.values),
        }
        return cls(name, state, last_file)

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's part."""
        return sum(shards.num_bytes for entries in self.state.values() for shards in entries.values())

    def copied_to_host(self) -> "CheckpointContent":
        """Returns the same content in host memory of its own, which training leaves alone."""
        # all at once, so that small ones share the way
        every = [shards for entries in self.state.values() for shards in entries.values()]
        copies = iter(host_copies([shard.tensor for shards in every for shard in shards.shards]))
        state = {
            section: {key: shards.with_tensors(islice(copies, len(shards.shards))) for key, shards in entries.items()}
            for section, entries in self.state.items()
        }
        return CheckpointContent(self.name, state, self.last_file)


def live_weights(model: nn.Module) -> dict[str, TensorShards]:
    """Returns views of this rank's part of all weights and buffers, but those without elements."""
    weights = {name: TensorShards.from_value(value) for name, value in model.state_dict().items()}
    return {name: shards for name, shards in weights.items() if shards.size().numel()}


def live_states(optimizer: KeyedOptimizer, weights: Mapping[str, TensorShards]) -> dict[str, TensorShards]:
    """Returns views of this rank's part of all optimizer states, under the names ``PARAMETER.STATE``.

    Args:
        optimizer: The optimizer of the model's parameters.
        weights: The model's :func:`live_weights`.

    Raises:
        UserError: An optimizer is not in ``OPTIMIZERS``.
    """
    return {
        f"{parameter.parameter}.{name}": shards
        for parameter in parameter_states(optimizer, {name: own.shards for name, own in weights.items()})
        for name, shards in named_states(parameter, weights[parameter.parameter]).items()
    }


def all_optimizer_names(optimizer: KeyedOptimizer, collectives: Collectives) -> dict[str, str]:
    """Returns the name of the optimizer of every parameter of all ranks; all ranks call it.

    A rank alone knows only those of what it holds.
    """
    by_rank = collectives.gather(optimizer_names(optimizer))
    return {parameter: name for names in by_rank for parameter, name in names.items()}


def describe_tables(model: nn.Module) -> dict[str, str]:
    """Returns what the weights of compositional tables mean, in words, by module and table."""
    return {
        f"{path}.{table.name}".lstrip("."): meaning_of_weights(table)
        for path, module in get_unwrapped_module(model).named_modules()
        if isinstance(module, CompositionalTables | ShardedParameters)
        for table in module.tables()
    }


def _require_step(optimizers: Iterable[str], progress: Mapping[str, Any]) -> None:
    for name in set(optimizers):
        if OPTIMIZERS[name].corrects_bias and type(progress.get("step")) is not int:
            raise UserError(
                f"progress is {dict(progress)}, without the number of steps done, on which {name} depends; give "
                'progress={"step": ...}.'
            )
