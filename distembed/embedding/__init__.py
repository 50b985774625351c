"""Embedding tables: their configuration, the unsharded reference modules, initialisation and id checks."""

from distembed.embedding.bag import CompositionalEmbeddingBag
from distembed.embedding.bag_collection import CompositionalEmbeddingBagCollection
from distembed.embedding.collection import CompositionalEmbeddingCollection
from distembed.embedding.config import CompositionalEmbeddingBagConfig, CompositionalEmbeddingConfig, vector_names
from distembed.embedding.materialise import materialise
from distembed.embedding.settings import (
    EmbeddingConfig,
    TableConfig,
    assignment_checksums,
    build_tables,
    reason_to_stay_full,
)

__all__ = [
    "CompositionalEmbeddingBag",
    "CompositionalEmbeddingBagCollection",
    "CompositionalEmbeddingBagConfig",
    "CompositionalEmbeddingCollection",
    "CompositionalEmbeddingConfig",
    "EmbeddingConfig",
    "TableConfig",
    "assignment_checksums",
    "build_tables",
    "materialise",
    "reason_to_stay_full",
    "vector_names",
]
