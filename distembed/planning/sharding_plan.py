"""TorchRec's plan from layouts and places: what its planner would have answered."""

from collections.abc import Sequence

import torch
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.planner.utils import placement as rank_and_device
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets
from torchrec.distributed.types import ParameterSharding, ShardingType, ShardMetadata

from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.planning.cluster import Cluster
from distembed.planning.costs import Layout
from distembed.sharding.table_slice import unit_size


def unit_sharding(
    table: CompositionalEmbeddingConfig, layout: Layout, ranks: Sequence[int], cluster: Cluster
) -> ParameterSharding:
    """Returns the answer for a table's unit.

    Args:
        table: The table.
        layout: How it is divided.
        ranks: Rank of each shard, range of columns after range, and of blocks of rows one after the other; of a
            table that every rank has, all ranks.
        cluster: The ranks.
    """
    if layout.sharding_type == ShardingType.DATA_PARALLEL.value:
        return ParameterSharding(layout.sharding_type, layout.compute_kernel, list(ranks), None)
    start, stop = layout.columns[0]
    sizes, offsets = calculate_shard_sizes_and_offsets(
        torch.empty(unit_size(table), device="meta"),
        cluster.world_size,
        cluster.ranks_per_node,
        layout.sharding_type,
        stop - start,
    )
    shards = [
        ShardMetadata(offset, size, rank_and_device(cluster.device.kind, rank, cluster.ranks_per_node))
        for offset, size, rank in zip(offsets, sizes, ranks, strict=True)
    ]
    return ParameterSharding(layout.sharding_type, layout.compute_kernel, list(ranks), EnumerableShardingSpec(shards))
