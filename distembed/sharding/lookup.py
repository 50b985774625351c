"""TorchRec's lookup of one rank's tables, group by group (:mod:`distembed.sharding.groups`)."""

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import groupby, islice, pairwise
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import DenseTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torchrec.distributed.batched_embedding_kernel import BatchedDenseEmbeddingBag
from torchrec.distributed.embedding_lookup import CommOpGradientScaling, GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_sharding import group_tables
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig, ShardedEmbeddingTable
from torchrec.distributed.types import ShardedModule, ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.embedding.batches import with_ids
from distembed.sharding.groups import LookupRequest, group_key, make_group
from distembed.sharding.table_slice import LocalTable, PartitionSlice


class CompositionalLookup(GroupedPooledEmbeddingsLookup):
    """Looks up, composes and pools the ids that reach one rank.

    The output is ``[bags, sum of widths]``, features in the order of ``tables``; for sequences ``[ids, width]``.
    ``replicated_names`` are the names of the partition tables whose replicated weights this lookup reads.

    Args:
        tables: The tables as this rank holds them; neighbours with one key form a group.
        replicated: Weights that are the same on every rank, by partition table's name.
        averages_ranks: Whether TorchRec's dists bring the gradients of all ranks' rows back, averaged. Gradients of
            replicated weights and of feature processors are averaged over the ranks once more, so that they are
            multiplied by the number of ranks.
        env: The process group that the tables are sharded over.
        device: Device of the weights.
        pools: Whether ids are pooled over bags; else each gets its vector.
        output_dtype: Dtype to which composed vectors are rounded before they are communicated; None leaves them.
    """

    def __init__(
        self,
        tables: Sequence[LocalTable],
        replicated: Mapping[str, nn.Parameter],
        averages_ranks: bool,
        env: ShardingEnv,
        device: torch.device | None,
        pools: bool = True,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        groups = [list(group) for _, group in groupby(tables, _local_key)]
        configs = [config for group in groups for config in _tbe_configs(group)]
        super().__init__(configs, pg=env.process_group, device=device, env=env)
        self._gradient_scale = gradient_scale = env.world_size if averages_ranks else 1
        tbes = iter(kernel.emb_module for kernel in self._emb_modules)
        device_kind = "cpu" if device is None else device.type
        self._groups = [
            make_group(group, replicated, gradient_scale, list(islice(tbes, len(group[0].shards))), device_kind)
            for group in groups
        ]
        self._shards = [shard for group in groups for tbe_shards in _shards_by_tbe(group) for shard in tbe_shards]
        self._pools, self._output_dtype, self._averages_ranks = pools, output_dtype, averages_ranks
        for group, group_tbes in zip(self._groups, self._tbes_of_groups(), strict=True):
            for tbe in group_tbes:
                if group.is_frozen and isinstance(tbe, DenseTableBatchedEmbeddingBagsCodegen):
                    tbe.weights.requires_grad_(False)
        self.replicated_names = {
            part.name
            for local in tables
            if local.partitions
            for part in local.table.partition_tables()
            if part.name in replicated
        }
        self._prefetched: deque[tuple[KeyedJaggedTensor, list[LookupRequest]]] = deque()

    def forward(self, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Looks up, composes and pools the ids that came from all ranks; rounds vectors to ``output_dtype``."""
        # one dtype on all ranks, also on a rank without tables: the collective needs it
        vectors = self._look_up(sparse_features).to(self._output_dtype or torch.float32)
        if self._averages_ranks and torch.is_grad_enabled() and not vectors.requires_grad:
            # frozen tables too: other ranks' backward passes wait for this rank's part of their collectives
            vectors.requires_grad_()
        return vectors

    def _look_up(self, sparse_features: KeyedJaggedTensor) -> Tensor:
        if not self._groups:
            return self._dummy_embs_tensor.view(sparse_features.stride() if self._pools else 0, 0)
        if self._prefetched and self._prefetched[0][0] is sparse_features:
            _, requests = self._prefetched.popleft()
            if sparse_features.device().type == "cuda":
                for request in requests:
                    request.record_stream(torch.cuda.current_stream())
        else:
            requests = self._requests(sparse_features)
        outputs = [
            group.finish(request, group.look_up(request, tbes))
            for group, request, tbes in zip(self._groups, requests, self._tbes_of_groups(), strict=True)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1 if self._pools else 0)

    def set_single_ids(self, has_single_ids: bool) -> None:
        """Sets whether all bags of all ranks have at most one id, for the batches that are looked up after the call."""
        for group in self._groups:
            group.has_single_ids = has_single_ids

    @property
    def module(self) -> "CompositionalLookup":
        """This lookup: TorchRec takes data-parallel lookups of sequences to be wrapped."""
        return self

    def prefetch(self, sparse_features: KeyedJaggedTensor, forward_stream: Any = None) -> None:
        """Loads a coming batch's rows from host memory into the caches of TBEs that have one.

        The batch's requests are kept until :meth:`forward` gets the same batch; batches must arrive in this order.
        """
        if not any(_is_cached(config) for config in self.grouped_configs):
            return
        requests = self._requests(sparse_features)
        configs = iter(self.grouped_configs)
        for group, request, tbes in zip(self._groups, requests, self._tbes_of_groups(), strict=True):
            by_config = zip(tbes, islice(configs, group.num_tbes), strict=True)
            cached = [tbe if _is_cached(config) else None for tbe, config in by_config]
            if any(tbe is not None for tbe in cached):
                group.prefetch(request, cached, forward_stream)
        self._prefetched.append((sparse_features, requests))

    def reset_parameters(self) -> None:
        """Fills this rank's shards with the initial values that the unsharded weight has in these rows and columns."""
        weights = [weight for kernel in self._emb_modules for weight in kernel.split_embedding_weights()]
        for (part_slice, shard), weight in zip(self._shards, weights, strict=True):
            assert shard.local_metadata is not None
            first_row, first_column = shard.local_metadata.shard_offsets
            part_slice.part.init.fill_part(weight.detach().view(-1, shard.local_cols), first_row, first_column)
        self.purge()  # drops cached rows

    def shard_weights(self) -> Iterator[tuple[PartitionSlice, Tensor]]:
        """Yields each shard of this rank with its weight, flushed from caches; dense kernels' weights keep autograd."""
        weights = [weight for kernel in self._emb_modules for weight in _weights_of_kernel(kernel)]
        for (part_slice, _), weight in zip(self._shards, weights, strict=True):
            yield part_slice, weight

    def _requests(self, features: KeyedJaggedTensor) -> list[LookupRequest]:
        weights = features.weights_or_none()
        if weights is not None and weights.requires_grad and self._gradient_scale > 1:
            # a feature processor on this rank made them, and DDP averages its parameters
            scaled = CommOpGradientScaling.apply(weights, self._gradient_scale)
            features = with_ids(features, features.values(), weights=scaled)
        features_by_group = features.split([group.num_features for group in self._groups])
        return [group.request(batch) for group, batch in zip(self._groups, features_by_group, strict=True)]

    def _tbes_of_groups(self) -> list[list[nn.Module]]:
        tbes = iter(kernel.emb_module for kernel in self._emb_modules)
        return [list(islice(tbes, group.num_tbes)) for group in self._groups]


def sharded_lookups(model: nn.Module) -> Iterator[Any]:
    """Yields this rank's lookups of all sharded collections of a model, also TorchRec's, without their DDP wrappers."""
    for module in model.modules():
        for lookup in getattr(module, "_lookups", ()) if isinstance(module, ShardedModule) else ():
            while isinstance(lookup, nn.parallel.DistributedDataParallel):
                lookup = lookup.module
            yield lookup


def _weights_of_kernel(kernel: Any) -> list[Tensor]:
    """Returns the weight of each shard in a kernel; flushes caches. TorchRec would detach a dense kernel's weights."""
    if not isinstance(kernel, BatchedDenseEmbeddingBag):
        kernel.flush()
        return list(kernel.split_embedding_weights())
    tbe = kernel.emb_module
    if len(tbe.embedding_specs) == 1:  # the backward pass of a slice would allocate a gradient of the whole weight
        return [tbe.weights.view(tbe.embedding_specs[0])]
    # offsets are [0, end of shard 0, end of shard 1, ...]; a spec is a shard's (rows, dim)
    bounds = pairwise(tbe.weights_physical_offsets)
    return [
        tbe.weights[start:stop].view(rows_and_dim)
        for (start, stop), rows_and_dim in zip(bounds, tbe.embedding_specs, strict=True)
    ]


def _local_key(local: LocalTable) -> Hashable:
    """Returns the key by which a rank groups tables: the group key, whether they are frozen, and FBGEMM's settings."""
    first, key = next(iter(local.shards.values()), None), (group_key(local), local.is_frozen)
    if first is None:
        return *key, None
    return *key, tuple(sorted((key, str(value)) for key, value in (first.fused_params or {}).items()))


def _shards_by_tbe(group: Sequence[LocalTable]) -> list[list[tuple[PartitionSlice, ShardedEmbeddingTable]]]:
    """Returns, for each partition that is sharded, every table's slice and shard of it."""
    shards_by_table = [
        [(part, local.shards[part.partition]) for part in local.partitions if part.partition in local.shards]
        for local in group
    ]
    return [list(shards) for shards in zip(*shards_by_table, strict=True)]


def _tbe_configs(group: Sequence[LocalTable]) -> list[GroupedEmbeddingConfig]:
    """Returns TorchRec's config of the TBE of each partition that is sharded."""
    configs = []
    for tbe_shards in _shards_by_tbe(group):
        (config,) = group_tables([[shard for _, shard in tbe_shards]])[0]
        configs.append(config)
    return configs


def _is_cached(config: GroupedEmbeddingConfig) -> bool:
    return any(table.compute_kernel == EmbeddingComputeKernel.FUSED_UVM_CACHING for table in config.embedding_tables)
