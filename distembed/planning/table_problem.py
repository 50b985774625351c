"""The tables of a request as a problem in numbers, and the plan of the problem's solution.

A *unit* is one table, or several tables that the config keeps on the same ranks (``plan.together``): the search places
units. Units that differ in names only form one class, whose options are costed once (:mod:`distembed.planning.costs`).
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
from distembed.planning.costs import Layout, PlacementCost, PlacementCosts, ShardCost
from distembed.planning.devices import Cluster
from distembed.planning.fastest.problem import Assignment, Option, Problem, ShardBlock
from distembed.planning.layouts import Layouts
from distembed.planning.request import PlanRequest
from distembed.planning.times import ExchangeKey, Phase, Transfer, is_on_every_rank
from distembed.sharding.table_slice import unit_size


@dataclass(frozen=True)
class PlannedTable:
    """A table of a request; TorchRec's own tables are described as full tables."""

    table: CompositionalEmbeddingConfig
    collection: str  # path of the collection within the model
    layouts: Sequence[Layout]  # the n-th layout is the table's part of its unit's n-th option


class TableProblem:
    """The tables of a request as a :class:`Problem`, whose tables are the request's units.

    ``unit_by_table[table]`` is the unit of a table of the request, ``tables_by_unit[unit]`` the numbers of a unit's
    tables. Raises a ``UserError`` where the config allows no layout for a table or for a unit.
    """

    def __init__(self, request: PlanRequest, costs: PlacementCosts) -> None:
        self._request, self._costs, self.layouts = request, costs, Layouts(request)
        # numbers of groups, exchanges and phases, in the order in which they are first seen
        self._groups: dict[Hashable, int] = {}
        self._exchanges: dict[ExchangeKey, int] = {}
        self._phases: dict[Phase, int] = {}
        tables = [(table, path) for path, configs in request.tables_by_collection.items() for table in configs]
        unit_numbers: dict[str, int] = {}  # by the first table's name
        first_names = [self.layouts.together_with(table)[0] for table, _ in tables]
        self.unit_by_table = [unit_numbers.setdefault(name, len(unit_numbers)) for name in first_names]
        self.tables_by_unit: list[list[int]] = [[] for _ in unit_numbers]
        for number, unit_number in enumerate(self.unit_by_table):
            self.tables_by_unit[unit_number].append(number)
        # Units with equal keys form a class, and share the layouts of the class's first unit, table by table:
        #   tables a b c d; b and d are planned together: unit_by_table 0 1 2 1, tables_by_unit [0] [1 3] [2]
        #   a and c have equal keys: _class_of 0 1 0, _first_of_class [0] [1 3]; c has the layouts of a
        layouts: dict[int, Sequence[Layout]] = {}
        class_of_key: dict[Hashable, int] = {}
        unit_layouts: Sequence[Sequence[Layout]]
        self._class_of: list[int] = []
        self._first_of_class: list[list[int]] = []  # by class, the tables of its first unit
        for numbers in self.tables_by_unit:
            unit = [tables[number] for number in numbers]
            key = tuple(
                (costs.table_class(table, path), repr(self.layouts.table_config(table))) for table, path in unit
            )
            class_number = class_of_key.setdefault(key, len(class_of_key))
            self._class_of.append(class_number)
            if class_number == len(self._first_of_class):
                self._first_of_class.append(numbers)
                unit_layouts = self.layouts.for_unit(unit)
            else:
                unit_layouts = [layouts[number] for number in self._first_of_class[class_number]]
            layouts |= zip(numbers, unit_layouts, strict=True)
        self.tables = [PlannedTable(table, path, layouts[number]) for number, (table, path) in enumerate(tables)]

    @cached_property
    def problem(self) -> Problem:
        """The problem; its groups, exchanges and phases are numbered in the order in which costs name them."""
        cluster, costs = self._request.cluster, self._costs
        classes = [[self.tables[number] for number in numbers] for numbers in self._first_of_class]
        for cost in (self._cost(table, layout) for members in classes for table in members for layout in table.layouts):
            for shard in (*cost.shards, cost.everywhere):
                if shard.group is not None:
                    self._groups.setdefault(shard.group, len(self._groups))
                for phase in shard.transfers:
                    self._phases.setdefault(phase, len(self._phases))
            if cost.exchange is not None:
                self._exchanges.setdefault(cost.exchange, len(self._exchanges))
        return Problem(
            world_size=cluster.world_size,
            ranks_per_node=cluster.ranks_per_node,
            ranks_at_once=cluster.ranks_at_once,
            base_ms=costs.networks_ms + costs.networks_all_reduce_ms + costs.all_reduce_start_ms,
            group_start_ms=[costs.group_start_ms(group) for group in self._groups],
            exchange_start_ms=[costs.exchange_start_ms(exchange) for exchange in self._exchanges],
            num_phases=len(self._phases),
            classes=[self._options(members) for members in classes],
            class_of=self._class_of,
            ranks_of_class=[self.layouts.ranks(table.table for table in members) for members in classes],
        )

    def layout(self, table: int, option: int) -> Layout:
        """Returns a table's layout under an option of its unit, given by its number in the whole problem."""
        return self.tables[table].layouts[option - self.problem.options_of(self.unit_by_table[table]).start]

    def cost(self, table: int, option: int) -> PlacementCost:
        return self._cost(self.tables[table], self.layout(table, option))

    def plan(self, assignment: Assignment) -> ShardingPlan:
        modules: dict[str, EmbeddingModuleShardingPlan] = {}
        for table, planned in enumerate(self.tables):
            module = modules.setdefault(planned.collection, EmbeddingModuleShardingPlan())
            module[planned.table.name] = self.sharding(assignment, table)
        return ShardingPlan(dict(modules))

    def sharding(self, assignment: Assignment, table: int) -> ParameterSharding:
        """Returns TorchRec's form of one table's place in an assignment."""
        # ranks by range of columns, one for each place; a place that is a node stands for all of its ranks
        unit, cluster = self.unit_by_table[table], self._request.cluster
        option = int(assignment.option[unit])
        layout, blocks = self.layout(table, option), self.problem.options[option].blocks
        ranks = list(range(cluster.world_size)) if is_on_every_rank(layout.sharding_type) else []
        for block, place in zip(blocks, assignment.places[unit].tolist(), strict=True):
            size = cluster.ranks_per_node if block.fills_node else 1
            ranks += range(place * size, (place + 1) * size)
        return unit_sharding(self.tables[table].table, layout, ranks, cluster)

    def _cost(self, planned: PlannedTable, layout: Layout) -> PlacementCost:
        return self._costs.cost(planned.table, layout, planned.collection)

    def _options(self, unit: Sequence[PlannedTable]) -> list[Option]:
        """Returns the options of a unit: option n gives every table its n-th layout."""
        tables_by_option = [
            [self._option(planned, planned.layouts[n]) for planned in unit] for n in range(len(unit[0].layouts))
        ]
        return [Option.together(options) for options in tables_by_option]

    def _option(self, planned: PlannedTable, layout: Layout) -> Option:
        cost, cluster = self._cost(planned, layout), self._request.cluster
        # cost.shards has `size` equal row shards for each range of columns: the first stands for the block of a range.
        # With table_column_wise on one of several nodes, the first shard stands for the ranges of all the node's ranks
        size, is_on_node = len(cost.shards) // len(layout.columns) or 1, layout.lies_on_one_node(cluster)
        shards = cost.shards[:1] if is_on_node else cost.shards[::size]
        return Option(
            blocks=tuple(self._block(shard, fills_node=size > 1 or is_on_node) for shard in shards),
            everywhere=self._block(cost.everywhere, cost.all_reduce_ms),
            exchanges=() if cost.exchange is None else (self._exchanges[cost.exchange],),
            kind=(layout.sharding_type, layout.compute_kernel),
            num_ranges=len(layout.columns),
        )

    def _block(self, shard: ShardCost, all_reduce_ms: float = 0.0, fills_node: bool = False) -> ShardBlock:
        transfers = [shard.transfers.get(phase, Transfer(0.0)) for phase in self._phases]
        return ShardBlock(
            lookup_ms=shard.lookup_ms + all_reduce_ms,
            num_bytes=shard.num_bytes,
            stored_bytes=shard.storage.total - shard.storage.gradients,
            groups=() if shard.group is None else (self._groups[shard.group],),
            own_ms=tuple(transfer.owner_ms for transfer in transfers),
            other_ms=tuple(transfer.other_ms for transfer in transfers),
            fills_node=fills_node,
            host_bytes=shard.storage.host,
        )


def unit_sharding(
    table: CompositionalEmbeddingConfig, layout: Layout, ranks: Sequence[int], cluster: Cluster
) -> ParameterSharding:
    """Returns TorchRec's sharding of one table, with shard sizes and offsets as TorchRec divides it.

    ``ranks`` has the rank of each shard, sorted by range of columns and then by block of rows. Of a table on every rank
    it has all ranks.
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
