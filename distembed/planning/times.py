"""How long a step takes on each rank: an estimate, the sum of what the placements of all tables cost.

What a placement costs is said in :mod:`distembed.planning.costs`, and where the numbers of a device come from in
:mod:`distembed.planning.devices`.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from distembed.planning.cluster import Cluster
from distembed.planning.costs import PlacementCosts, ShardCost, layout
from distembed.planning.lookups import ExchangeKey
from distembed.planning.planned_rank import StepTime
from distembed.planning.transfers import Phase
from distembed.sharding.placement import Placement
from distembed.sharding.table_slice import width


def step_times(placements: Iterable[Placement], costs: PlacementCosts, cluster: Cluster) -> list[StepTime]:
    """Returns the times of every rank.

    Args:
        placements: Placements of all tables, TorchRec's own as the full tables that they are.
        costs: What placements cost.
        cluster: Ranks that the tables are placed on.
    """
    added = _Added(costs, cluster.world_size)
    for placement in placements:
        added.add(placement)
    times = [added.step_time(rank) for rank in range(cluster.world_size)]
    return _sharing_cores(times, cluster)


class _Added:
    """Costs of placements, added up rank by rank."""

    def __init__(self, costs: PlacementCosts, world_size: int) -> None:
        self._costs = costs
        self._all_reduce = costs.networks_all_reduce_ms
        self._exchanges: dict[ExchangeKey, None] = {}  # in order, so that sums are the same in every run
        self._common, self._ranks = _Shards(), [_Shards() for _ in range(world_size)]
        self._others: dict[Phase, float] = defaultdict(float)

    def add(self, placed: Placement) -> None:
        """Adds what a table costs."""
        own_layout, ranks = layout(placed.unit, width(placed.table))
        cost = self._costs.cost(placed.table, own_layout, placed.collection)
        self._all_reduce += cost.all_reduce_ms
        if cost.exchange is not None:
            self._exchanges[cost.exchange] = None
        if cost.everywhere is not None:
            self._common.add(cost.everywhere)
        for rank, shard in zip(ranks, cost.shards, strict=True):
            self._ranks[rank].add(shard)
            for phase, transfer in shard.transfers.items():
                self._others[phase] += transfer.other_ms

    def step_time(self, rank: int) -> StepTime:
        """Returns the time of a rank, as if it had cores of its own."""
        own, common, costs = self._ranks[rank], self._common, self._costs
        starts = sum(costs.group_start_ms(group) for group in own.groups | common.groups)
        starts += sum(costs.exchange_start_ms(exchange) for exchange in self._exchanges)
        exchange = 0.0
        for phase in self._others | common.owner:
            others = self._others.get(phase, 0.0) - own.other.get(phase, 0.0)
            exchange += max(own.owner.get(phase, 0.0) + common.owner.get(phase, 0.0), others)
        lookup = own.lookup + common.lookup
        return StepTime(lookup, exchange, costs.networks_ms, self._all_reduce, starts + costs.all_reduce_start_ms)


class _Shards:
    """Costs of some shards: their lookups, their groups, and what is communicated by phase."""

    def __init__(self) -> None:
        self.lookup = 0.0
        self.groups: dict[Hashable, None] = {}
        self.owner: dict[Phase, float] = defaultdict(float)
        self.other: dict[Phase, float] = defaultdict(float)

    def add(self, shard: ShardCost) -> None:
        self.lookup += shard.lookup_ms
        self.groups[shard.group] = None
        for phase, transfer in shard.transfers.items():
            self.owner[phase] += transfer.owner_ms
            self.other[phase] += transfer.other_ms


def _sharing_cores(times: Sequence[StepTime], cluster: Cluster) -> list[StepTime]:
    """Adds the time in which ranks wait for their node's cores: a node takes no less than its cores take for all."""
    shared: list[StepTime] = []
    size = cluster.ranks_per_node
    for first in range(0, len(times), size):
        node = times[first : first + size]
        least = sum(time.total for time in node) / cluster.ranks_at_once
        waits = cluster.ranks_at_once < size and least > max(time.total for time in node)
        shared += [replace(time, waiting=least - time.total) for time in node] if waits else node
    return shared
