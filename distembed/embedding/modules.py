"""The embedding collections of a model: of bags and of sequences, ours and TorchRec's."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
)

from distembed.base.errors import UserError
from distembed.embedding.config import CompositionalEmbeddingBagConfig, CompositionalEmbeddingConfig
from distembed.embedding.tables import CompositionalTables
from distembed.partitions import Naive

EmbeddingModule: TypeAlias = CompositionalTables[Any] | EmbeddingBagCollection | EmbeddingCollection


def embedding_modules(model: nn.Module) -> dict[str, EmbeddingModule]:
    """Returns the unsharded embedding collections of a model by their path, in the order of its modules.

    Raises:
        UserError: Two collections have a table of the same name, which would be ambiguous in plans, reports and
            settings.
    """
    kinds = (CompositionalTables, EmbeddingBagCollection, EmbeddingCollection)
    found = {path: module for path, module in model.named_modules() if isinstance(module, kinds)}
    paths: dict[str, str] = {}
    for path, module in found.items():
        for table in table_configs(module):
            if table.name in paths:
                raise UserError(
                    f"the table {table.name!r} is in {paths[table.name]} and in {path}; give tables of different "
                    "collections different names."
                )
            paths[table.name] = path
    return found


def table_configs(module: EmbeddingModule) -> Sequence[CompositionalEmbeddingConfig]:
    """Returns the tables of a collection; one of TorchRec's is described as the full table that it is."""
    if isinstance(module, CompositionalTables):
        return module.tables()
    is_bag = isinstance(module, EmbeddingBagCollection)
    configs = module.embedding_bag_configs() if is_bag else module.embedding_configs()
    return [_full_table(config) for config in configs]


def weight_names_of_table(module: EmbeddingModule, table: CompositionalEmbeddingConfig) -> list[str]:
    """Returns the names of a table's weights in its collection's state dict, partition by partition."""
    prefix = "embedding_bags" if isinstance(module, EmbeddingBagCollectionInterface) else "embeddings"
    if not isinstance(module, CompositionalTables):
        return [f"{prefix}.{table.name}.weight"]
    return [
        f"functions.{part.name}" if part.is_function else f"{prefix}.{part.name}.weight"
        for part in table.partition_tables()
    ]


def _full_table(config: BaseEmbeddingConfig) -> CompositionalEmbeddingConfig:
    """Returns the config of a full table that equals one of TorchRec's."""
    fields = {
        "name": config.name,
        "num_embeddings": config.num_embeddings,
        "embedding_dim": config.embedding_dim,
        "feature_names": list(config.feature_names),
        "partition": Naive(config.num_embeddings),
        "data_type": config.data_type,
    }
    if isinstance(config, EmbeddingBagConfig):
        return CompositionalEmbeddingBagConfig(**fields, pooling=config.pooling.value.lower())
    return CompositionalEmbeddingConfig(**fields)
