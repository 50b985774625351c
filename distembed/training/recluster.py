"""Re-clusters the ``clustered`` tables of a run between two steps, on the ranks that hold them.

Table by table, rank 0 gathers the weights and optimizer states of the partitions, clusters the vectors of all ids
(:mod:`distembed.embedding.recluster`), and sends each rank its shards of the result. So host memory holds copies of a
table's shards on each rank, and on rank 0 the table with its states once for each of these steps (for each rank, where
the table is replicated) and one block of columns of a full table.

The result depends on the weights, the counts of ids and the seed alone, and is part of the step: a checkpoint of the
step is made afterwards, and a run that was killed meanwhile clusters again.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import chain

import torch
from torch import Tensor, nn
from torchrec.optim.keyed import KeyedOptimizer

from distembed.base.errors import UserError
from distembed.base.ranks import Collectives
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
    model: nn.Module,
    optimizer: KeyedOptimizer,
    counts: Callable[[], Mapping[str, Tensor]],
    seed: int,
    collectives: Collectives,
    device: torch.device,
) -> None:
    """Re-clusters all clustered tables of a sharded model, between two steps; all ranks call it.

    Args:
        model: The model.
        optimizer: The optimizer of its parameters.
        counts: Returns how often each id occurs, by table; tables without counts weigh ids alike. Called on rank 0
            alone, and its error is raised on all ranks.
        seed: The seed of k-means.
        collectives: All ranks, in a gloo group whose timeout is longer than a clustering.
        device: The device of k-means.
    """
    weights = live_weights(model)
    live = {**weights, **live_states(optimizer, weights)}
    for path, table in compositional_tables(model):
        if isinstance(table.scheme, Clustered):
            module = path.removesuffix(table.name)
            parts = [_of_part(live, module, part.name) for part in table.partition_tables()]
            _recluster_table(table, parts, counts, seed, collectives, device)
    forget_copies(model)


def _recluster_table(
    table: CompositionalEmbeddingConfig,
    parts: list[dict[str, TensorShards]],
    counts: Callable[[], Mapping[str, Tensor]],
    seed: int,
    collectives: Collectives,
    device: torch.device,
) -> None:
    gathered = collectives.gather_on_first([_sent(own, collectives.rank) for own in parts])
    shares: list[list[list[Tensor]]] = []

    def cluster() -> Tensor:
        assert gathered is not None
        whole = [_whole(sent[part] for sent in gathered) for part in range(len(parts))]
        found = _clusters(table, whole, counts().get(table.name), seed, device)
        for sent in gathered:
            shares.append(
                [
                    [values[name][place].clone() for name, _, place, _ in own]
                    for values, own in zip(found.values, sent, strict=True)
                ]
            )
        return found.rows

    rows = collectives.on_first(cluster)
    received = collectives.scatter(shares or None)
    assert isinstance(table.scheme, Clustered)
    table.scheme.reassign(list(rows))
    for own, values in zip(parts, received, strict=True):
        live = [shard.tensor for shards in own.values() for shard in shards.shards]
        for tensor, value in zip(live, values, strict=True):
            tensor.copy_(value)


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


def _of_part(live: Mapping[str, TensorShards], module: str, part: str) -> dict[str, TensorShards]:
    """Returns the live weight of a partition, as ``weight``, and its states with a number for each row or weight."""
    (name,) = [name for name in live if name.startswith(module) and name.endswith(f".{part}.weight")]
    own = {key.removeprefix(f"{name}."): shards for key, shards in live.items() if key.startswith(f"{name}.")}
    num_rows = live[name].size[0]
    return {"weight": live[name], **{key: shards for key, shards in own.items() if shards.size[0] == num_rows}}


_Piece = tuple[str, tuple[torch.Size, torch.dtype], tuple[slice, ...], Tensor | None]
"""A weight's or state's name, size and dtype, the place of a shard, and its values; None where rank 0 has them too."""


def _sent(own: Mapping[str, TensorShards], rank: int) -> list[_Piece]:
    """Returns this rank's shards of a partition, on the CPU."""
    return [  # clones: a view would be sent with all tables of its storage
        (
            name,
            (shards.size, shards.dtype),
            tuple(slice(at, at + size) for at, size in zip(shard.offsets, shard.tensor.shape, strict=True)),
            None if shards.replicated and rank else shard.tensor.cpu().clone(),
        )
        for name, shards in own.items()
        for shard in shards.shards
    ]


def _whole(sent: Iterable[list[_Piece]]) -> dict[str, Tensor]:
    """Returns whole tensors, of the shards that all ranks sent; a rank without shards names no states."""
    whole: dict[str, Tensor] = {}
    for name, (size, dtype), place, values in chain.from_iterable(sent):
        if values is not None:
            whole.setdefault(name, torch.empty(size, dtype=dtype))[place] = values
    return whole
