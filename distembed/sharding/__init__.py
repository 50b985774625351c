"""Compositional tables under TorchRec's ``DistributedModelParallel``: the sharders and what they make.

Drop :class:`CompositionalEmbeddingBagCollectionSharder` and :class:`CompositionalEmbeddingCollectionSharder` into the
list of sharders of any ``DistributedModelParallel`` and ``EmbeddingShardingPlanner``.
"""

from distembed.sharding.bag_collection import ShardedCompositionalEmbeddingBagCollection
from distembed.sharding.collection import ShardedCompositionalEmbeddingCollection
from distembed.sharding.sharder import (
    CompositionalEmbeddingBagCollectionSharder,
    CompositionalEmbeddingCollectionSharder,
    default_sharders,
)

__all__ = [
    "CompositionalEmbeddingBagCollectionSharder",
    "CompositionalEmbeddingCollectionSharder",
    "ShardedCompositionalEmbeddingBagCollection",
    "ShardedCompositionalEmbeddingCollection",
    "default_sharders",
]
