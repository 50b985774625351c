"""Lookups on the rank that owns the tables: ids -> rows -> vectors -> composed -> pooled.

All partitions of a table live on its owner, so ids come in and composed, pooled vectors go out, as with a plain table.
Tables with the same scheme, composition and dimensions form a *group*, which is looked up in one go: one FBGEMM
table-batched embedding (TBE) a partition serves the T features of the group's tables::

    p_1 rows of all T features -> TBE 1 -> vectors [B, T, dim_1] \
    p_2 rows of all T features -> TBE 2 -> vectors [B, T, dim_2] / composed [B, T, width]

Where composing commutes with summing, bags are pooled by the TBEs themselves. Else each id becomes a bag of its own and
is composed first: FBGEMM's unpooled mode has a backward 40 times slower on the CPU than its pooled one. One TBE for the
tables of all partitions is slower too: the gradients of its output have to be put together again.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torchrec.distributed.embedding_lookup import CommOpGradientScaling, GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.composition import PathComposition
from distembed.embedding.config import CompositionalEmbeddingBagConfig
from distembed.sharding.distinct import DistinctIds, distinct_ids


@dataclass(frozen=True)
class TableGroup:
    """Tables that are looked up together, and TorchRec's config of the TBE of each partition that is looked up."""

    tables: list[CompositionalEmbeddingBagConfig]
    tbe_configs: list[GroupedEmbeddingConfig]


class CompositionalLookup(GroupedPooledEmbeddingsLookup):
    """Ids of all tables of one rank -> [B, sum of their widths], features in the order of ``groups``.

    Args:
        groups: what this rank owns.
        functions: weights of the functions of path-based tables by name, the same on every rank.
        env: the process group that the tables are sharded over.
        device: of the weights.
    """

    def __init__(
        self,
        groups: Sequence[TableGroup],
        functions: Mapping[str, nn.Parameter],
        env: ShardingEnv,
        device: torch.device | None,
    ) -> None:
        configs = [config for group in groups for config in group.tbe_configs]
        super().__init__(configs, pg=env.process_group, device=device, env=env)
        self._groups = [_make_group(group.tables, functions, env.world_size) for group in groups]
        self._feature_splits = [group.num_features for group in self._groups]

    def forward(self, sparse_features: KeyedJaggedTensor) -> Float[Tensor, "batch width"]:
        """Looks up, composes and pools."""
        if not self._groups:
            return self._dummy_embs_tensor.view(sparse_features.stride(), 0)
        tbes = iter(kernel.emb_module for kernel in self._emb_modules)
        parts = [
            group.forward(features, [next(tbes) for _ in range(group.num_looked_up)])
            for group, features in zip(self._groups, sparse_features.split(self._feature_splits), strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _make_group(
    tables: Sequence[CompositionalEmbeddingBagConfig], functions: Mapping[str, nn.Parameter], world_size: int
) -> "_Group":
    first = tables[0]
    if first.function_tables():
        return _PathGroup(tables, functions, world_size)
    pools_first = first.combine.commutes_with_sum or len(first.scheme.num_rows) == 1
    return _PooledGroup(tables) if pools_first and first.pooling != "max" else _PerIdGroup(tables)


class _Group(ABC):
    """Tables of one scheme and composition."""

    def __init__(self, tables: Sequence[CompositionalEmbeddingBagConfig]) -> None:
        first = tables[0]
        self.partitions = [table.scheme for table in tables for _ in table.feature_names]
        self.scheme = type(first.scheme)
        self.combine = first.combine
        self.pooling = first.pooling
        self.num_embeddings = max(table.num_embeddings for table in tables)
        self.num_features = len(self.partitions)
        self.num_looked_up = len(first.lookup_tables())

    @abstractmethod
    def forward(self, features: KeyedJaggedTensor, tbes: Sequence[nn.Module]) -> Float[Tensor, "batch width"]:
        """Looks up, composes and pools."""

    def rows(self, ids: Int64[Tensor, " ids"], counts: Sequence[int]) -> Int64[Tensor, "k ids"]:
        """Rows of every id in each partition; ids lie feature after feature, ``counts`` says how many of each."""
        if len(set(counts)) == 1:
            return self.scheme.rows_of_tables(self.partitions, ids.view(self.num_features, -1)).flatten(1)
        pieces = ids.split(list(counts))
        return torch.cat([p.rows(piece) for p, piece in zip(self.partitions, pieces, strict=True)], dim=1)

    def look_up(
        self, rows: Int64[Tensor, "looked_up ids"], offsets: Int64[Tensor, " bags_plus_1"], tbes: Sequence[nn.Module]
    ) -> list[Float[Tensor, "bags_of_a_feature features dim_j"]]:
        """Summed vectors of each partition for the bags that ``offsets`` cut, feature after feature."""
        looked_up = [tbe(indices=row, offsets=offsets) for tbe, row in zip(tbes, rows, strict=True)]
        return [vectors.unflatten(1, (self.num_features, -1)) for vectors in looked_up]


class _PooledGroup(_Group):
    """Pools each partition's vectors in its TBE and composes the sums."""

    def forward(self, features: KeyedJaggedTensor, tbes: Sequence[nn.Module]) -> Float[Tensor, "batch width"]:
        rows = self.rows(features.values().long(), features.length_per_key())
        pooled = self.combine.compose(self.look_up(rows, features.offsets().long(), tbes))
        if self.pooling == "mean":
            lengths = features.lengths().view(self.num_features, -1).t().unsqueeze(2)
            pooled = pooled / lengths.clamp(min=1)
        return pooled.flatten(1)


class _PerIdGroup(_Group):
    """Looks each id up as a bag of its own, composes, then pools."""

    def forward(self, features: KeyedJaggedTensor, tbes: Sequence[nn.Module]) -> Float[Tensor, "batch width"]:
        ids, lengths = features.values().long(), features.lengths()
        if ids.numel() == lengths.numel() and bool((lengths == 1).all()):
            return self.forward_single(ids, features.length_per_key(), tbes).flatten(1)
        # ids repeat within a batch, as those of clicks do; each is composed once
        distinct = distinct_ids(ids, features.length_per_key(), self.num_embeddings)
        pooled = distinct.pool(self.compose_distinct(distinct, tbes), features.offsets().long(), self.pooling)
        return pooled.unflatten(0, (self.num_features, -1)).transpose(0, 1).flatten(1)

    def forward_single(
        self, ids: Int64[Tensor, " ids"], counts: Sequence[int], tbes: Sequence[nn.Module]
    ) -> Float[Tensor, "batch features width"]:
        """Composed vectors where every bag holds one id."""
        offsets = torch.arange(len(ids) + 1, device=ids.device)
        return self.combine.compose(self.look_up(self.rows(ids, counts), offsets, tbes))

    def compose_distinct(self, distinct: DistinctIds, tbes: Sequence[nn.Module]) -> Float[Tensor, "distinct width"]:
        """Composed vector of every distinct id."""
        padded = self.look_up_padded(self.rows(distinct.ids, distinct.counts), distinct.counts, tbes)
        slots = distinct.slots()
        return self.combine.compose([vectors.flatten(0, 1).index_select(0, slots) for vectors in padded])

    def look_up_padded(
        self, rows: Int64[Tensor, "looked_up ids"], counts: Sequence[int], tbes: Sequence[nn.Module]
    ) -> list[Float[Tensor, "positions features dim_j"]]:
        """Vectors of the i-th id of every feature; features with fewer ids are padded with empty bags."""
        filled = torch.arange(max(1, *counts), device=rows.device) < torch.tensor(counts, device=rows.device).unsqueeze(
            1
        )
        offsets = rows.new_zeros(filled.numel() + 1)
        torch.cumsum(filled.flatten(), dim=0, out=offsets[1:])
        return self.look_up(rows, offsets, tbes)


class _PathGroup(_PerIdGroup):
    """Looks up the first partition only; the rows of the others are functions, stacked over the group's tables."""

    def __init__(
        self, tables: Sequence[CompositionalEmbeddingBagConfig], functions: Mapping[str, nn.Parameter], world_size: int
    ) -> None:
        super().__init__(tables)
        assert isinstance(self.combine, PathComposition)
        self._path = self.combine
        self._world_size = world_size
        self._functions = [[functions[part.name] for part in table.function_tables()] for table in tables]
        num_rows = torch.tensor([[len(weight) for weight in of_table] for of_table in self._functions])
        first_rows = num_rows.cumsum(0) - num_rows
        features_of_table = torch.tensor([len(table.feature_names) for table in tables])
        self._first_rows = first_rows.repeat_interleave(features_of_table, dim=0).t()  # [k - 1, features]

    def forward_single(
        self, ids: Int64[Tensor, " ids"], counts: Sequence[int], tbes: Sequence[nn.Module]
    ) -> Float[Tensor, "batch features width"]:
        # functions cost more than finding out which ids are the same
        distinct = distinct_ids(ids, counts, self.num_embeddings)
        by_row = distinct.of_id.view(self.num_features, -1).t().flatten()
        return self.compose_distinct(distinct, tbes).index_select(0, by_row).unflatten(0, (-1, self.num_features))

    def compose_distinct(self, distinct: DistinctIds, tbes: Sequence[nn.Module]) -> Float[Tensor, "distinct width"]:
        rows = self.rows(distinct.ids, distinct.counts)
        (padded,) = self.look_up_padded(rows[:1], distinct.counts, tbes)
        inputs = padded.flatten(0, 1).index_select(0, distinct.slots())
        counts = torch.tensor(distinct.counts, device=rows.device)
        self._first_rows = self._first_rows.to(rows.device)  # copied once
        first_rows = self._first_rows.repeat_interleave(counts, dim=1, output_size=rows.shape[1])
        return self._path.apply(inputs, self._stacked(), rows[1:] + first_rows)

    def _stacked(self) -> list[Float[Tensor, "rows function"]]:
        """The functions of all tables, one below the other, for each partition.

        Functions are replicated, and data-parallel training averages their gradients over the ranks; but only the
        owner has one, divided by the number of ranks on its way here, as those of sharded tables are meant to be.
        """
        stacked = [torch.cat(weights) for weights in zip(*self._functions, strict=True)]
        if self._world_size == 1:
            return stacked
        return [CommOpGradientScaling.apply(weight, self._world_size) for weight in stacked]
