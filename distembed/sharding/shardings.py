"""TorchRec's shardings of the units, with lookups of the partition tables between their dists."""

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_sharding import (
    BaseEmbeddingDist,
    BaseEmbeddingLookup,
    BaseSparseFeaturesDist,
    EmbeddingSharding,
    EmbeddingShardingInfo,
)
from torchrec.distributed.embedding_types import (
    BaseGroupedFeatureProcessor,
    EmbeddingComputeKernel,
    ShardedEmbeddingTable,
)
from torchrec.distributed.sharding.cw_sequence_sharding import CwSequenceEmbeddingSharding
from torchrec.distributed.sharding.cw_sharding import CwPooledEmbeddingSharding
from torchrec.distributed.sharding.dp_sequence_sharding import DpSequenceEmbeddingDist
from torchrec.distributed.sharding.dp_sharding import (
    BaseDpEmbeddingSharding,
    DpPooledEmbeddingDist,
    DpSparseFeaturesDist,
)
from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingDist, GridPooledEmbeddingSharding
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from torchrec.distributed.sharding.twcw_sharding import TwCwPooledEmbeddingSharding
from torchrec.distributed.types import ShardedTensorMetadata, ShardingEnv, ShardingType, ShardMetadata
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.partitions import Partition
from distembed.sharding.dists import NodeInputDist, NodeOutputDist, RowWiseInputDist, RowWiseOutputDist
from distembed.sharding.lookup import CompositionalLookup
from distembed.sharding.placement import Placement
from distembed.sharding.table_slice import LocalTable, PartitionSlice


class _Compositional(EmbeddingSharding[Any, Any, Any, Any]):
    """Mixin that gives TorchRec's shardings a :class:`CompositionalLookup`; it comes first among the bases."""

    _pools = True
    _averages_ranks = True  # the output dist's backward pass averages gradients over ranks
    _rounds_output = True  # vectors are sent, and so rounded to output_dtype

    def __init__(
        self,
        placements: Mapping[str, Placement],
        replicated: Mapping[str, nn.Parameter],
        *arguments: Any,
        **keywords: Any,
    ) -> None:
        self._placements = placements
        self._replicated = replicated
        self._output_dtype = _output_dtype(arguments[0]) if self._rounds_output else None
        super().__init__(*arguments, **keywords)

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
    ) -> BaseEmbeddingLookup[KeyedJaggedTensor, torch.Tensor]:
        return CompositionalLookup(
            [self._local(unit) for unit in self._units_of_rank()],
            self._replicated,
            self._averages_ranks,
            self._env,
            device if device is not None else self._device,
            self._pools,
            self._output_dtype,
        )

    def _units_of_rank(self) -> list[ShardedEmbeddingTable]:
        """Returns the units on this rank, in the order of their features."""
        return _units(self._grouped_embedding_configs)

    def _local(self, unit: ShardedEmbeddingTable) -> LocalTable:
        """Returns a unit's table with this rank's columns, rows and shards; without partitions if it has no rows."""
        placement = self._placements[unit.name]
        start = 0 if unit.local_metadata is None else unit.local_metadata.shard_offsets[1]
        columns, first_row = placement.slice(start, start + unit.local_cols), 0
        if placement.divided is not None:
            first_row = self._rank % placement.num_row_blocks * placement.rows_per_block
            if first_row >= placement.parts[placement.divided].num_rows:
                return LocalTable(placement.table, columns.num_columns, ())
        shards = {
            part_slice.partition: self._describe_shard(unit, placement, part_slice)
            for part_slice in columns.partitions
            if part_slice.partition in columns.sharded
        }
        return LocalTable(
            columns.table, columns.num_columns, columns.partitions, shards, first_row, placement.is_frozen
        )

    def _describe_shard(
        self, unit: ShardedEmbeddingTable, placement: Placement, part_slice: PartitionSlice
    ) -> ShardedEmbeddingTable:
        """Returns TorchRec's description of this rank's shard of a partition: the unit's, with the shard's shape."""
        part, metadata = part_slice.part, _shards(placement, part_slice)
        starts = [(shard.placement.rank(), shard.shard_offsets[1]) for shard in metadata if shard.placement is not None]
        number = starts.index((self._rank, part_slice.start))
        shard = copy.copy(unit)
        # vectors are rounded after they are composed
        shard.fused_params = {**(unit.fused_params or {})}
        shard.fused_params.pop("output_dtype", None)
        shard.name = part.name
        shard.compute_kernel = EmbeddingComputeKernel(placement.sharded[part.name].compute_kernel)
        shard.pooling = PoolingType.SUM  # of sequences too, one id a bag
        shard.num_embeddings, shard.embedding_dim = part.num_rows, part.dim
        shard.local_metadata = metadata[number]
        shard.local_rows, shard.local_cols = metadata[number].shard_sizes
        shard.global_metadata = ShardedTensorMetadata(metadata, torch.Size([part.num_rows, part.dim]))
        return shard


def _output_dtype(infos: Sequence[EmbeddingShardingInfo]) -> torch.dtype | None:
    """Returns the widest ``output_dtype`` of the tables, which one lookup concatenates; None unless all have one."""
    settings = [info.fused_params["output_dtype"] for info in infos if "output_dtype" in (info.fused_params or {})]
    dtypes: list[torch.dtype] = [setting.as_dtype() for setting in settings]
    return functools.reduce(torch.promote_types, dtypes) if len(dtypes) == len(infos) else None


def _shards(placement: Placement, part_slice: PartitionSlice) -> list[ShardMetadata]:
    """Returns the shards of a partition's weight, on all ranks."""
    spec = placement.sharded[part_slice.part.name].sharding_spec
    assert spec is not None
    return spec.shards


class _DividedByRows(_Compositional):
    def create_input_dist(self, device: torch.device | None = None) -> BaseSparseFeaturesDist[KeyedJaggedTensor]:
        """Makes the dist that routes ids by their rows in the divided partition."""
        divided = _divided(self._units_of_rank(), self._placements)
        assert self._env.process_group is not None
        return RowWiseInputDist(self._env.process_group, divided, device if device is not None else self._device)


class _WithinNodes(_Compositional):
    """Rows between the ranks of a node, ranges of columns on one node or several: TorchRec's grid.

    TorchRec calls a table of one range ``table_row_wise``.
    """

    def _units_of_rank(self) -> list[ShardedEmbeddingTable]:
        return _units(self._grouped_embedding_configs_per_rank[self._rank])

    def create_input_dist(self, device: torch.device | None = None) -> BaseSparseFeaturesDist[KeyedJaggedTensor]:
        """Makes the dist that routes ids to the table's node and there by their rows in the divided partition."""
        units = [unit for configs in self._grouped_embedding_configs_per_node for unit in _units(configs)]
        num_features = self._features_per_rank(self._grouped_embedding_configs_per_rank)
        rows = [self._placements[unit.name].rows_per_block for unit in units for _ in unit.feature_names]
        return NodeInputDist(
            self._pg,
            self._local_size,
            num_features,
            _divided(units, self._placements),
            rows,
            device if device is not None else self._device,
        )


def _units(configs: Sequence[Any]) -> list[ShardedEmbeddingTable]:
    """Returns the units of TorchRec's groups, in the order of their features."""
    return [unit for config in configs for unit in config.embedding_tables]


def _divided(
    units: Sequence[ShardedEmbeddingTable], placements: Mapping[str, Placement]
) -> list[tuple[Partition, int]]:
    """Returns, for each feature of the units, its table's scheme and the partition that is divided by rows."""
    divided = []
    for unit in units:
        placement = placements[unit.name]
        assert placement.divided is not None
        divided += [(placement.table.scheme, placement.divided)] * len(unit.feature_names)
    return divided


class _Replicated(_Compositional, BaseDpEmbeddingSharding[Any, KeyedJaggedTensor, torch.Tensor, torch.Tensor]):
    """Every rank looks its own batch up in replicated weights, whose gradients the model's own wrapper averages."""

    _averages_ranks = False
    _rounds_output = False

    def create_input_dist(self, device: torch.device | None = None) -> BaseSparseFeaturesDist[KeyedJaggedTensor]:
        return DpSparseFeaturesDist()


class _ReplicatedBags(_Replicated):
    def create_output_dist(self, device: torch.device | None = None) -> BaseEmbeddingDist[Any, Any, Any]:
        return DpPooledEmbeddingDist()


class _ReplicatedSequences(_Replicated):
    _pools = False

    def create_output_dist(self, device: torch.device | None = None) -> BaseEmbeddingDist[Any, Any, Any]:
        return DpSequenceEmbeddingDist()


class _TableWiseBags(_Compositional, TwPooledEmbeddingSharding):
    pass


class _ColumnWiseBags(_Compositional, CwPooledEmbeddingSharding):
    pass


class _TableColumnWiseBags(_Compositional, TwCwPooledEmbeddingSharding):
    pass


class _RowWiseBags(_DividedByRows, RwPooledEmbeddingSharding):
    def create_output_dist(self, device: torch.device | None = None) -> BaseEmbeddingDist[Any, Any, Any]:
        return RowWiseOutputDist(self._pg, self.embedding_dims(), self.qcomm_codecs_registry)


class _GridBags(_WithinNodes, GridPooledEmbeddingSharding):
    def create_output_dist(self, device: torch.device | None = None) -> BaseEmbeddingDist[Any, Any, Any]:
        stock = super().create_output_dist(device)
        assert isinstance(stock, GridPooledEmbeddingDist)
        return NodeOutputDist(stock)


class _TableWiseSequences(_Compositional, TwSequenceEmbeddingSharding):
    _pools = False


class _ColumnWiseSequences(_Compositional, CwSequenceEmbeddingSharding):
    _pools = False


class _RowWiseSequences(_DividedByRows, RwSequenceEmbeddingSharding):
    _pools = False


_BAGS = {
    ShardingType.TABLE_WISE.value: _TableWiseBags,
    ShardingType.COLUMN_WISE.value: _ColumnWiseBags,
    ShardingType.TABLE_COLUMN_WISE.value: _TableColumnWiseBags,
    ShardingType.ROW_WISE.value: _RowWiseBags,
    ShardingType.TABLE_ROW_WISE.value: _GridBags,
    ShardingType.GRID_SHARD.value: _GridBags,
    ShardingType.DATA_PARALLEL.value: _ReplicatedBags,
}
_SEQUENCES = {
    ShardingType.TABLE_WISE.value: _TableWiseSequences,
    ShardingType.COLUMN_WISE.value: _ColumnWiseSequences,
    ShardingType.ROW_WISE.value: _RowWiseSequences,
    ShardingType.DATA_PARALLEL.value: _ReplicatedSequences,
}
SEQUENCE_SHARDING_TYPES = tuple(_SEQUENCES)


def make_sharding(
    placements: Mapping[str, Placement],
    replicated: Mapping[str, nn.Parameter],
    sharding_infos: list[EmbeddingShardingInfo],
    env: ShardingEnv,
    device: torch.device | None,
    pools: bool,
    **keywords: Any,
) -> EmbeddingSharding[Any, KeyedJaggedTensor, torch.Tensor, torch.Tensor]:
    """Makes the sharding of all units of one sharding type, of bags if ``pools`` is set, else of sequences."""
    sharding_type = sharding_infos[0].param_sharding.sharding_type
    make: Any = (_BAGS if pools else _SEQUENCES)[sharding_type]
    if sharding_type == ShardingType.DATA_PARALLEL.value:
        return make(placements, replicated, sharding_infos, env, device)
    return make(placements, replicated, sharding_infos, env, device, **keywords)
