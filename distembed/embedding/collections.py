"""The unsharded modules: KeyedJaggedTensor of ids -> pooled vectors of bags, or a vector for each id of sequences.

They are the reference for everything sharded: plain autograd, one table after another. They also declare the parameters
that sharders place: ``embedding_bags.<table>__p<j>.weight``, and ``embeddings.`` of sequences.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from distembed.base.errors import UserError
from distembed.base.tracing import is_proxy, is_traced, one_node
from distembed.embedding.bag import pool
from distembed.embedding.batches import bags_of_rows, jagged_vectors, require_bags_for_rows
from distembed.embedding.config import CompositionalEmbeddingBagConfig, CompositionalEmbeddingConfig, vector_names
from distembed.embedding.tables import CompositionalTables, torchrec_configs
from distembed.partitions import Naive


class CompositionalEmbeddingBagCollection(
    CompositionalTables[CompositionalEmbeddingBagConfig], EmbeddingBagCollectionInterface
):
    """Takes the place of TorchRec's ``EmbeddingBagCollection``, with compositional tables.

    For each id the k rows' vectors are looked up and composed; only then are the vectors of a bag pooled. Keys of the
    output are the features in the tables' order; with feature generation a feature has a key for each partition,
    ``<feature>__p<j>``. An empty bag gives zeros.

    Args:
        tables: At least one table; names and features must be unique.
        device: The device of the weights; on ``meta`` they are left to ``DistributedModelParallel``.
        is_weighted: Whether composed vectors are multiplied by the batch's per-sample weights.

    Raises:
        UserError: Names are not unique, or ``is_weighted`` is set and a table has pooling max.
    """

    def __init__(
        self,
        tables: Sequence[CompositionalEmbeddingBagConfig],
        device: torch.device | str | None = None,
        is_weighted: bool = False,
    ) -> None:
        super().__init__(tables, device)
        for table in tables if is_weighted else ():
            if table.pooling == "max":
                raise UserError(
                    f"table {table.name!r} has pooling max, which goes with no per-sample weights; use sum or mean, or "
                    "put the table into a collection without is_weighted."
                )
        self._is_weighted = is_weighted
        self.embedding_bags = self._make_lookups(_embedding_bag)
        self.reset_parameters()

    @property
    def _lookups(self) -> nn.ModuleDict:
        return self.embedding_bags

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks ids up, composes and pools; in training, replaces ids of tables with SSE first.

        Raises:
            UserError: The batch is damaged, an id lies outside of its table whose policy is ``error``, a feature is
                missing, features have unequal numbers of bags without inverse indices, or the batch has no weights
                although ``is_weighted`` is set.
        """
        if is_proxy(features):
            return one_node(self, features)
        features = maybe_td_to_kjt(features)
        mapped = self.map_ids(features)
        keys: list[str] = []
        dims: list[int] = []
        pooled = []
        bags = bags_of_rows(features.inverse_indices_or_none())
        one_each = not self._is_weighted and _has_one_id_a_bag(features)
        for feature in self.embed(features, mapped):
            names = feature.table.vector_names(feature.name)
            keys += names
            dims += [feature.table.embedding_dim] * len(names)
            if self._is_weighted and feature.weights is None:
                raise UserError(
                    "The collection has is_weighted=True, but the KeyedJaggedTensor has no weights; make it with "
                    "weights=, or the collection without is_weighted."
                )
            if one_each:  # pooling one unweighted vector returns it
                vectors = feature.vectors
            else:
                weights = feature.weights if self._is_weighted else None
                vectors = pool(feature.vectors, feature.lengths, feature.table.pooling, weights)
            pooled.append(vectors if bags is None else vectors.index_select(0, bags[feature.name]))
        require_bags_for_rows(features)
        return KeyedTensor(keys, dims, torch.cat(pooled, dim=1))

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Returns a TorchRec config for each table, in which models find features and dimensions.

        Raises a UserError if TorchRec's sharder of its own collections calls it.
        """
        self._require_own_sharder()
        return self._shown_configs

    def embedding_configs(self) -> list[EmbeddingBagConfig]:
        """Returns :meth:`embedding_bag_configs`, under the name that TorchRec's managed collision calls."""
        return self.embedding_bag_configs()

    @cached_property
    def _shown_configs(self) -> list[EmbeddingBagConfig]:
        return torchrec_configs(EmbeddingBagConfig, self._tables, _pooling)

    def is_weighted(self) -> bool:
        """Returns whether per-sample weights are applied."""
        return self._is_weighted


class CompositionalEmbeddingCollection(CompositionalTables[CompositionalEmbeddingConfig], EmbeddingCollectionInterface):
    """Takes the place of TorchRec's ``EmbeddingCollection``, with compositional tables.

    Parameters are named ``embeddings.<table>__p<j>.weight``. With feature generation a feature has one output for each
    partition, ``<feature>__p<j>``.

    Args:
        tables: At least one table, all of the same ``embedding_dim``; names and features must be unique.
        device: The device of the weights; on ``meta`` they take no memory.
        need_indices: Whether the outputs carry their ids, as weights.

    Raises:
        UserError: Names are not unique, or the tables' dimensions differ.
    """

    def __init__(
        self,
        tables: Sequence[CompositionalEmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
    ) -> None:
        super().__init__(tables, device)
        for table in tables:
            if table.embedding_dim != tables[0].embedding_dim:
                raise UserError(
                    f"embedding_dim of table {table.name!r} is {table.embedding_dim} and that of {tables[0].name!r} "
                    f"{tables[0].embedding_dim}; the tables of a CompositionalEmbeddingCollection have the same: make "
                    "one collection for each."
                )
        self._need_indices = need_indices
        self.embeddings = self._make_lookups(_embedding)
        self.reset_parameters()

    @property
    def _lookups(self) -> nn.ModuleDict:
        return self.embeddings

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Looks ids up and composes; in training, replaces ids of tables with SSE first.

        Each output has its feature's lengths, or with inverse indices a length for each row.

        Raises:
            UserError: The batch is damaged, an id lies outside of its table whose policy is ``error``, or a feature is
                missing.
        """
        if is_proxy(features):
            node = one_node(self, features)
            return {key: node[key] for key in vector_names(self._tables)}
        features = maybe_td_to_kjt(features)
        mapped = self.map_ids(features)
        bags = bags_of_rows(features.inverse_indices_or_none())
        outputs: dict[str, JaggedTensor] = {}
        for feature in self.embed(features, mapped):
            keys, dim = feature.table.vector_names(feature.name), self.embedding_dim()
            ids = feature.ids if self._need_indices else None
            bag_of_row = None if bags is None else bags[feature.name]
            outputs |= jagged_vectors(keys, dim, feature.vectors, feature.lengths, ids, bag_of_row)
        return outputs

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Returns a TorchRec config for each table; raises a UserError to TorchRec's sharder of its own collections."""
        self._require_own_sharder()
        return self._shown_configs

    @cached_property
    def _shown_configs(self) -> list[EmbeddingConfig]:
        return torchrec_configs(EmbeddingConfig, self._tables)

    def embedding_dim(self) -> int:
        """Returns the dimension of a vector."""
        return self._tables[0].embedding_dim

    def need_indices(self) -> bool:
        """Returns whether the outputs carry their ids."""
        return self._need_indices

    def embedding_names_by_table(self) -> list[list[str]]:
        """Returns the keys of the output for each table."""
        return [[key for name in table.feature_names for key in table.vector_names(name)] for table in self._tables]


def _has_one_id_a_bag(features: KeyedJaggedTensor) -> bool:
    """Returns whether each bag surely has exactly one id; False in traces, and on a GPU, where looking would wait."""
    lengths, values = features.lengths_or_none(), features.values()
    if lengths is None or is_traced() or lengths.device.type != "cpu":
        return False
    return len(values) == len(lengths) and bool((lengths == 1).all())


def _pooling(table: CompositionalEmbeddingBagConfig) -> dict[str, PoolingType]:
    """Returns a table's pooling as a field of TorchRec's config; maxima, which TorchRec lacks, appear as sums."""
    return {"pooling": PoolingType.MEAN if table.pooling == "mean" else PoolingType.SUM}


def _embedding_bag(weight: Tensor) -> nn.Module:
    """Returns a module that holds the vectors of one partition."""
    num_rows, dim = weight.shape
    return nn.EmbeddingBag(num_rows, dim, _weight=weight, mode="sum", include_last_offset=True)


def _embedding(weight: Tensor) -> nn.Module:
    """Returns a module that holds the vectors of one partition."""
    num_rows, dim = weight.shape
    return nn.Embedding(num_rows, dim, _weight=weight)


EmbeddingModule: TypeAlias = CompositionalTables[Any] | EmbeddingBagCollection | EmbeddingCollection


def embedding_modules(model: nn.Module) -> dict[str, EmbeddingModule]:
    """Returns the unsharded embedding collections of a model, ours and TorchRec's, by path in the order of its modules.

    Raises a UserError if two collections have tables of one name: plans and exports know tables by name.
    """
    kinds = (CompositionalTables, EmbeddingBagCollection, EmbeddingCollection)
    modules = {path: module for path, module in model.named_modules() if isinstance(module, kinds)}
    paths: dict[str, str] = {}
    for path, module in modules.items():
        for table in table_configs(module):
            if table.name in paths:
                raise UserError(
                    f"the table {table.name!r} is in {paths[table.name]} and in {path}; give tables of different "
                    "collections different names."
                )
            paths[table.name] = path
    return modules


def table_configs(module: EmbeddingModule) -> Sequence[CompositionalEmbeddingConfig]:
    """Returns the tables of a collection; TorchRec's tables are described as full tables."""
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
