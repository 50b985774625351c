"""Every plan of a small request, the time of each and whether it fits: by trying, apart from the search.

Two plans are one here if they differ in nothing but which node is which, which rank of a node is which, and which of
two tables that are alike is which. The time of a plan is added up here from the costs of its placements, without
:func:`~distembed.planning.costs.step_times`, so that the two sums check each other. The memory of ranks that hold equal
parts is counted once.
"""

import dataclasses
import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan

from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.optim.table_storage import TableStorage
from distembed.planning import PlanRequest
from distembed.planning.buffers import Step
from distembed.planning.costs import Layout, PlacementCosts, ShardCost
from distembed.planning.storage import PlannedRank, storage_by_rank
from distembed.planning.table_problem import unit_sharding
from distembed.sharding.placement import IN_HOST_MEMORY, Placement, can_be_placed, place_table
from distembed.sharding.table_slice import is_pooled, width

ON_EVERY_RANK = ("row_wise", "data_parallel")
WITHIN_NODES = ("table_row_wise", "grid_shard")
IN_RANGES = ("column_wise", "grid_shard")


class TooManyPlans(Exception):
    """There are more plans than can be tried."""


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to place one table.

    Attributes:
        layout: How the table is divided.
        ranks: Rank of each shard; none of a table that is on every rank.
        parts: What each rank has, as a number; ranks that have none are left out.
    """

    layout: Layout
    ranks: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]


class EveryPlan:
    """All plans of a request.

    Args:
        request: The request; tables that are alike stand side by side.
        most: How often a table may be placed, all plans together.

    Attributes:
        slowest_ms: Time of the slowest rank under each plan, the fastest plan first.

    Raises:
        TooManyPlans: Tables would have to be placed more often.
    """

    def __init__(self, request: PlanRequest, most: int) -> None:
        self.request, self._cluster = request, request.cluster
        self._tables = [(path, table) for path, tables in request.tables_by_collection.items() for table in tables]
        self._costs = PlacementCosts(request)
        self._parts: dict[Hashable, int] = {}
        self._ways = [list(self._ways_of(path, table)) for path, table in self._tables]
        self._known: dict[tuple[int, int], Placement] = {}
        plans = self._all_plans(most)
        slowest_ms = self._milliseconds(plans).max(1)
        order = slowest_ms.argsort(kind="stable")
        self._plans, self.slowest_ms = plans[order], slowest_ms[order]
        self._memory: dict[Hashable, PlannedRank] = {}

    def plan(self, number: int) -> ShardingPlan:
        """Returns a plan as TorchRec has it."""
        modules: dict[str, EmbeddingModuleShardingPlan] = {}
        for own in self._placements(number):
            modules.setdefault(own.collection, EmbeddingModuleShardingPlan())[own.table.name] = own.unit
        return ShardingPlan(dict(modules))

    def fastest_that_fits(self, request: PlanRequest) -> int | None:
        """Returns the number of the fastest plan that fits a request with other memory; None where none fits."""
        capacity, host_capacity = request.plannable_bytes.min(), request.cluster.host_bytes_per_rank
        stored, host = self._stored_bytes(), self._stored_bytes("host")
        possible = (stored.max(1) <= capacity) & (host.max(1) <= host_capacity)
        for number in np.flatnonzero(possible).tolist():
            ranks = np.argsort(-stored[number], kind="stable").tolist()
            if all(self._memory_of(number, rank).total_bytes <= capacity for rank in ranks):
                return int(number)
        return None

    def needed_bytes(self, number: int) -> int:
        """Returns the bytes of the fullest rank under a plan."""
        return max(self._memory_of(number, rank).total_bytes for rank in range(self._cluster.world_size))

    def emptiest(self) -> int:
        """Returns the number of a plan with few bytes of weights and states on the fullest rank."""
        return int(self._stored_bytes().max(1).argmin())

    def _ways_of(self, path: str, table: CompositionalEmbeddingConfig) -> Iterator[Way]:
        for layout in self._layouts(table):
            for ranks in self._ranks(path, table, layout):
                yield Way(layout, ranks, tuple(self._parts_of(path, table, layout, ranks)))

    def _layouts(self, table: CompositionalEmbeddingConfig) -> Iterator[Layout]:
        """Yields all ways to divide a table, as the planning README has them."""
        config, columns = self.request.config, width(table)
        own = config.tables[table.name] if table.name in config.tables else None
        types = own.sharding_types if own and own.sharding_types else config.sharding_types
        levels = WITHIN_NODES if min(self._cluster.nodes, self._cluster.ranks_per_node) > 1 else ()
        usual = ("table_wise", *(("column_wise",) if is_pooled(table) else ()), "row_wise", "data_parallel", *levels)
        for name in types or usual:
            if not can_be_placed(table, name):
                continue
            most = self._cluster.nodes if name == "grid_shard" else self._cluster.world_size
            line = {"cuda": 128, "cpu": 64}[self._cluster.device.kind] // table.bytes_per_number
            narrowest = config.min_partition or (4 if types and {*types} <= {*IN_RANGES} else line)
            numbers = [n for n in range(2, most + 1) if columns % (4 * n) == 0 and columns // n >= narrowest]
            if name not in IN_RANGES or (types and not numbers):
                numbers = [1]
            kernels = ["dense"] if name == "data_parallel" else ["fused"]
            if name != "data_parallel" and config.host_memory and self._cluster.device.kind == "cuda":
                kernels += IN_HOST_MEMORY
            for number, kernel in itertools.product(numbers, kernels):
                wide = columns // number
                yield Layout(name, kernel, tuple((at, at + wide) for at in range(0, columns, wide)))

    def _ranks(self, path: str, table: CompositionalEmbeddingConfig, layout: Layout) -> Iterator[tuple[int, ...]]:
        """Yields the ranks that shards may be on; of shards that are alike in one order."""
        if layout.sharding_type in ON_EVERY_RANK:
            yield ()
            return
        cluster, number = self._cluster, len(layout.columns)
        size = cluster.ranks_per_node if layout.sharding_type in WITHIN_NODES else 1
        parts = [part for _, part in self._parts_of(path, table, layout, range(number * size))]
        are_alike = len({tuple(parts[at : at + size]) for at in range(0, number * size, size)}) == 1
        choose = itertools.combinations if are_alike else itertools.permutations
        for places in choose(range(cluster.world_size // size), number):
            yield tuple(place * size + at for place in places for at in range(size))

    def _parts_of(
        self, path: str, table: CompositionalEmbeddingConfig, layout: Layout, ranks: Sequence[int]
    ) -> Iterator[tuple[int, int]]:
        """Yields each rank with the number of what it has of a table, equal for tables that are alike."""
        features = table.feature_names
        alike = (
            (path, type(table), table.num_embeddings, table.embedding_dim, tuple(table.scheme.num_rows)),
            (type(table.scheme), type(table.combine), getattr(table, "pooling", None)),
            tuple(self.request.workload.ids_per_row.get(name, 1.0) for name in features),
        )
        shards = self._costs.cost(table, layout, path).shards
        stored = self._stored(path, table, layout, ranks)
        own = range(self._cluster.world_size) if layout.sharding_type in ON_EVERY_RANK else ranks
        for at, rank in enumerate(own):
            cost = _key(shards[at]) if shards else None
            part = alike, layout.sharding_type, layout.compute_kernel, len(layout.columns), cost, stored.get(rank)
            yield rank, self._parts.setdefault(part, len(self._parts))

    def _stored(
        self, path: str, table: CompositionalEmbeddingConfig, layout: Layout, ranks: Sequence[int]
    ) -> Mapping[int, TableStorage]:
        """Returns the storage of each rank that has a part of a table."""
        placement, request = self._placement(path, table, layout, ranks), self.request
        return storage_by_rank(placement, self._cluster.world_size, request.table_optimizers, request.cache_ratio)

    def _placement(
        self, path: str, table: CompositionalEmbeddingConfig, layout: Layout, ranks: Sequence[int]
    ) -> Placement:
        world_size = self._cluster.world_size
        own = range(world_size) if layout.sharding_type in ON_EVERY_RANK else ranks
        return place_table(table, unit_sharding(table, layout, own, self._cluster), world_size, path)

    def _all_plans(self, most: int) -> npt.NDArray[np.int64]:
        """Returns the numbers of the tables' ways, by plan and table."""
        nobody: list[tuple[int, ...]] = [()] * self._cluster.world_size
        plans: dict[Hashable, tuple[list[tuple[int, ...]], tuple[int, ...]]] = {None: (nobody, ())}
        left = most
        for ways in self._ways:
            left -= len(plans) * len(ways)
            if left < 0:
                raise TooManyPlans
            placed = plans.values()
            plans = {}
            for (ranks, chosen), (number, way) in itertools.product(placed, enumerate(ways)):
                after = list(ranks)
                for rank, part in way.parts:
                    after[rank] = tuple(sorted((*after[rank], part)))
                plans.setdefault(self._without_names(after), (after, (*chosen, number)))
        return np.array([chosen for _, chosen in plans.values()], np.int64)

    def _without_names(self, ranks: Sequence[tuple[int, ...]]) -> Hashable:
        """Returns what ranks have, whichever rank of a node and whichever node it is."""
        size = self._cluster.ranks_per_node
        return tuple(sorted(tuple(sorted(ranks[at : at + size])) for at in range(0, len(ranks), size)))

    def _milliseconds(self, plans: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Returns the time of each rank, by plan and rank, as the module ``costs`` says that it is made up."""
        costs, cluster, size = self._costs, self._cluster, self._cluster.world_size
        by_table = [
            [costs.cost(table, way.layout, path) for way in ways]
            for (path, table), ways in zip(self._tables, self._ways, strict=True)
        ]
        shards = [own for of_ways in by_table for cost in of_ways for own in (*cost.shards, cost.everywhere) if own]
        groups = {group: at for at, group in enumerate(dict.fromkeys(own.group for own in shards))}
        phases = {phase: at for at, phase in enumerate(dict.fromkeys(ph for own in shards for ph in own.transfers))}
        exchanges = {key: at for at, key in enumerate(dict.fromkeys(c.exchange for own in by_table for c in own))}
        ms = np.full((len(plans), size), costs.networks_ms + costs.networks_all_reduce_ms + costs.all_reduce_start_ms)
        own_ms, other_ms = np.zeros((2, len(plans), size, len(phases)))
        in_group = np.zeros((len(plans), size, len(groups)), bool)
        in_use = np.zeros((len(plans), len(exchanges)), bool)
        for at, (of_ways, ways) in enumerate(zip(by_table, self._ways, strict=True)):
            way_ms, way_groups = np.zeros((len(ways), size)), np.zeros((len(ways), size, len(groups)), bool)
            way_own, way_other = np.zeros((2, len(ways), size, len(phases)))
            for number, (cost, way) in enumerate(zip(of_ways, ways, strict=True)):
                everywhere = [(rank, cost.everywhere) for rank in range(size)] if cost.everywhere else []
                way_ms[number] += cost.all_reduce_ms
                for rank, shard in [*zip(way.ranks, cost.shards, strict=True), *everywhere]:
                    way_ms[number, rank] += shard.lookup_ms
                    way_groups[number, rank, groups[shard.group]] = True
                    for phase, transfer in shard.transfers.items():
                        way_own[number, rank, phases[phase]] += transfer.owner_ms
                        others = np.arange(size) != rank
                        is_alone = shard is not cost.everywhere
                        way_other[number, others, phases[phase]] += transfer.other_ms * is_alone
            chosen = plans[:, at]
            ms += way_ms[chosen]
            own_ms += way_own[chosen]
            other_ms += way_other[chosen]
            in_group |= way_groups[chosen]
            in_use[np.arange(len(plans)), [exchanges[of_ways[number].exchange] for number in chosen]] = True
        ms += np.maximum(own_ms, other_ms).sum(2)
        ms += in_group @ np.array([costs.group_start_ms(group) for group in groups])
        starts = [0.0 if key is None else costs.exchange_start_ms(key) for key in exchanges]
        ms += (in_use @ np.array(starts))[:, None]
        nodes = ms.reshape(len(plans), cluster.nodes, cluster.ranks_per_node)
        shared = nodes.sum(2, keepdims=True) / cluster.ranks_at_once
        return np.maximum(nodes, shared).reshape(len(plans), size)

    def _stored_bytes(self, where: str = "device") -> npt.NDArray[np.int64]:
        """Returns bytes of weights and states, by plan and rank."""
        size = self._cluster.world_size
        stored = np.zeros((len(self._plans), size), np.int64)
        for at, ((path, table), ways) in enumerate(zip(self._tables, self._ways, strict=True)):
            of_ways = np.zeros((len(ways), size), np.int64)
            for number, way in enumerate(ways):
                for rank, own in self._stored(path, table, way.layout, way.ranks).items():
                    of_ways[number, rank] = own.host if where == "host" else own.total - own.gradients
            stored += of_ways[self._plans[:, at]]
        return stored

    def _placements(self, number: int) -> list[Placement]:
        return [self._placed(at, own) for at, own in enumerate(self._plans[number].tolist())]

    def _placed(self, table: int, way: int) -> Placement:
        if (table, way) not in self._known:
            (path, own), chosen = self._tables[table], self._ways[table][way]
            self._known[table, way] = self._placement(path, own, chosen.layout, chosen.ranks)
        return self._known[table, way]

    def _memory_of(self, number: int, rank: int) -> PlannedRank:
        """Returns the memory of a rank: that of any which has the same where all tables are divided the same way."""
        chosen = [ways[at] for ways, at in zip(self._ways, self._plans[number].tolist(), strict=True)]
        key = tuple((way.layout, tuple(part for where, part in way.parts if where == rank)) for way in chosen)
        if key not in self._memory:
            self._memory[key] = Step.of(self.request, self._placements(number)).rank(rank)
        return self._memory[key]


def _key(shard: ShardCost) -> Hashable:
    return shard.lookup_ms, shard.group, tuple(sorted(shard.transfers.items(), key=str))
