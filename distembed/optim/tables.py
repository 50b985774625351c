"""Which parameters of a model are vectors of embedding tables: those that a collection of embeddings owns."""

from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface

from distembed.embedding.tables import CompositionalTables

# the sharded compositional collections are TorchRec's too
_COLLECTIONS = (
    CompositionalTables,
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
)
_VECTORS = ("embedding_bags", "embeddings")
"""Where collections of bags and of sequences hold their vectors; functions of path-based tables lie elsewhere."""


def table_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that hold vectors of tables, compositional or TorchRec's own, in any collection.

    Args:
        model: A model as it was built, or the ``DistributedModelParallel`` of it.
    """
    return [
        parameter
        for collection in model.modules()
        if isinstance(collection, _COLLECTIONS)
        for attribute in _VECTORS
        if isinstance(vectors := getattr(collection, attribute, None), nn.ModuleDict)
        for parameter in vectors.parameters()
    ]
