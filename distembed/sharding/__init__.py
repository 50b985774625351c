"""Compositional tables under TorchRec's ``DistributedModelParallel``: the sharders and their sharded modules.

Drop :class:`CompositionalEmbeddingBagCollectionSharder` and :class:`CompositionalEmbeddingCollectionSharder` into the
list of sharders of any ``DistributedModelParallel`` and ``EmbeddingShardingPlanner``. The sharders of managed collision
take TorchRec's modules that map raw ids to slots (ZCH, MPZCH) around a compositional collection.
"""

from distembed.sharding.bag_collection import ShardedCompositionalEmbeddingBagCollection
from distembed.sharding.collection import ShardedCompositionalEmbeddingCollection
from distembed.sharding.managed_collision import (
    CompositionalManagedCollisionEmbeddingBagCollectionSharder,
    CompositionalManagedCollisionEmbeddingCollectionSharder,
)
from distembed.sharding.parameters import limit_gradients, round_at_random
from distembed.sharding.sharder import (
    CompositionalEmbeddingBagCollectionSharder,
    CompositionalEmbeddingCollectionSharder,
    default_sharders,
)

__all__ = [
    "CompositionalEmbeddingBagCollectionSharder",
    "CompositionalEmbeddingCollectionSharder",
    "CompositionalManagedCollisionEmbeddingBagCollectionSharder",
    "CompositionalManagedCollisionEmbeddingCollectionSharder",
    "ShardedCompositionalEmbeddingBagCollection",
    "ShardedCompositionalEmbeddingCollection",
    "default_sharders",
    "limit_gradients",
    "round_at_random",
]
