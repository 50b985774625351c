"""Perf of each sharding option: TorchRec's estimate, with what several partitions of a table add to a lookup.

TorchRec's estimator knows a lookup of one vector an id. What rows of several partitions and composing them take is said
by their group (:mod:`distembed.sharding.groups`).
"""

from collections.abc import Sequence
from dataclasses import replace

from torchrec.distributed.planner.types import Perf, SharderDataMap, ShardEstimator, ShardingOption
from torchrec.distributed.types import ShardingType

from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.planning.devices import Device
from distembed.planning.times import reached_flops
from distembed.sharding.groups import group_type
from distembed.sharding.placement import is_pooled

_MS = 1e3


class ComposedPerfEstimator(ShardEstimator):
    """TorchRec's estimate of each shard, extended for tables of several partitions.

    Args:
        estimator: TorchRec's estimator of perf.
        tables: Compositional tables of the model.
        world_size: Number of ranks.
        device: Device of each rank.
        bf16: Whether functions of path-based tables compute in bf16.
    """

    def __init__(
        self,
        estimator: ShardEstimator,
        tables: Sequence[CompositionalEmbeddingConfig],
        world_size: int,
        device: Device,
        bf16: bool,
    ) -> None:
        self._estimator, self._world_size, self._device = estimator, world_size, device
        self._tables = {table.name: table for table in tables}
        self._flops = reached_flops(device, bf16)

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: SharderDataMap) -> None:
        """Sets the perf of every shard; TorchRec calls it."""
        self._estimator.estimate(sharding_options, sharder_data_map)
        for option in (option for option in sharding_options if option.name in self._tables):
            for shard in option.shards:
                if shard.perf is not None:
                    shard.perf = self._extended(option, shard.size[1], shard.perf)

    def _extended(self, option: ShardingOption, columns: int, perf: Perf) -> Perf:
        table = self._tables[option.name]
        is_local = option.sharding_type == ShardingType.DATA_PARALLEL.value
        num_rows = option.batch_size * (1 if is_local else self._world_size)
        num_ids = num_rows * sum(option.input_lengths)
        if option.sharding_type == ShardingType.ROW_WISE.value:
            num_ids /= self._world_size
        work = group_type(table, is_pooled(table)).work(table, columns, num_ids, num_rows * option.num_inputs)
        forward = _MS * (work.moved_bytes / self._device.memory_bandwidth + work.operations / self._flops)
        # gradients of both the inputs and the weights: twice as much of either
        return replace(
            perf,
            fwd_compute=perf.fwd_compute * work.read_share + forward,
            bwd_compute=perf.bwd_compute * work.read_share + 2 * forward,
        )


class OncePerSize(ShardEstimator):
    """Asks another estimator for one of the shards of an option that have the same size.

    Args:
        estimator: An estimator of perf that depends on a shard's size alone; TorchRec's takes most of the time of
            planning.
    """

    def __init__(self, estimator: ShardEstimator) -> None:
        self._estimator = estimator

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: SharderDataMap) -> None:
        """Sets the perf of every shard; TorchRec calls it."""
        all_shards = [option.shards for option in sharding_options]
        by_size = [{tuple(shard.size): shard for shard in shards} for shards in all_shards]
        for option, distinct in zip(sharding_options, by_size, strict=True):
            option.shards = list(distinct.values())
        self._estimator.estimate(sharding_options, sharder_data_map)
        for option, shards, distinct in zip(sharding_options, all_shards, by_size, strict=True):
            option.shards = shards
            for shard in shards:
                shard.perf = distinct[tuple(shard.size)].perf
