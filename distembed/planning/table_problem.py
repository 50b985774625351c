"""The tables of a request as a problem in numbers, and a plan of the numbers' answer.

Tables that differ in names alone are one class, whose options are costed once. Bytes of a shard are those of its
weights, states and gradients, exact, and a guess of the buffers that it needs; what the whole plan needs is counted in
the end (:mod:`distembed.planning.buffers`).
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.planner.utils import placement as rank_and_device
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
    ShardMetadata,
)

from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.planning.cluster import Cluster
from distembed.planning.costs import Layout, PlacementCost, PlacementCosts, ShardCost, divided_table
from distembed.planning.fastest.problem import Assignment, Block, Option, Problem
from distembed.planning.layouts import Layouts
from distembed.planning.lookups import is_on_every_rank
from distembed.planning.request import PlanRequest
from distembed.planning.storage import TableStorage, replicated_storage, slice_storage
from distembed.sharding.table_slice import is_pooled, unit_size

_VECTOR_COPIES = 3
"""Composed vectors of a shard at the fullest moment: as they are composed, as they are sent, and gradients."""
_ID_COPIES = 3
_FLOAT_BYTES, _LONG_BYTES = 4, 8


@dataclass(frozen=True)
class PlannedTable:
    """A table of a request.

    Attributes:
        table: The table; one of TorchRec's own is described as the full table that it is.
        collection: Path of its collection within the model.
        layouts: The ways in which it may be divided, in the order of the problem's options.
    """

    table: CompositionalEmbeddingConfig
    collection: str
    layouts: Sequence[Layout]


class TableProblem:
    """The tables of a request as a problem; tables that lie together are one table of the problem, a unit.

    Args:
        request: Model, cluster and workload.
        costs: What placements cost.

    Attributes:
        tables: The tables of the request.
        unit_of: Number of each table's unit.
        tables_of: Numbers of each unit's tables.

    Raises:
        UserError: The config names a table that does not exist, or allows no way for one that does.
    """

    def __init__(self, request: PlanRequest, costs: PlacementCosts) -> None:
        self._request, self._costs = request, costs
        self._groups = _Numbers()
        self._exchanges = _Numbers()
        self._phases = _Numbers()
        self.layouts = Layouts(request)
        self.tables: list[PlannedTable] = []
        self.unit_of: list[int] = []
        self._class_of: list[int] = []
        self._first_of_class: dict[Hashable, list[PlannedTable]] = {}
        members: dict[str, list[tuple[CompositionalEmbeddingConfig, str]]] = {}
        for path, tables in request.tables_by_collection.items():
            for table in tables:
                members.setdefault(self.layouts.together_with(table)[0], []).append((table, path))
        numbers, unit_of = _Numbers(), dict[str, tuple[int, PlannedTable]]()
        for unit, own in enumerate(members.values()):
            key = tuple((costs.table_class(table, path), repr(self.layouts.own(table))) for table, path in own)
            if key not in self._first_of_class:
                layouts = self.layouts.of_unit(own)
                self._first_of_class[key] = [
                    PlannedTable(table, path, each) for (table, path), each in zip(own, layouts, strict=True)
                ]
            self._class_of.append(numbers.number(key))
            for (table, path), first in zip(own, self._first_of_class[key], strict=True):
                unit_of[table.name] = unit, PlannedTable(table, path, first.layouts)
        self.tables_of: list[list[int]] = [[] for _ in members]
        for tables in request.tables_by_collection.values():
            for table in tables:
                unit, planned = unit_of[table.name]
                self.tables_of[unit].append(len(self.tables))
                self.unit_of.append(unit)
                self.tables.append(planned)

    @cached_property
    def problem(self) -> Problem:
        """The problem."""
        cluster, costs = self._request.cluster, self._costs
        for own in (own for members in self._first_of_class.values() for own in members):
            for layout in own.layouts:
                self._note(self._cost(own, layout))
        return Problem(
            world_size=cluster.world_size,
            ranks_per_node=cluster.ranks_per_node,
            ranks_at_once=cluster.ranks_at_once,
            base_ms=costs.networks_ms + costs.networks_all_reduce_ms + costs.all_reduce_start_ms,
            group_start_ms=[costs.group_start_ms(group) for group in self._groups],
            exchange_start_ms=[costs.exchange_start_ms(exchange) for exchange in self._exchanges],
            num_phases=len(self._phases),
            classes=[
                [
                    Option.together([self._option(own, layout) for own, layout in zip(members, layouts, strict=True)])
                    for layouts in zip(*(own.layouts for own in members), strict=True)
                ]
                for members in self._first_of_class.values()
            ],
            class_of=self._class_of,
            ranks_of_class=[
                self.layouts.ranks(own.table for own in members) for members in self._first_of_class.values()
            ],
        )

    def layout(self, table: int, option: int) -> Layout:
        """Returns the way that is an option of a table."""
        return self.tables[table].layouts[option - self.problem.options_of(self.unit_of[table]).start]

    def cost(self, table: int, option: int) -> PlacementCost:
        """Returns what an option of a table costs."""
        return self._cost(self.tables[table], self.layout(table, option))

    def option(self, planned: PlannedTable, layout: Layout) -> Option:
        """Returns what a layout of a table takes of ranks, be it one of the problem's or another."""
        self._note(self._cost(planned, layout))
        return self._option(planned, layout)

    def plan(self, assignment: Assignment) -> ShardingPlan:
        """Returns TorchRec's plan of an assignment."""
        modules: dict[str, EmbeddingModuleShardingPlan] = {}
        for table, planned in enumerate(self.tables):
            module = modules.setdefault(planned.collection, EmbeddingModuleShardingPlan())
            module[planned.table.name] = self.sharding(assignment, table)
        return ShardingPlan(dict(modules))

    def sharding(self, assignment: Assignment, table: int) -> ParameterSharding:
        """Returns TorchRec's answer for one table of an assignment."""
        planned, unit, cluster = self.tables[table], self.unit_of[table], self._request.cluster
        option = int(assignment.option[unit])
        layout, blocks = self.layout(table, option), self.problem.options[option].blocks
        if is_on_every_rank(layout.sharding_type):
            ranks = list(range(cluster.world_size))
        else:
            ranks = []
            for block, place in zip(blocks, assignment.places[unit].tolist(), strict=True):
                size = cluster.ranks_per_node if block.fills_node else 1
                ranks += range(place * size, (place + 1) * size)
        return unit_sharding(planned.table, layout, ranks, cluster)

    def _cost(self, planned: PlannedTable, layout: Layout) -> PlacementCost:
        return self._costs.cost(planned.table, layout, planned.collection)

    def _note(self, cost: PlacementCost) -> None:
        """Numbers the groups, exchanges and phases of a cost."""
        everywhere = [cost.everywhere] if cost.everywhere is not None else []
        for shard in (*cost.shards, *everywhere):
            if shard.group is not None:
                self._groups.number(shard.group)
            for phase in shard.transfers:
                self._phases.number(phase)
        if cost.exchange is not None:
            self._exchanges.number(cost.exchange)

    def _option(self, planned: PlannedTable, layout: Layout) -> Option:
        cost = self._cost(planned, layout)
        size = self._request.cluster.ranks_per_node if len(cost.shards) > len(layout.columns) else 1
        on_all, by_range = self._storage(planned.table, layout)
        ranges = list(zip(cost.shards[::size], by_range, layout.columns, strict=True)) if cost.shards else []
        if self._is_within_node(layout):
            ranges = ranges[:1]  # they are alike, one for each rank of the node
        fills_node = size > 1 or self._is_within_node(layout)
        blocks = [
            self._block(shard, held, self._buffer_bytes(planned.table, columns, size), fills_node=fills_node)
            for shard, held, columns in ranges
        ]
        buffers = self._buffer_bytes_everywhere(planned.table, layout)
        everywhere = self._block(cost.everywhere or ShardCost(0.0, None), on_all, buffers, cost.all_reduce_ms)
        exchanges = () if cost.exchange is None else (self._exchanges.number(cost.exchange),)
        kind = layout.sharding_type, layout.compute_kernel
        return Option(tuple(blocks), everywhere, exchanges, kind, len(layout.columns))

    def _is_within_node(self, layout: Layout) -> bool:
        """Returns whether the ranges of columns have to go to one of several nodes together."""
        is_on_node = layout.sharding_type == ShardingType.TABLE_COLUMN_WISE.value and self._request.cluster.nodes > 1
        return is_on_node and len(layout.columns) > 1

    def _block(
        self, shard: ShardCost, held: "_Bytes", buffer_bytes: float, extra_ms: float = 0.0, fills_node: bool = False
    ) -> Block:
        own, other = [0.0] * len(self._phases), [0.0] * len(self._phases)
        for phase, transfer in shard.transfers.items():
            own[self._phases.number(phase)] = transfer.owner_ms
            other[self._phases.number(phase)] = transfer.other_ms
        return Block(
            lookup_ms=shard.lookup_ms + extra_ms,
            num_bytes=held.total + buffer_bytes,
            stored_bytes=held.stored,
            groups=() if shard.group is None else (self._groups.number(shard.group),),
            own_ms=tuple(own),
            other_ms=tuple(other),
            fills_node=fills_node,
            host_bytes=held.host,
        )

    def _storage(self, table: CompositionalEmbeddingConfig, layout: Layout) -> tuple["_Bytes", list["_Bytes"]]:
        """Returns the bytes on every rank, and those of the fullest shard of each range of columns beside them."""
        optimizers, cache_ratio = self._request.table_optimizers, self._request.cache_ratio
        slices, replicated = divided_table(table, layout)
        num_row_shards, is_grid = self._costs.num_row_shards(layout.sharding_type), len(slices) > 1
        on_all = replicated_storage(table, replicated, optimizers)
        by_shape: dict[Hashable, TableStorage] = {}
        for own in slices:
            if own.shape not in by_shape:
                by_shape[own.shape] = slice_storage(own, num_row_shards, optimizers, cache_ratio, is_grid)
        if is_on_every_rank(layout.sharding_type):
            return _Bytes.held(sum(by_shape.values(), on_all)), []
        return _Bytes.held(on_all), [_Bytes.held(by_shape[own.shape]) for own in slices]

    def _buffer_bytes(self, table: CompositionalEmbeddingConfig, columns: tuple[int, int], num_blocks: int) -> float:
        """Returns a guess of the bytes that a rank needs to look up some columns of all rows of a step."""
        workload = self._request.workload
        return self._bytes_of_rows(table, columns[1] - columns[0], workload.batch_size, num_blocks)

    def _buffer_bytes_everywhere(self, table: CompositionalEmbeddingConfig, layout: Layout) -> float:
        """Returns a guess of the bytes that every rank needs for a table, wherever it is."""
        workload, world_size = self._request.workload, self._request.cluster.world_size
        columns, own_rows = layout.columns[-1][1], workload.rows_of_rank(world_size)
        if layout.sharding_type == "row_wise":
            return self._bytes_of_rows(table, columns, workload.batch_size, world_size)
        return self._bytes_of_rows(table, columns, own_rows, 1)

    def _bytes_of_rows(
        self, table: CompositionalEmbeddingConfig, num_columns: int, num_rows: int, num_blocks: int
    ) -> float:
        features, workload = table.feature_names, self._request.workload
        num_ids = num_rows * sum(workload.ids_per_row.get(name, 1.0) for name in features) / num_blocks
        num_vectors = num_rows * len(features) if is_pooled(table) else num_ids
        return num_vectors * num_columns * _FLOAT_BYTES * _VECTOR_COPIES + num_ids * _LONG_BYTES * _ID_COPIES


def unit_sharding(
    table: CompositionalEmbeddingConfig, layout: Layout, ranks: Sequence[int], cluster: Cluster
) -> ParameterSharding:
    """Returns the answer for a table's unit.

    Args:
        table: The table.
        layout: How it is divided.
        ranks: Rank of each shard, range of columns after range, and of blocks of rows one after the other; of a
            table that every rank has, all ranks.
        cluster: The ranks.
    """
    if layout.sharding_type == ShardingType.DATA_PARALLEL.value:
        return ParameterSharding(layout.sharding_type, layout.compute_kernel, list(ranks), None)
    start, stop = layout.columns[0]
    sizes, offsets = calculate_shard_sizes_and_offsets(
        torch.empty(unit_size(table), device="meta"),
        cluster.world_size,
        cluster.ranks_per_node,
        layout.sharding_type,
        stop - start,
    )
    shards = [
        ShardMetadata(offset, size, rank_and_device(cluster.device.kind, rank, cluster.ranks_per_node))
        for offset, size, rank in zip(offsets, sizes, ranks, strict=True)
    ]
    return ParameterSharding(layout.sharding_type, layout.compute_kernel, list(ranks), EnumerableShardingSpec(shards))


@dataclass(frozen=True)
class _Bytes:
    """Bytes of a part of a table.

    Attributes:
        total: Bytes of weights, states, caches and gradients on the device.
        stored: The same without gradients.
        host: Bytes in the machine's memory beside a device.
    """

    total: float
    stored: float
    host: float

    @classmethod
    def held(cls, storage: TableStorage) -> "_Bytes":
        """Returns the bytes of a table's storage on a rank."""
        return cls(storage.total, storage.total - storage.gradients, storage.host)


class _Numbers:
    """Numbers things in the order in which they are first seen."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def number(self, thing: Hashable) -> int:
        """Returns the number of a thing."""
        return self._numbers.setdefault(thing, len(self._numbers))

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._numbers)
