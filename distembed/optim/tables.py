"""The parameters of a model that are vectors of embedding tables: a collection of embeddings owns them."""

from typing import Any

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

    Tables with ``dense_gradient`` are not among them: they are trained like networks.

    Args:
        model: A model as it was built, or the ``DistributedModelParallel`` of it.
    """
    return [
        parameter
        for collection in model.modules()
        if isinstance(collection, _COLLECTIONS)
        for attribute in _VECTORS
        if isinstance(vectors := getattr(collection, attribute, None), nn.ModuleDict)
        for name, own in vectors.items()
        if name not in _dense_weights(collection)
        for parameter in own.parameters()
    ]


def _dense_weights(collection: nn.Module) -> set[str]:
    """Returns the names of the weights of a collection's tables that have gradients in all rows."""
    tables: Any = getattr(collection, "tables", list)  # TorchRec's own have none
    return {part.name for table in tables() if table.dense_gradient for part in table.lookup_tables()}
