"""Embedding tables: their configuration, the unsharded reference module, initialisation and id checks."""

from distembed.embedding.bag_collection import CompositionalEmbeddingBagCollection
from distembed.embedding.config import (
    CompositionalEmbeddingBagConfig,
    EmbeddingConfig,
    TableConfig,
    TableOverride,
    build_tables,
)

__all__ = [
    "CompositionalEmbeddingBagCollection",
    "CompositionalEmbeddingBagConfig",
    "EmbeddingConfig",
    "TableConfig",
    "TableOverride",
    "build_tables",
]
