"""Embedding tables: their configuration, the unsharded reference modules, initialisation and id checks."""

from typing import TYPE_CHECKING

from distembed.base.lazy import imports_on_demand

if TYPE_CHECKING:
    from distembed.embedding.bag import CompositionalEmbeddingBag
    from distembed.embedding.build import build_tables, reason_to_stay_full, table_features
    from distembed.embedding.collections import CompositionalEmbeddingBagCollection, CompositionalEmbeddingCollection
    from distembed.embedding.composed_vectors import materialise
    from distembed.embedding.config import CompositionalEmbeddingBagConfig, CompositionalEmbeddingConfig, vector_names
    from distembed.embedding.settings import EmbeddingConfig, TableConfig, assignment_checksums

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
    "table_features",
    "vector_names",
]
__getattr__ = imports_on_demand(__name__)
