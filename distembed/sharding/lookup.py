"""TorchRec's lookup of the tables of one rank, group by group (:mod:`distembed.sharding.groups`)."""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import groupby, islice
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_sharding import group_tables
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig, ShardedEmbeddingTable
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.sharding.groups import LocalTable, Request, group_key, make_group
from distembed.sharding.placement import Piece


class CompositionalLookup(GroupedPooledEmbeddingsLookup):
    """Ids of all tables of one rank -> [B, sum of their columns], features in the order of ``tables``.

    Attributes:
        replicated_names: partition tables whose replicated weights are used here.

    Args:
        tables: what this rank owns; neighbours that agree in scheme, composition and dimensions form a group.
        replicated: weights that are the same on every rank, by partition table's name.
        averages_ranks: whether gradients that come back are of all ranks' rows, as those of TorchRec's dists; those of
            replicated weights, which are averaged over the ranks once more, are then multiplied by their number.
        env: the process group that the tables are sharded over.
        device: of the weights.
        pools: whether ids are pooled over bags; else each gives a vector.
    """

    def __init__(
        self,
        tables: Sequence[LocalTable],
        replicated: Mapping[str, nn.Parameter],
        averages_ranks: bool,
        env: ShardingEnv,
        device: torch.device | None,
        pools: bool = True,
    ) -> None:
        groups = [list(group) for _, group in groupby(tables, group_key)]
        configs = [config for group in groups for config in _tbe_configs(group)]
        super().__init__(configs, pg=env.process_group, device=device, env=env)
        scale = env.world_size if averages_ranks else 1
        self._groups = [make_group(group, replicated, scale, pools) for group in groups]
        self._feature_splits = [group.num_features for group in self._groups]
        self._shards = [shard for group in groups for shard in _shards_in_order(group)]
        self._pools = pools
        self.replicated_names = {
            part.name
            for local in tables
            if local.pieces
            for part in local.table.partition_tables()
            if part.name in replicated
        }
        self._prefetched: deque[tuple[KeyedJaggedTensor, list[Request]]] = deque()

    def forward(self, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Looks up, composes and pools."""
        if not self._groups:
            return self._dummy_embs_tensor.view(sparse_features.stride() if self._pools else 0, 0)
        if self._prefetched and self._prefetched[0][0] is sparse_features:
            _, requests = self._prefetched.popleft()
            if sparse_features.device().type == "cuda":
                for request in requests:
                    request.record_stream(torch.cuda.current_stream())
        else:
            requests = self._requests(sparse_features)
        parts = [
            group.finish(request, group.look_up(request, tbes))
            for group, request, tbes in zip(self._groups, requests, self._tbes_of_groups(), strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1 if self._pools else 0)

    @property
    def module(self) -> "CompositionalLookup":
        """This one: TorchRec takes data-parallel lookups of sequences to be wrapped."""
        return self

    def prefetch(self, sparse_features: KeyedJaggedTensor, forward_stream: Any = None) -> None:
        """Brings the rows of a coming batch from host memory into the cache, where tables lie there."""
        if not any(_is_cached(config) for config in self.grouped_configs):
            return
        requests = self._requests(sparse_features)
        configs = iter(self.grouped_configs)
        for group, request, tbes in zip(self._groups, requests, self._tbes_of_groups(), strict=True):
            if any([_is_cached(config) for config in islice(configs, group.num_tbes)]):
                group.prefetch(request, tbes, forward_stream)
        self._prefetched.append((sparse_features, requests))

    def reset_parameters(self) -> None:
        """Draws the weights of this rank's shards, the same numbers as these have in the whole table."""
        weights = [weight for kernel in self._emb_modules for weight in kernel.split_embedding_weights()]
        for (piece, shard), weight in zip(self._shards, weights, strict=True):
            assert shard.local_metadata is not None
            first_row, first_column = shard.local_metadata.shard_offsets
            piece.part.init.fill_part(weight.detach().view(-1, shard.local_cols), first_row, first_column)
        self.purge()  # of rows that are cached

    def _requests(self, features: KeyedJaggedTensor) -> list[Request]:
        with torch.no_grad():
            pieces = features.split(self._feature_splits)
            return [group.request(piece) for group, piece in zip(self._groups, pieces, strict=True)]

    def _tbes_of_groups(self) -> list[list[nn.Module]]:
        tbes = iter(kernel.emb_module for kernel in self._emb_modules)
        return [list(islice(tbes, group.num_tbes)) for group in self._groups]


def _sharded_pieces(local: LocalTable) -> list[Piece]:
    return [piece for piece in local.pieces if piece.partition in local.sharded]


def _tbe_configs(group: Sequence[LocalTable]) -> list[GroupedEmbeddingConfig]:
    """The TBE of each piece that is sharded, from each table's."""
    configs = []
    for pieces in zip(*[_sharded_pieces(local) for local in group], strict=True):
        shards = [local.sharded[piece.partition] for local, piece in zip(group, pieces, strict=True)]
        (config,) = group_tables([shards])[0]
        configs.append(config)
    return configs


def _shards_in_order(group: Sequence[LocalTable]) -> list[tuple[Piece, ShardedEmbeddingTable]]:
    """The same shards, in the same order, with their pieces."""
    columns = zip(*[_sharded_pieces(local) for local in group], strict=True)
    return [
        (piece, local.sharded[piece.partition])
        for pieces in columns
        for local, piece in zip(group, pieces, strict=True)
    ]


def _is_cached(config: GroupedEmbeddingConfig) -> bool:
    return any(table.compute_kernel == EmbeddingComputeKernel.FUSED_UVM_CACHING for table in config.embedding_tables)
