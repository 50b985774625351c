"""Perf of each sharding option, for TorchRec's planner: what :mod:`distembed.planning.costs` says of the placement."""

from collections.abc import Mapping, Sequence

from torchrec.distributed.planner.types import Perf, SharderDataMap, ShardEstimator, ShardingOption

from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.planning.costs import Layout, PlacementCosts
from distembed.planning.lookups import is_on_every_rank
from distembed.sharding.placement import width


class PlacementPerfEstimator(ShardEstimator):
    """Sets the perf of every shard to the cost of the placement.

    Args:
        costs: What placements cost.
        tables: All tables of the model, by collection's path.
    """

    def __init__(self, costs: PlacementCosts, tables: Mapping[str, Sequence[CompositionalEmbeddingConfig]]) -> None:
        self._costs = costs
        self._tables = {(path, table.name): table for path, own in tables.items() for table in own}

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: SharderDataMap) -> None:
        """Sets the perf of every shard; TorchRec calls it."""
        for option in sharding_options:
            table = self._tables[option.path, option.name]
            columns = [(shard.offset[1], shard.offset[1] + shard.size[1]) for shard in option.shards]
            if is_on_every_rank(option.sharding_type):
                columns = [(0, width(table))]
            layout = Layout(option.sharding_type, option.compute_kernel, tuple(dict.fromkeys(columns)))
            cost = self._costs.cost(table, layout, option.path)
            everywhere = [cost.everywhere] * len(option.shards) if cost.everywhere is not None else []
            for shard, own in zip(option.shards, cost.shards or everywhere, strict=True):
                exchange = sum(transfer.owner_ms for transfer in own.transfers.values())
                shard.perf = Perf(own.lookup_ms, 2 * exchange / 3 + cost.all_reduce_ms, 0.0, exchange / 3)
