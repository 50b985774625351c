"""What each rank looks up in a step of a plan: groups of :mod:`distembed.sharding.groups`, without their tensors."""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torchrec.distributed.types import ShardingType

from distembed.planning.workload import Workload
from distembed.sharding.groups import GroupLoad, group_key
from distembed.sharding.placement import Placement
from distembed.sharding.table_slice import TableSlice, width

ExchangeKey = tuple[str, str]
"""Collection and sharding type, which a table shares with those that are communicated together."""
PlacedSlice = tuple[Placement, TableSlice]
_PlacedSlices = list[tuple[Placement, TableSlice, Hashable]]
"""Slices of one table, each with the key of its group."""


class RankLookups:
    """What each rank looks up.

    Args:
        placements: Placements of all tables.
        world_size: Number of ranks.
        workload: Rows and ids of a training step.
    """

    def __init__(self, placements: Sequence[Placement], world_size: int, workload: Workload) -> None:
        self._world_size, self._workload = world_size, workload
        self._position = {placement.table.name: i for i, placement in enumerate(placements)}
        self._common: dict[int, _PlacedSlices] = {}
        self._by_rank: list[dict[int, _PlacedSlices]] = [{} for _ in range(world_size)]
        for placement in placements:
            self.add(placement)

    def add(self, placement: Placement) -> None:
        """Adds the lookups of a table, which has none yet."""
        position = self._position[placement.table.name]
        if is_on_every_rank(placement.unit.sharding_type):
            self._common[position] = [_placed_slice(placement, 0, width(placement.table))]
            return
        for start, stop, rank in column_shards(placement):
            self._by_rank[rank].setdefault(position, []).append(_placed_slice(placement, start, stop))

    def remove(self, placement: Placement) -> None:
        """Removes the lookups of a table that is placed so."""
        position = self._position[placement.table.name]
        self._common.pop(position, None)
        if not is_on_every_rank(placement.unit.sharding_type):
            for *_, rank in column_shards(placement):
                self._by_rank[rank].pop(position, None)

    def column_slices(self, rank: int) -> list[PlacedSlice]:
        """Returns slices of the tables of which this rank has a range of columns, or all columns to itself."""
        return [(placement, own) for slices in self._by_rank[rank].values() for placement, own, _ in slices]

    def common_loads(self) -> dict[ExchangeKey, list[GroupLoad]]:
        """Returns what is looked up on every rank, and alike."""
        return self._loads(self._common)

    def rank_loads(self, rank: int) -> dict[ExchangeKey, list[GroupLoad]]:
        """Returns all else that one rank looks up."""
        return self._loads(self._by_rank[rank])

    def _loads(self, slices: Mapping[int, _PlacedSlices]) -> dict[ExchangeKey, list[GroupLoad]]:
        groups: dict[ExchangeKey, dict[Hashable, list[PlacedSlice]]] = {}
        for position in sorted(slices):
            for placement, table_slice, key in slices[position]:
                groups.setdefault(exchange_key(placement), {}).setdefault(key, []).append((placement, table_slice))
        return {key: [self._load(group) for group in own_groups.values()] for key, own_groups in groups.items()}

    def _load(self, group: Sequence[PlacedSlice]) -> GroupLoad:
        first, _ = group[0]
        is_local = first.unit.sharding_type == ShardingType.DATA_PARALLEL.value
        num_rows = self._workload.rows_of_rank(self._world_size) if is_local else self._workload.batch_size
        # where rows are divided, a rank has a share of the ids
        share = first.num_row_blocks
        features = [(table_slice, name) for _, table_slice in group for name in table_slice.table.feature_names]
        return GroupLoad(
            slices=[table_slice for table_slice, _ in features],
            possible_ids=[math.ceil(table_slice.table.num_embeddings / share) for table_slice, _ in features],
            num_ids_per_feature=[num_rows * self._workload.ids_per_row.get(name, 1.0) / share for _, name in features],
            multi_hot=[self._workload.has_bags(name) for _, name in features],
            num_rows=num_rows,
            averages_gradients=self._world_size > 1,
            num_threads=self._workload.num_threads,
        )


def _placed_slice(placement: Placement, start: int, stop: int) -> tuple[Placement, TableSlice, Hashable]:
    table_slice = placement.slice(start, stop)
    return placement, table_slice, group_key(table_slice)


def exchange_key(placement: Placement) -> ExchangeKey:
    """Returns collection and sharding type of a table."""
    return placement.collection, placement.unit.sharding_type


def is_on_every_rank(sharding_type: str) -> bool:
    """Returns whether tables of a sharding type are looked up on every rank, and alike."""
    return sharding_type in (ShardingType.DATA_PARALLEL.value, ShardingType.ROW_WISE.value)


def column_shards(placement: Placement) -> list[tuple[int, int, int]]:
    """Returns first column, column behind the last, and rank of each shard of a table that is divided by columns."""
    spec: Any = placement.unit.sharding_spec
    return [
        (shard.shard_offsets[1], shard.shard_offsets[1] + shard.shard_sizes[1], shard.placement.rank())
        for shard in spec.shards
    ]
