"""Storage that each sharding option takes of each rank's memory, as TorchRec's planner asks for it.

TorchRec's own estimator knows a unit's size and the class of a fused optimizer. It counts nothing for what torch
trains: AMSGrad, the replicated partitions of a row-wise table, gradients. Here the unit has a hypothetical placement,
each shard on a rank of its own, and its parameters are counted as those of a finished plan are
(:mod:`distembed.planning.storage`)::

    table_wise, column_wise    columns of the partitions that take part in the shard's columns
    row_wise                   a block of the largest partition, and all others
    data_parallel              everything

Functions of path-based tables lie on every rank whatever the plan. No shard counts them:
:class:`~distembed.planning.reservation.Reservation` does.
"""

from collections.abc import Sequence

from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.constants import BIGINT_DTYPE
from torchrec.distributed.planner.shard_estimators import (
    EmbeddingStorageEstimator,
    _calculate_shard_io_sizes,
    calculate_pipeline_io_cost,
)
from torchrec.distributed.planner.types import (
    SharderDataMap,
    ShardEstimator,
    ShardingOption,
    Storage,
    Topology,
)
from torchrec.distributed.types import ParameterSharding, PipelineType, ShardingType, ShardMetadata

from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.optim.declared import TableOptimizers
from distembed.planning.storage import DEFAULT_CACHE_RATIO, TableStorage, function_storage, table_storage
from distembed.sharding.placement import Placement, place_table


class StorageEstimator(ShardEstimator):
    """Sets the storage of every shard; in bytes, exact for parameters, optimizer state and gradients.

    Plain tables, which a model may have beside compositional ones, are counted by TorchRec's own estimator.

    Args:
        topology: TorchRec's description of the ranks.
        tables: Compositional tables of the model.
        optimizers: Optimizers of the tables.
    """

    def __init__(
        self, topology: Topology, tables: Sequence[CompositionalEmbeddingConfig], optimizers: TableOptimizers
    ) -> None:
        self._topology = topology
        self._tables = {table.name: table for table in tables}
        self._optimizers = optimizers
        self._plain_estimator = EmbeddingStorageEstimator(topology)

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: SharderDataMap) -> None:
        """Sets the storage of every shard; TorchRec calls it."""
        plain = [option for option in sharding_options if option.name not in self._tables]
        self._plain_estimator.estimate(plain, sharder_data_map)
        for option in (option for option in sharding_options if option.name in self._tables):
            ratio = sharder_data_map[option.module_type_key].fused_params.get("cache_load_factor")
            ratio = option.cache_load_factor or ratio or DEFAULT_CACHE_RATIO
            stored = zip(option.shards, self._tables_storage(option, ratio), self._buffers_storage(option), strict=True)
            for shard, tables, buffers in stored:
                shard.storage = tables + buffers

    def table_bytes(self, option: ShardingOption) -> list[int]:
        """Returns the bytes of each shard's weights, optimizer state and gradients; of plain tables with buffers."""
        if option.name not in self._tables:
            return [storage.hbm + storage.ddr for storage in (shard.storage for shard in option.shards) if storage]
        stored = shard_storage(self._hypothetical_placement(option), option.num_shards, self._optimizers)
        return [storage.total for storage in stored]

    def _tables_storage(self, option: ShardingOption, cache_ratio: float) -> list[Storage]:
        """Returns the storage of each shard that stays from step to step."""
        stored = shard_storage(self._hypothetical_placement(option), option.num_shards, self._optimizers, cache_ratio)
        if self._topology.compute_device == "cpu":
            return [Storage(hbm=0, ddr=storage.total) for storage in stored]
        return [Storage(hbm=storage.total, ddr=storage.host) for storage in stored]

    def _hypothetical_placement(self, option: ShardingOption) -> Placement:
        table = self._tables[option.name]
        kernel = option.compute_kernel
        if not self._optimizers.is_fused:
            kernel = EmbeddingComputeKernel.DENSE.value
        return place_table(table, _on_ranks_of_their_own(option, kernel), world_size=option.num_shards)

    def _buffers_storage(self, option: ShardingOption) -> list[Storage]:
        """Returns the storage of each shard's ids and vectors, by TorchRec's sizes; a pipeline has ids of two steps."""
        inputs, outputs = _calculate_shard_io_sizes(
            sharding_type=option.sharding_type,
            batch_sizes=[option.batch_size] * option.num_inputs,
            world_size=self._topology.world_size,
            local_world_size=self._topology.intra_group_size,
            input_lengths=option.input_lengths,
            emb_dim=option.tensor.shape[1],
            shard_sizes=[shard.size for shard in option.shards],
            input_data_type_size=BIGINT_DTYPE,
            output_data_type_size=option.tensor.element_size(),
            num_poolings=[1.0] * option.num_inputs,
            is_pooled=option.is_pooled,
        )
        pipeline = PipelineType.TRAIN_SPARSE_DIST if self._topology.compute_device == "cuda" else PipelineType.NONE
        costs = [
            calculate_pipeline_io_cost(i, o, 0, pipeline, None, True) for i, o in zip(inputs, outputs, strict=True)
        ]
        return [storage_on(self._topology.compute_device, cost) for cost in costs]


def shard_storage(
    placement: Placement, num_shards: int, optimizers: TableOptimizers, cache_ratio: float = DEFAULT_CACHE_RATIO
) -> list[TableStorage]:
    """Returns the storage of each shard of a table whose shards lie on ranks of their own, without functions.

    Args:
        placement: Placement of shard i on rank i.
        num_shards: Number of shards.
        optimizers: Optimizers of the table.
        cache_ratio: Slots of a cache to rows of a table that lies in host memory.
    """
    table = placement.table
    functions = function_storage(table, optimizers)
    stored = table_storage([placement], num_shards, optimizers, cache_ratio)
    return [tables.get(table.name, functions) - functions for tables in stored]


def _on_ranks_of_their_own(option: ShardingOption, compute_kernel: str) -> ParameterSharding:
    """Returns the planner's answer if it chose this option, and had a rank for every shard."""
    ranks = list(range(option.num_shards))
    is_replicated = option.sharding_type == ShardingType.DATA_PARALLEL.value
    shards = [
        ShardMetadata(shard.offset, shard.size, f"rank:{rank}/cpu")
        for shard, rank in zip(option.shards, ranks, strict=True)
    ]
    spec = None if is_replicated else EnumerableShardingSpec(shards)
    return ParameterSharding(option.sharding_type, compute_kernel, ranks, spec)


def storage_on(device: str, num_bytes: int) -> Storage:
    """Returns these bytes as storage of a rank's own memory: the device's, or the machine's where that is a CPU."""
    return Storage(hbm=0, ddr=num_bytes) if device == "cpu" else Storage(hbm=num_bytes, ddr=0)
