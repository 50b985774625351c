"""Table-wise sharding of compositional tables, by *carrier* tables.

TorchRec's input and output dists need to know of each table only its features, its output dimension and its rank. They
are given one carrier a compositional table, with the raw ids' features and the composed dimension, and so work
unchanged. The partition tables themselves are kept aside for the lookup on their owner.
"""

import copy
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_sharding import BaseEmbeddingLookup, EmbeddingShardingInfo, group_tables
from torchrec.distributed.embedding_types import (
    BaseGroupedFeatureProcessor,
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
)
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from torchrec.distributed.types import QuantizedCommCodecs, ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.embedding.config import CompositionalEmbeddingBagConfig
from distembed.sharding.lookup import CompositionalLookup, TableGroup


class CompositionalTableWiseSharding(TwPooledEmbeddingSharding):
    """TorchRec's table-wise sharding with carriers in its dists and :class:`CompositionalLookup` between them."""

    def __init__(
        self,
        tables: Sequence[CompositionalEmbeddingBagConfig],
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None,
        functions: Mapping[str, nn.Parameter],
    ) -> None:
        self._compositional_tables = tables
        self._functions = functions
        self._parts_of_rank: list[dict[str, list[ShardedEmbeddingTable]]] = []
        super().__init__(sharding_infos, env, device, qcomm_codecs_registry=qcomm_codecs_registry)

    def _shard(self, sharding_infos: list[EmbeddingShardingInfo]) -> list[list[ShardedEmbeddingTable]]:
        carriers = []
        for placed in super()._shard(sharding_infos):
            by_name = {part.name: part for part in placed}
            parts = {
                table.name: [by_name[part.name] for part in table.lookup_tables()]
                for table in self._compositional_tables
                if table.lookup_tables()[0].name in by_name
            }
            self._parts_of_rank.append(parts)
            local = [table for table in self._compositional_tables if table.name in parts]
            groups = _group(local, parts)
            carriers.append([_carrier(table, parts[table.name][0]) for group in groups for table in group])
        return carriers

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
    ) -> BaseEmbeddingLookup[KeyedJaggedTensor, torch.Tensor]:
        parts = self._parts_of_rank[self._rank]
        by_name = {table.name: table for table in self._compositional_tables}
        # TorchRec may have regrouped the carriers: their order, which is that of the features, is the one to follow
        local = [by_name[carrier.name] for carrier in self.embedding_tables_of_rank()]
        groups = [
            TableGroup(group, _tbe_configs([parts[table.name] for table in group])) for group in _group(local, parts)
        ]
        return CompositionalLookup(groups, self._functions, self._env, device if device is not None else self._device)

    def embedding_tables_of_rank(self) -> list[ShardedEmbeddingTable]:
        """Carriers on this rank, in the order of its features."""
        return [table for config in self._grouped_embedding_configs for table in config.embedding_tables]


def _tbe_configs(parts: Sequence[Sequence[ShardedEmbeddingTable]]) -> list[GroupedEmbeddingConfig]:
    """The TBE of each partition, from each table's partitions."""
    configs = []
    for tables in zip(*parts, strict=True):
        (config,) = group_tables([list(tables)])[0]
        configs.append(config)
    return configs


def _carrier(table: CompositionalEmbeddingBagConfig, part: ShardedEmbeddingTable) -> ShardedEmbeddingTable:
    carrier = copy.copy(part)
    carrier.name = table.name
    carrier.num_embeddings = carrier.local_rows = table.num_embeddings
    carrier.embedding_dim = carrier.local_cols = table.num_vectors * table.embedding_dim
    carrier.feature_names = list(table.feature_names)
    carrier.embedding_names = list(table.feature_names)
    return carrier


def _group(
    tables: Sequence[CompositionalEmbeddingBagConfig], parts: Mapping[str, Sequence[ShardedEmbeddingTable]]
) -> list[list[CompositionalEmbeddingBagConfig]]:
    """Tables that one TBE and one formula can serve, in order of first appearance."""
    groups: dict[Hashable, list[CompositionalEmbeddingBagConfig]] = {}
    for table in tables:
        first = parts[table.name][0]
        settings = tuple(sorted((key, str(value)) for key, value in (first.fused_params or {}).items()))
        key = (
            table.scheme.name,
            len(table.scheme.num_rows),
            _formula(table),
            table.embedding_dim,
            table.pooling,
            table.data_type,
            first.compute_kernel,
            settings,
        )
        groups.setdefault(key, []).append(table)
    return list(groups.values())


def _formula(table: CompositionalEmbeddingBagConfig) -> Hashable:
    """What tells compositions apart that differ; where there is nothing to compose, they do not."""
    if len(table.scheme.num_rows) == 1:
        return None
    return (table.combine.name, *[getattr(table.combine, name) for name in table.combine.settings])
