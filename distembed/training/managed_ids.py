"""Evicts managed ids between two steps, and starts the rows of evicted ids again where no other slot shares them.

An id that gets a slot finds the slot's rows. A row of one slot alone is *private*: it starts again, from its initial
values and first optimizer states, unless ``eviction.reset`` is off. A row that other slots share, as all rows of a
quotient-remainder table, is kept, since it is trained for the ids in the other slots too.

An eviction is part of its step: no batch is in flight, and a checkpoint of the step is made afterwards.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from torchrec.optim.keyed import KeyedOptimizer

from distembed.base.ranks import Collectives, Ranks
from distembed.checkpoints.content import compositional_tables, live_weights
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.initialization import SeededInit
from distembed.embedding.managed import ManagedIds
from distembed.optim.kinds import OPTIMIZERS, NumberPer
from distembed.optim.live_state import LocalShard, parameter_states
from distembed.sharding.parameters import forget_copies

_SLOTS_AT_ONCE = 2**20


def managed_tables(model: nn.Module) -> list[tuple[str, CompositionalEmbeddingConfig, ManagedIds]]:
    """Returns the tables of managed ids of a model, with their paths ``MODULE.TABLE`` and identities."""
    return [(path, table, table.managed) for path, table in compositional_tables(model) if table.managed is not None]


def evicted_ids(model: nn.Module, ranks: Ranks) -> dict[str, int]:
    """Returns, on rank 0, the number of ids that each table has evicted; all ranks call it.

    A run that starts from another run's weights continues the other run's numbers.
    """
    own = {table.name: managed.num_evicted for _, table, managed in managed_tables(model)}
    totals = ranks.sum(torch.tensor([*own.values()], dtype=torch.long))
    return dict(zip(own, totals.tolist(), strict=True))


@torch.no_grad()
def evict_ids(model: nn.Module, optimizer: KeyedOptimizer, step: int) -> dict[str, str]:
    """Evicts ids of the tables that are due after a step; all ranks call it, between two steps.

    Args:
        model: The sharded model.
        optimizer: The optimizer of its parameters.
        step: The number of steps done.

    Returns:
        A note on each table that did not count some ids, since all candidates of their buckets were used.
    """
    due = [each for each in managed_tables(model) if step % each[2].sizes.config.eviction.every == 0]
    if not due:
        return {}
    own = {path: (managed.num_refused, managed.evict()) for path, _, managed in due}
    gathered = Collectives().gather(own)  # rows lie on other ranks than their slots
    evicted = {path: torch.cat([own[path][1] for own in gathered]) for path in own}
    reset: dict[tuple[str, str], tuple[SeededInit, Tensor]] = {}
    for path, table, managed in due:
        if managed.sizes.config.eviction.reset and len(evicted[path]):
            rows, private = table.scheme.rows(evicted[path]), private_rows(table)
            for part in table.partition_tables():
                own_rows = rows[part.number]
                module = path.removesuffix(table.name)
                reset[module, part.name] = part.init, own_rows[private[part.number][own_rows]].unique()
    if any(len(rows) for _, rows in reset.values()):
        _reset_rows(model, optimizer, reset)
        forget_copies(model)
    refused = {path: sum(own[path][0] for own in gathered) for path in own}
    return {
        managed.sizes.name: f"note: table {managed.sizes.name!r} did not count {refused[path]:,} occurrences of ids "
        f"before the eviction at step {step}, since all candidates of their buckets were used; raise "
        "ids.admission.candidates, or lower ids.eviction.every"
        for path, _, managed in due
        if refused[path]
    }


def private_rows(table: CompositionalEmbeddingConfig) -> list[Bool[Tensor, " rows"]]:
    """Returns, for each partition, which rows belong to exactly one id of a table."""
    counts = [torch.zeros(num_rows, dtype=torch.int32) for num_rows in table.scheme.num_rows]
    for start in range(0, table.num_embeddings, _SLOTS_AT_ONCE):
        slots = torch.arange(start, min(start + _SLOTS_AT_ONCE, table.num_embeddings))
        for own, rows in zip(counts, table.scheme.rows(slots), strict=True):
            own.index_add_(0, rows, torch.ones_like(rows, dtype=torch.int32))
    return [own == 1 for own in counts]


def _reset_rows(
    model: nn.Module, optimizer: KeyedOptimizer, reset: Mapping[tuple[str, str], tuple[SeededInit, Tensor]]
) -> None:
    """Gives rows of partitions, by module and partition, their initial values and first optimizer states."""
    rows: dict[str, Tensor] = {}
    weights = live_weights(model)
    for name, shards in weights.items():
        for (module, part), (init, own_rows) in reset.items():
            if name.startswith(module) and name.endswith(f".{part}.weight"):
                rows[name] = own_rows
                for shard, local in _local_rows(shards.shards, own_rows):
                    columns = slice(shard.offsets[1], shard.offsets[1] + shard.tensor.shape[1])
                    shard.tensor[local] = init.take(local + shard.offsets[0], columns, shard.tensor)
    for states in parameter_states(optimizer, {name: weights[name].shards for name in weights}):
        kind = OPTIMIZERS[states.optimizer]
        for name, values in states.values.items() if states.parameter in rows else ():
            if kind.states[name] is not NumberPer.PARAMETER:
                places = zip(states.shards, values, strict=True)
                shards_of_state = [LocalShard(shard.offsets, value) for shard, value in places]
                for shard, local in _local_rows(shards_of_state, rows[states.parameter]):
                    shard.tensor[local] = kind.initial_values.get(name, 0.0)


def _local_rows(shards: Sequence[LocalShard], rows: Tensor) -> Iterator[tuple[LocalShard, Tensor]]:
    """Yields each shard that has some of the rows, and these rows' indices in it."""
    for shard in shards:
        local = rows - shard.offsets[0]
        local = local[(local >= 0) & (local < len(shard.tensor))]
        if len(local):
            yield shard, local
