"""What each way of placing a table takes of each rank's memory, as TorchRec's planner asks for it.

TorchRec's own estimator knows a unit's size and the class of a fused optimizer. It counts nothing for what torch
trains: AMSGrad, the replicated partitions of a row-wise table, gradients. Here the unit is placed in thought, each
shard on a rank of its own, and its parameters are counted as those of a finished plan are
(:mod:`distembed.planning.storage`)::

    table_wise, column_wise    columns of the partitions that take part in the shard's columns
    row_wise                   a block of the largest partition, and all others
    data_parallel              everything

Functions of path-based tables lie on every rank whatever the plan. No shard counts them: :class:`Reservation` does.
"""

import copy
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from torch import nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.constants import BIGINT_DTYPE
from torchrec.distributed.planner.shard_estimators import (
    EmbeddingStorageEstimator,
    _calculate_shard_io_sizes,
    calculate_pipeline_io_cost,
)
from torchrec.distributed.planner.types import (
    DeviceHardware,
    ParameterConstraints,
    SharderDataMap,
    ShardEstimator,
    ShardingOption,
    Storage,
    StorageReservation,
    Topology,
)
from torchrec.distributed.types import ModuleSharder, ParameterSharding, PipelineType, ShardingType, ShardMetadata

from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.optim.declared import TableOptimizers
from distembed.planning.storage import DEFAULT_CACHE_RATIO, TableStorage, function_storage, table_storage
from distembed.sharding.placement import Placement, place_table


class StorageEstimator(ShardEstimator):
    """Sets the storage of every shard; in bytes, exact for parameters, optimizer state and gradients.

    Plain tables, which a model may have beside compositional ones, are counted by TorchRec's own estimator.

    Args:
        topology: of the ranks.
        tables: all tables of the model.
        optimizers: what trains them.
    """

    def __init__(
        self, topology: Topology, tables: Sequence[CompositionalEmbeddingConfig], optimizers: TableOptimizers
    ) -> None:
        self._topology = topology
        self._tables = {table.name: table for table in tables}
        self._optimizers = optimizers
        self._of_plain = EmbeddingStorageEstimator(topology)

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: SharderDataMap) -> None:
        plain = [option for option in sharding_options if option.name not in self._tables]
        self._of_plain.estimate(plain, sharder_data_map)
        for option in (option for option in sharding_options if option.name in self._tables):
            ratio = sharder_data_map[option.module_type_key].fused_params.get("cache_load_factor")
            ratio = option.cache_load_factor or ratio or DEFAULT_CACHE_RATIO
            kept = self._kept(option, ratio)
            for shard, of_tables, of_buffers in zip(option.shards, kept, self._buffers(option), strict=True):
                shard.storage = of_tables + of_buffers

    def table_bytes(self, option: ShardingOption) -> list[int]:
        """Of each shard: weights, optimizer state and gradients; of plain tables buffers as well."""
        if option.name not in self._tables:
            return [storage.hbm + storage.ddr for storage in (shard.storage for shard in option.shards) if storage]
        stored = shard_storage(self._placed_in_thought(option), option.num_shards, self._optimizers)
        return [storage.total for storage in stored]

    def _kept(self, option: ShardingOption, cache_ratio: float) -> list[Storage]:
        """What stays from step to step, of each shard."""
        stored = shard_storage(self._placed_in_thought(option), option.num_shards, self._optimizers, cache_ratio)
        if self._topology.compute_device == "cpu":
            return [Storage(hbm=0, ddr=storage.total) for storage in stored]
        return [Storage(hbm=storage.total, ddr=storage.host) for storage in stored]

    def _placed_in_thought(self, option: ShardingOption) -> Placement:
        table = self._tables[option.name]
        kernel = option.compute_kernel
        if not self._optimizers.is_fused:
            kernel = EmbeddingComputeKernel.DENSE.value
        return place_table(table, _on_ranks_of_their_own(option, kernel), world_size=option.num_shards)

    def _buffers(self, option: ShardingOption) -> list[Storage]:
        """Ids and vectors of a step, by TorchRec's sizes; the pipeline has the ids of two steps."""
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


class OncePerSize(ShardEstimator):
    """Another estimator, asked for one of the shards of an option that have the same size.

    Args:
        estimator: gives shards of one size the same time. TorchRec's takes most of the time of planning.
    """

    def __init__(self, estimator: ShardEstimator) -> None:
        self._estimator = estimator

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: SharderDataMap) -> None:
        shards = [option.shards for option in sharding_options]
        of_size = [{tuple(shard.size): shard for shard in of_option} for of_option in shards]
        for option, distinct in zip(sharding_options, of_size, strict=True):
            option.shards = list(distinct.values())
        self._estimator.estimate(sharding_options, sharder_data_map)
        for option, of_option, distinct in zip(sharding_options, shards, of_size, strict=True):
            option.shards = of_option
            for shard in of_option:
                shard.perf = distinct[tuple(shard.size)].perf


class Reservation(StorageReservation):
    """Takes off every rank's memory what no shard counts: a share, the networks, and the tables' functions.

    Args:
        share: of the memory of a rank's device.
        tables: all tables of the model.
        optimizers: what trains them.
        num_bytes: for the networks and whatever else.
    """

    def __init__(
        self,
        share: float,
        tables: Sequence[CompositionalEmbeddingConfig],
        optimizers: TableOptimizers,
        num_bytes: int = 0,
    ) -> None:
        self._percentage = share  # TorchRec prints it, by this name, where nothing fits
        self._left: Topology | None = None
        self._num_bytes = num_bytes + sum(function_storage(table, optimizers.dense).total for table in tables)

    def reserve(
        self,
        topology: Topology,
        batch_size: int,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
        constraints: dict[str, ParameterConstraints] | None = None,
    ) -> Topology:
        left = copy.deepcopy(topology)
        for device in left.devices:
            free = storage_on(topology.compute_device, self._num_bytes)
            share = storage_on(topology.compute_device, math.ceil(self._percentage * _own_memory(topology, device)))
            device.storage.hbm = max(0, device.storage.hbm - share.hbm - free.hbm)
            device.storage.ddr = max(0, device.storage.ddr - share.ddr - free.ddr)
        self._left = left
        return left

    def fullness(self, plan: Iterable[ShardingOption]) -> float:
        """Of the fullest rank, as a share of what :meth:`reserve` left; infinite where host memory had to help."""
        assert self._left is not None
        is_cpu = self._left.compute_device == "cpu"
        loads, elsewhere = Counter[int](), 0
        for shard in (shard for option in plan for shard in option.shards):
            loads[shard.rank] += shard.storage.ddr if is_cpu else shard.storage.hbm
            elsewhere += 0 if is_cpu else shard.storage.ddr
        room = [device.storage.ddr if is_cpu else device.storage.hbm for device in self._left.devices]
        return math.inf if elsewhere else max(load / max(1, room[rank]) for rank, load in loads.items())

    @property
    def last_reserved_topology(self) -> Topology | None:
        return self._left


def shard_storage(
    placement: Placement, num_shards: int, optimizers: TableOptimizers, cache_ratio: float = DEFAULT_CACHE_RATIO
) -> list[TableStorage]:
    """Of each shard of a table whose shards lie on ranks of their own; functions are left out.

    Args:
        placement: of shard i on rank i.
        num_shards: of them.
        optimizers: what trains the table.
        cache_ratio: slots of a cache to rows of a table that lies in host memory.
    """
    table = placement.table
    functions = function_storage(table, optimizers.dense)
    of_ranks = table_storage([placement], num_shards, optimizers.sparse, optimizers.dense, cache_ratio)
    return [of_rank.get(table.name, functions) - functions for of_rank in of_ranks]


def _on_ranks_of_their_own(option: ShardingOption, compute_kernel: str) -> ParameterSharding:
    """The planner's answer if it chose this, and had a rank for every shard."""
    ranks = list(range(option.num_shards))
    is_replicated = option.sharding_type == ShardingType.DATA_PARALLEL.value
    shards = [
        ShardMetadata(shard.offset, shard.size, f"rank:{rank}/cpu")
        for shard, rank in zip(option.shards, ranks, strict=True)
    ]
    spec = None if is_replicated else EnumerableShardingSpec(shards)
    return ParameterSharding(option.sharding_type, compute_kernel, ranks, spec)


def storage_on(device: str, num_bytes: int) -> Storage:
    """So many bytes of a rank's own memory: the device's, or the machine's where that is a CPU."""
    return Storage(hbm=0, ddr=num_bytes) if device == "cpu" else Storage(hbm=num_bytes, ddr=0)


def _own_memory(topology: Topology, device: DeviceHardware) -> int:
    return int(device.storage.ddr if topology.compute_device == "cpu" else device.storage.hbm)
