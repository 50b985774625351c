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
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.constants import BIGINT_DTYPE
from torchrec.distributed.planner.shard_estimators import (
    UVM_CACHING_RATIO,
    _calculate_shard_io_sizes,
    calculate_pipeline_io_cost,
)
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    SharderDataMap,
    ShardEstimator,
    ShardingOption,
    Storage,
    StorageReservation,
    Topology,
)
from torchrec.distributed.sharding_plan import placement as place_of
from torchrec.distributed.types import ModuleSharder, ParameterSharding, PipelineType, ShardingType, ShardMetadata

from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.tables import CompositionalTables
from distembed.planning.optimizer_states import IS_ROW_WISE
from distembed.planning.storage import TableStorage, table_storage
from distembed.sharding.placement import Placement, place

_STATE_BYTES = 4
_CACHED = (EmbeddingComputeKernel.FUSED_UVM_CACHING.value,)
_IN_HOST_MEMORY = (*_CACHED, EmbeddingComputeKernel.FUSED_UVM.value)


@dataclass(frozen=True)
class TableOptimizers:
    """What trains tables.

    Attributes:
        sparse: optimizer of vectors, a key of ``IS_ROW_WISE``.
        dense: optimizer of the functions of path-based tables, another key.
        is_fused: whether FBGEMM updates sharded vectors within the backward pass; else torch does, from gradients.
    """

    sparse: str = "row_wise_adagrad"
    dense: str = "adagrad"
    is_fused: bool = True


class StorageEstimator(ShardEstimator):
    """Sets the storage of every shard; in bytes, exact for parameters, optimizer state and gradients.

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

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: SharderDataMap) -> None:
        for option in sharding_options:
            ratio = sharder_data_map[option.module_type_key].fused_params.get("cache_load_factor")
            ratio = option.cache_load_factor or ratio or UVM_CACHING_RATIO
            kept = self._kept(option, ratio)
            for shard, of_tables, of_buffers in zip(option.shards, kept, self._buffers(option), strict=True):
                shard.storage = of_tables + of_buffers

    def _kept(self, option: ShardingOption, cache_ratio: float) -> list[Storage]:
        """What stays from step to step, of each shard."""
        placement = self._placed_in_thought(option)
        stored = shard_storage(placement, option.num_shards, self._optimizers)
        if self._topology.compute_device == "cpu":
            return [Storage(hbm=0, ddr=storage.total) for storage in stored]
        if option.compute_kernel not in _IN_HOST_MEMORY:
            return [Storage(hbm=storage.total, ddr=0) for storage in stored]
        ratio = cache_ratio if option.compute_kernel in _CACHED else None
        return [
            self._in_host_memory(storage, rows, ratio)
            for storage, rows in zip(stored, _rows(placement, option.num_shards), strict=True)
        ]

    def _in_host_memory(self, storage: TableStorage, num_rows: int, cache_ratio: float | None) -> Storage:
        """FBGEMM keeps numbers of a row on the device even then, beside the cache and what it notes of its slots."""
        row_states = sum(IS_ROW_WISE[self._optimizers.sparse].values()) * num_rows * _STATE_BYTES
        # an int32 a row, and two int64 a slot
        cache = 0 if cache_ratio is None else cache_ratio * storage.weights + num_rows * (4 + 16 * cache_ratio)
        return Storage(hbm=row_states + round(cache), ddr=storage.total - row_states)

    def _placed_in_thought(self, option: ShardingOption) -> Placement:
        table = self._tables[option.name]
        kernel = option.compute_kernel
        if not self._optimizers.is_fused:
            kernel = EmbeddingComputeKernel.DENSE.value
        device = self._topology.compute_device
        return place(
            table, unit_sharding(option, kernel, device, list(range(option.num_shards))), world_size=option.num_shards
        )

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
        costs = [calculate_pipeline_io_cost(i, o, 0, pipeline, None, True) for i, o in zip(inputs, outputs, strict=True)]
        return [storage_on(self._topology.compute_device, cost) for cost in costs]


class Reservation(StorageReservation):
    """Takes off every rank's memory what no shard counts: a share for the networks, and the tables' functions.

    Args:
        share: of the memory of a rank's device.
        tables: all tables of the model.
        optimizers: what trains them.
    """

    def __init__(
        self, share: float, tables: Sequence[CompositionalEmbeddingConfig], optimizers: TableOptimizers
    ) -> None:
        self._percentage = share  # TorchRec prints it, by this name, where nothing fits
        self._functions = function_storage(tables, optimizers).total

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
            free = storage_on(topology.compute_device, self._functions)
            device.storage.hbm = max(0, int((1 - self._percentage) * device.storage.hbm) - free.hbm)
            device.storage.ddr = max(0, device.storage.ddr - free.ddr)
        return left


def shard_storage(placement: Placement, num_shards: int, optimizers: TableOptimizers) -> list[TableStorage]:
    """Of each shard of a table whose shards lie on ranks of their own; functions are left out.

    Args:
        placement: of shard i on rank i.
        num_shards: of them.
        optimizers: what trains the table.
    """
    of_ranks = table_storage([placement], num_shards, optimizers.sparse, optimizers.dense)
    functions = function_storage([placement.table], optimizers)
    stored = [of_rank.get(placement.table.name, TableStorage()) for of_rank in of_ranks]
    return [
        TableStorage(
            storage.weights - functions.weights,
            storage.optimizer_state - functions.optimizer_state,
            storage.gradients - functions.gradients,
        )
        for storage in stored
    ]


def function_storage(tables: Sequence[CompositionalEmbeddingConfig], optimizers: TableOptimizers) -> TableStorage:
    """Of the functions of path-based tables, which every rank has."""
    placed = [_functions_alone(table) for table in tables if table.function_tables()]
    (on_a_rank,) = table_storage(placed, 1, optimizers.sparse, optimizers.dense)
    return sum(on_a_rank.values(), TableStorage())


def unit_sharding(option: ShardingOption, compute_kernel: str, device: str, ranks: Sequence[int]) -> ParameterSharding:
    """The planner's answer if its choice were this option, with the shards on these ranks."""
    shards = [
        ShardMetadata(shard.offset, shard.size, place_of(device, rank, max(1, len(ranks))))
        for shard, rank in zip(option.shards, ranks, strict=True)
    ]
    is_replicated = option.sharding_type == ShardingType.DATA_PARALLEL.value
    return ParameterSharding(
        option.sharding_type,
        compute_kernel,
        ranks=list(ranks),
        sharding_spec=None if is_replicated else EnumerableShardingSpec(shards),
    )


def storage_on(device: str, num_bytes: int) -> Storage:
    """So many bytes of a rank's own memory: the device's, or the machine's where that is a CPU."""
    return Storage(hbm=0, ddr=num_bytes) if device == "cpu" else Storage(hbm=num_bytes, ddr=0)


def tables_of(model: nn.Module) -> list[CompositionalEmbeddingConfig]:
    """All compositional tables of a model, in order."""
    return [table for module in model.modules() if isinstance(module, CompositionalTables) for table in module.tables()]
