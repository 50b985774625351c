"""Compositional tables under TorchRec's ``DistributedModelParallel``: the sharder and what it makes.

Drop :class:`CompositionalEmbeddingBagCollectionSharder` into the list of sharders of any ``DistributedModelParallel``
and ``EmbeddingShardingPlanner``.
"""

from distembed.sharding.bag_collection import ShardedCompositionalEmbeddingBagCollection
from distembed.sharding.sharder import CompositionalEmbeddingBagCollectionSharder

__all__ = ["CompositionalEmbeddingBagCollectionSharder", "ShardedCompositionalEmbeddingBagCollection"]
