"""The parts of a checkpoint that a rank writes: weights, optimizer states, random state, and tensors of its own.

The names of tensors do not depend on the layout::

    model.NAME              a weight or buffer of the model, or the state of a table's partitions
    average.NAME            a moving average of a weight, see distembed.optim.averages
    optimizer.NAME.STATE    see distembed.checkpoints.optimizer_state
    random.DEVICE.RANK      the state of torch's random number generators on a rank
    ranks.NAME.RANK         a tensor that a rank has for itself, for example its place in the dataset

A rank continues its random state if the number of ranks is the same. On another number of ranks each rank starts a new
stream, seeded by a hash of the first rank's saved state, the number of ranks and its own number, so that no rank
repeats the numbers of another.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.optim.keyed import KeyedOptimizer

from distembed.base.errors import UserError
from distembed.base.ranks import Collectives
from distembed.checkpoints.host_copies import host_copies
from distembed.checkpoints.optimizer_state import named_states
from distembed.checkpoints.shards import TensorShards
from distembed.embedding.config import CompositionalEmbeddingConfig, meaning_of_weights
from distembed.embedding.managed import ManagedIds
from distembed.embedding.partition_state import HasPartitionState
from distembed.optim.kinds import OPTIMIZERS
from distembed.optim.live_state import LocalShard, optimizer_names, parameter_states

AVERAGE = "average."
"""Beginning of the names of averaged weights."""


@dataclass(frozen=True)
class Progress:
    """How far training has come.

    Attributes:
        values: Values for JSON, equal on all ranks.
        tensors: Tensors of this rank alone.
        averages: Averages of weights that every rank has, by the names of the weights.
    """

    values: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    averages: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointContent:
    """This rank's part of a checkpoint: the shards that it writes, by name, and the values of ``progress.json``."""

    name: str
    tensors: Mapping[str, TensorShards]
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
        """Returns this rank's part of a checkpoint, as views of the live model; all ranks call it.

        Raises a :class:`UserError` for an optimizer that is not in ``OPTIMIZERS``, or where ``progress`` lacks the
        ``step`` that an optimizer with bias correction needs.
        """
        weights = live_weights(model)
        states: dict[str, TensorShards] = {}
        optimizers: dict[str, str] = {}
        if optimizer is not None:
            states = live_states(optimizer, weights)
            optimizers = all_optimizer_names(optimizer, collectives)
            _require_step(optimizers.values(), progress.values)
        rank, world_size = collectives.rank, collectives.world_size
        tensors = tensors_to_save(weights, states, rank, world_size)
        for weight, average in progress.averages.items():
            tensors[f"{AVERAGE}{weight}"] = TensorShards.from_value(average).to_save(weight, rank, world_size)
        for section, values in (("random", random_state()), ("ranks", progress.tensors)):
            tensors |= {f"{section}.{key}.{rank}": TensorShards.from_value(value) for key, value in values.items()}
        last_file = {
            "world_size": world_size,
            "tables": describe_tables(model),
            "optimizers": {
                kind: sorted(name for name in optimizers if optimizers[name] == kind)
                for kind in set(optimizers.values())
            },
            "progress": dict(progress.values),
        }
        return cls(name, tensors, last_file)

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's part."""
        return sum(shards.num_bytes for shards in self.tensors.values())

    def copied_to_host(self) -> "CheckpointContent":
        """Returns the content with copies of all tensors in host memory, so that training may change the originals."""
        # all at once, so that small tensors share one transfer
        copies = iter(host_copies([shard.tensor for shards in self.tensors.values() for shard in shards.shards]))
        tensors = {key: shards.with_tensors(islice(copies, len(shards.shards))) for key, shards in self.tensors.items()}
        return CheckpointContent(self.name, tensors, self.last_file)


def tensors_to_save(
    weights: Mapping[str, TensorShards], states: Mapping[str, TensorShards], rank: int, world_size: int
) -> dict[str, TensorShards]:
    """Returns the blocks of weights and optimizer states that a rank saves, by their names in a checkpoint."""
    # the key without its prefix decides which rank saves which block of a replicated tensor (TensorShards.to_save)
    key_and_shards = {f"model.{key}": (key, shards) for key, shards in weights.items()}
    key_and_shards |= {f"optimizer.{key}": (key, shards) for key, shards in states.items()}
    return {name: shards.to_save(key, rank, world_size) for name, (key, shards) in key_and_shards.items()}


def live_weights(model: nn.Module) -> dict[str, TensorShards]:
    """Returns views of this rank's part of all weights, buffers and states of partitions that have elements.

    Identities of managed ids are called ``TABLE__entries`` and ``TABLE__used``.
    """
    weights = {name: TensorShards.from_value(value) for name, value in model.state_dict().items()}
    for path, table in compositional_tables(model):
        if table.managed is not None:
            weights |= {f"{path}__{name}": own for name, own in _identities(table.managed).items()}
    return {name: shards for name, shards in weights.items() if shards.size.numel()}


def _identities(managed: ManagedIds) -> dict[str, TensorShards]:
    """Returns views of this rank's identities, by the number of the bucket, as the first of their dimensions."""
    return {
        name: TensorShards(
            (managed.sizes.num_buckets, *state.shape[1:]),
            state.dtype,
            [
                LocalShard((int(bucket), *[0] * (state.dim() - 1)), state[row : row + 1])
                for row, bucket in enumerate(managed.buckets)
            ],
            replicated=managed.world_size == 1,
        )
        for name, state in managed.state.items()
    }


def live_states(optimizer: KeyedOptimizer, weights: Mapping[str, TensorShards]) -> dict[str, TensorShards]:
    """Returns views of this rank's part of all optimizer states, under the names ``PARAMETER.STATE``."""
    return {
        f"{parameter.parameter}.{name}": shards
        for parameter in parameter_states(optimizer, {name: weight.shards for name, weight in weights.items()})
        for name, shards in named_states(parameter, weights[parameter.parameter]).items()
    }


def all_optimizer_names(optimizer: KeyedOptimizer, collectives: Collectives) -> dict[str, str]:
    """Returns the name of the optimizer of every parameter of all ranks; all ranks call it."""
    by_rank = collectives.gather(optimizer_names(optimizer))  # a rank knows only the parameters that it holds
    return {parameter: name for names in by_rank for parameter, name in names.items()}


def describe_tables(model: nn.Module) -> dict[str, str]:
    """Returns in words how each compositional table makes vectors of its weights, by module and table."""
    return {path: meaning_of_weights(table) for path, table in compositional_tables(model)}


def compositional_tables(model: nn.Module) -> Iterator[tuple[str, CompositionalEmbeddingConfig]]:
    """Yields the compositional tables of a model, sharded or not, with their paths ``MODULE.TABLE``."""
    for path, module in get_unwrapped_module(model).named_modules():
        if isinstance(module, HasPartitionState):
            for table in module.tables():
                yield f"{path}.{table.name}".lstrip("."), table


def _require_step(optimizers: Iterable[str], progress: Mapping[str, Any]) -> None:
    for name in set(optimizers):
        if OPTIMIZERS[name].corrects_bias and type(progress.get("step")) is not int:
            raise UserError(
                f"progress is {dict(progress)}, without the number of steps done, on which {name} depends; give "
                'progress={"step": ...}.'
            )


def random_state() -> dict[str, Tensor]:
    """Returns the state of this process's generators, as uint8 tensors, by device type."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_state(first: Tensor, saved_states: Mapping[str, Tensor], rank: int, world_size: int) -> None:
    """Sets this process's generators to the saved states, or to a new stream where a device has none.

    ``first`` is the state of rank 0's CPU generator, from which new streams are seeded. ``saved_states`` has the
    states of this rank's generators by device type; it is empty if the number of ranks has changed.
    """
    digest = hashlib.sha256(first.numpy().tobytes() + f"{rank}/{world_size}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little", signed=True))  # CUDA's too
    if "cpu" in saved_states:
        torch.set_rng_state(saved_states["cpu"])
    if "cuda" in saved_states and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved_states["cuda"])
