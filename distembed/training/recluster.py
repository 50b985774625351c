"""Re-clusters the ``clustered`` tables of a run between two steps, on the ranks that hold them.

Table by table, every rank gets the whole weights and optimizer states of the partitions, rank 0 clusters the vectors of
all ids (:mod:`distembed.embedding.recluster`), and every rank takes its shards of the result. So memory holds one
compressed table more on each rank, and on rank 0 one block of columns of a full table.

The result depends on the weights, the counts of ids and the seed alone, and is part of the step: a checkpoint of the
step is made afterwards, and a run that was killed meanwhile clusters again.
"""

from collections.abc import Mapping
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn
from torchrec.optim.keyed import KeyedOptimizer

from distembed.base.errors import UserError
from distembed.base.ranks import Collectives, Ranks
from distembed.checkpoints.content import compositional_tables, live_states, live_weights
from distembed.checkpoints.shards import TensorShards
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.occurrences import id_weights
from distembed.embedding.recluster import Reclustered, recluster, require_clustered
from distembed.partitions import Clustered
from distembed.sharding.parameters import forget_copies


def clustered_tables(model: nn.Module) -> list[CompositionalEmbeddingConfig]:
    """Returns the tables of a model that can be re-clustered.

    Raises:
        UserError: There are none, or a table has another composition than ``concat_sum``, or two share a partition.
    """
    tables = [table for _, table in compositional_tables(model) if isinstance(table.scheme, Clustered)]
    if not tables:
        raise UserError("train.recluster is set, but no table has the partition clustered; leave it out.")
    for table in tables:
        require_clustered(table)
        others = [other.name for other in tables if other is not table and other.scheme is table.scheme]
        if others:
            raise UserError(
                f"tables {table.name!r} and {others[0]!r} have one Partition object, whose rows a clustering of either "
                "would change: give each table a Clustered of its own (ModelInputs does so for a suffix)."
            )
    return tables


@torch.no_grad()
def recluster_tables(
    model: nn.Module, optimizer: KeyedOptimizer, counts: Mapping[str, Tensor], seed: int, ranks: Ranks
) -> None:
    """Re-clusters all clustered tables of a sharded model, between two steps; all ranks call it.

    Args:
        model: The model.
        optimizer: The optimizer of its parameters.
        counts: How often each id occurs, by table; tables without counts weigh ids alike. Read on rank 0 alone.
        seed: The seed of k-means.
        ranks: This rank among all.
    """
    weights = live_weights(model)
    live, collectives = {**weights, **live_states(optimizer, weights)}, Collectives()
    for table in clustered_tables(model):
        parts = [_of_part(live, f".{part.name}.weight") for part in table.partition_tables()]
        whole = [_whole(own, collectives) for own in parts]
        found = collectives.on_first(partial(_clusters, table, whole, counts.get(table.name), seed, ranks.device))
        assert isinstance(table.scheme, Clustered)
        table.scheme.reassign(list(found.rows))
        for own, values in zip(parts, found.values, strict=True):
            for name, shards in own.items():
                for shard in shards.shards:
                    shard.tensor.copy_(values[name][_place(shard.offsets, shard.tensor)])
    forget_copies(model)


def _clusters(
    table: CompositionalEmbeddingConfig,
    whole: list[dict[str, Tensor]],
    counts: Tensor | None,
    seed: int,
    device: torch.device,
) -> Reclustered:
    weights = [values.pop("weight") for values in whole]
    of_ids = id_weights(table, counts).expand(table.num_embeddings)
    return recluster(table, weights, whole, of_ids, seed, device)


def _of_part(live: Mapping[str, TensorShards], suffix: str) -> dict[str, TensorShards]:
    """Returns the live weight of a partition, as ``weight``, and its states with a number for each row or weight."""
    (name,) = [name for name in live if name.endswith(suffix)]
    own = {key.removeprefix(f"{name}."): shards for key, shards in live.items() if key.startswith(f"{name}.")}
    num_rows = live[name].size[0]
    return {"weight": live[name], **{key: shards for key, shards in own.items() if shards.size[0] == num_rows}}


def _whole(own: Mapping[str, TensorShards], collectives: Collectives) -> dict[str, Tensor]:
    """Returns tensors of all ranks' shards, on the CPU; all ranks call it."""
    sent = [  # clones: a view would be sent with all tables of its storage
        (name, shards.size, shards.dtype, [(shard.offsets, shard.tensor.cpu().clone()) for shard in shards.shards])
        for name, shards in own.items()
        if collectives.rank == 0 or not shards.replicated
    ]
    whole: dict[str, Tensor] = {}
    for name, size, dtype, pieces in chain.from_iterable(collectives.gather(sent)):
        values = whole.setdefault(name, torch.empty(size, dtype=dtype))
        for offsets, piece in pieces:
            values[_place(offsets, piece)] = piece
    return whole


def _place(offsets: tuple[int, ...], piece: Tensor) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offsets, piece.shape, strict=True))
