"""Lookups on the rank that owns the tables: ids -> rows -> vectors -> composed -> pooled.

All partitions of a table live on its owner, so ids come in and composed, pooled vectors go out, as with a plain table.
Tables with the same scheme, composition and dimensions form a *group*: one FBGEMM table-batched embedding (TBE) serves
its k * T partition tables, ordered by partition first::

    TBE output [B, *]:  | p0 of table 0 | p0 of table 1 | ... | p1 of table 0 | p1 of table 1 | ...
    seen as k pieces:   | vectors[0]: [B, T, dim_0]           | vectors[1]: [B, T, dim_1]           |

Where composing commutes with summing, bags are pooled by the TBE itself. Else (product) each id becomes a bag of its
own: FBGEMM's unpooled mode has a backward 40 times slower on the CPU than its pooled one.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.embedding.config import CompositionalEmbeddingBagConfig


class CompositionalLookup(GroupedPooledEmbeddingsLookup):
    """Ids of all tables of one rank -> [B, sum of their dimensions], features in the order of ``groups``.

    Args:
        groups: tables of each group, with TorchRec's config of the group's TBE.
        env: the process group that the tables are sharded over.
        device: of the weights.
    """

    def __init__(
        self,
        groups: Sequence[tuple[list[CompositionalEmbeddingBagConfig], GroupedEmbeddingConfig]],
        env: ShardingEnv,
        device: torch.device | None,
    ) -> None:
        super().__init__([config for _, config in groups], pg=env.process_group, device=device, env=env)
        self._groups = [
            (_PooledGroup if tables[0].combine.commutes_with_sum or _is_plain(tables[0]) else _PerIdGroup)(tables)
            for tables, _ in groups
        ]
        self._feature_splits = [group.num_features for group in self._groups]

    def forward(self, sparse_features: KeyedJaggedTensor) -> Float[Tensor, "batch dims"]:
        """Looks up, composes and pools."""
        if not self._groups:
            return self._dummy_embs_tensor.view(sparse_features.stride(), 0)
        parts = [
            group.forward(features, tbe.emb_module)
            for group, tbe, features in zip(
                self._groups, self._emb_modules, sparse_features.split(self._feature_splits), strict=True
            )
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _is_plain(table: CompositionalEmbeddingBagConfig) -> bool:
    return len(table.scheme.num_rows) == 1


class _Group:
    """Tables of one TBE; see the module's drawing for the order of its output."""

    def __init__(self, tables: Sequence[CompositionalEmbeddingBagConfig]) -> None:
        first = tables[0]
        self.partitions = [table.scheme for table in tables for _ in table.feature_names]
        self.scheme = type(first.scheme)
        self.combine = first.combine
        self.is_mean = first.is_mean
        self.num_features = len(self.partitions)
        self.num_partitions = len(first.scheme.num_rows)
        self.dims = self.combine.partition_dims(first.embedding_dim, self.num_partitions)

    def rows(self, features: KeyedJaggedTensor) -> Int64[Tensor, "k ids"]:
        """Rows of every id in each partition; ids lie feature after feature."""
        ids, counts = features.values().long(), features.length_per_key()
        if len(set(counts)) == 1:
            return self.scheme.rows_of_tables(self.partitions, ids.view(self.num_features, -1)).flatten(1)
        pieces = ids.split(counts)
        return torch.cat([p.rows(piece) for p, piece in zip(self.partitions, pieces, strict=True)], dim=1)

    def compose(self, looked_up: Float[Tensor, "batch dims"]) -> Float[Tensor, "batch features dim"]:
        """Cuts the TBE's output into the k partitions' vectors and composes them."""
        if self.num_partitions == 1:
            return looked_up.view(len(looked_up), self.num_features, -1)
        pieces = looked_up.split([self.num_features * dim for dim in self.dims], dim=1)
        return self.combine.compose(
            [piece.view(-1, self.num_features, dim) for piece, dim in zip(pieces, self.dims, strict=True)]
        )

    def mean(
        self, pooled: Float[Tensor, "batch features dim"], features: KeyedJaggedTensor
    ) -> Float[Tensor, "batch dims"]:
        """Divides sums by the number of ids of each bag, where the tables ask for means."""
        if self.is_mean:
            lengths = features.lengths().view(self.num_features, -1).t().unsqueeze(2)
            pooled = pooled / lengths.clamp(min=1)
        return pooled.flatten(1)


class _PooledGroup(_Group):
    """Pools each partition's vectors in the TBE and composes the sums."""

    def forward(self, features: KeyedJaggedTensor, tbe: nn.Module) -> Float[Tensor, "batch dims"]:
        rows = self.rows(features)
        offsets = _repeat_offsets(features.offsets(), self.num_partitions, rows.shape[1])
        return self.mean(self.compose(tbe(indices=rows.flatten(), offsets=offsets)), features)


class _PerIdGroup(_Group):
    """Looks each id up as a bag of its own, composes, then pools."""

    def forward(self, features: KeyedJaggedTensor, tbe: nn.Module) -> Float[Tensor, "batch dims"]:
        rows = self.rows(features)
        lengths = features.lengths()
        if rows.shape[1] == lengths.numel() and bool((lengths == 1).all()):
            offsets = torch.arange(rows.numel() + 1, device=rows.device)
            return self.compose(tbe(indices=rows.flatten(), offsets=offsets)).flatten(1)
        composed = self._compose_padded(rows, features, tbe)
        return self.mean(self._pool(composed, features), features)

    def _compose_padded(
        self, rows: Int64[Tensor, "k ids"], features: KeyedJaggedTensor, tbe: nn.Module
    ) -> Float[Tensor, "positions features dim"]:
        """Composed vector of the i-th id of every feature; features with fewer ids are padded with empty bags."""
        counts = torch.tensor(features.length_per_key(), device=rows.device)
        num_positions = max(1, max(features.length_per_key()))
        filled = torch.arange(num_positions, device=rows.device) < counts.unsqueeze(1)
        offsets = rows.new_zeros(self.num_partitions * filled.numel() + 1)
        torch.cumsum(filled.long().flatten().repeat(self.num_partitions), dim=0, out=offsets[1:])
        return self.compose(tbe(indices=rows.flatten(), offsets=offsets))

    def _pool(
        self, composed: Float[Tensor, "positions features dim"], features: KeyedJaggedTensor
    ) -> Float[Tensor, "batch features dim"]:
        counts = features.length_per_key()
        device = composed.device
        # an id that is the i-th of feature f lies in row i * features + f of the flattened composed vectors
        index = torch.cat(
            [torch.arange(count, device=device) * self.num_features + f for f, count in enumerate(counts)]
        )
        pooled = nn.functional.embedding_bag(
            index, composed.flatten(0, 1), features.offsets().long(), mode="sum", include_last_offset=True
        )
        return pooled.view(self.num_features, -1, pooled.shape[1]).transpose(0, 1)


def _repeat_offsets(offsets: Tensor, times: int, num_ids: int) -> Int64[Tensor, " bags_plus_1"]:
    """Offsets of ``times`` copies of the same bags, one after another."""
    if times == 1:
        return offsets.long()
    starts = torch.arange(times, device=offsets.device).unsqueeze(1) * num_ids
    end = torch.full((1,), times * num_ids, device=offsets.device)
    return torch.cat([(offsets[:-1].unsqueeze(0) + starts).flatten(), end])
