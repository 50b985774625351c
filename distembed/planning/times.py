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
    """Returns the times of every rank for placements of all tables, TorchRec's own as the full tables that they are."""
    common, ranks = _Shards(), [_Shards() for _ in range(cluster.world_size)]
    all_reduce_ms, others = costs.networks_all_reduce_ms, defaultdict[Phase, float](float)
    exchanges: dict[ExchangeKey, None] = {}  # in order, so that sums are the same in every run
    for placed in placements:
        own_layout, rank_of_shard = layout(placed.unit, width(placed.table))
        cost = costs.cost(placed.table, own_layout, placed.collection)
        all_reduce_ms += cost.all_reduce_ms
        if cost.exchange is not None:
            exchanges[cost.exchange] = None
        common.add(cost.everywhere)
        for rank, shard in zip(rank_of_shard, cost.shards, strict=True):
            ranks[rank].add(shard)
            for phase, transfer in shard.transfers.items():
                others[phase] += transfer.other_ms
    exchange_starts_ms = sum(costs.exchange_start_ms(exchange) for exchange in exchanges)
    times = []
    for own in ranks:
        starts_ms = sum(costs.group_start_ms(group) for group in own.groups | common.groups)
        exchange_ms = 0.0
        for phase in others | common.owner_ms:
            own_ms = own.owner_ms[phase] + common.owner_ms[phase]
            exchange_ms += max(own_ms, others[phase] - own.other_ms[phase])
        starts_ms = starts_ms + exchange_starts_ms + costs.all_reduce_start_ms
        lookup_ms = own.lookup_ms + common.lookup_ms
        times.append(StepTime(lookup_ms, exchange_ms, costs.networks_ms, all_reduce_ms, starts_ms))
    return _sharing_cores(times, cluster)


class _Shards:
    """Costs of some shards: their lookups, their groups, and what is communicated by phase."""

    def __init__(self) -> None:
        self.lookup_ms = 0.0
        self.groups: dict[Hashable, None] = {}
        self.owner_ms = defaultdict[Phase, float](float)
        self.other_ms = defaultdict[Phase, float](float)

    def add(self, shard: ShardCost) -> None:
        self.lookup_ms += shard.lookup_ms
        self.groups[shard.group] = None
        for phase, transfer in shard.transfers.items():
            self.owner_ms[phase] += transfer.owner_ms
            self.other_ms[phase] += transfer.other_ms


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
