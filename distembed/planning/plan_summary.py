"""A plan as JSON, and in one line."""

from collections import Counter
from typing import TYPE_CHECKING, Any

from distembed.units import format_ranges

if TYPE_CHECKING:
    from torchrec.distributed.types import ShardingPlan


def plan_as_json(plan: "ShardingPlan") -> dict[str, dict[str, Any]]:
    """Returns ``{module: {table: {sharding_type, compute_kernel, ranks, shards}}}``.

    A shard is ``{rank, offset, size}``; offset and size are rows and columns of the table's unit of placement.
    """
    return {
        path: {
            table: {
                "sharding_type": sharding.sharding_type,
                "compute_kernel": sharding.compute_kernel,
                "ranks": list(sharding.ranks or []),
                "shards": [
                    {"rank": shard.placement.rank(), "offset": shard.shard_offsets, "size": shard.shard_sizes}
                    for shard in (sharding.sharding_spec.shards if sharding.sharding_spec is not None else [])
                ],
            }
            for table, sharding in module_plan.items()
        }
        for path, module_plan in plan.plan.items()
    }


def describe_plan(plan: "ShardingPlan") -> str:
    """Returns one line: how many tables have each sharding type, and how many shards each rank has."""
    shardings = [sharding for module_plan in plan.plan.values() for sharding in module_plan.values()]
    counts = Counter(sharding.sharding_type for sharding in shardings)
    num_shards = Counter(rank for sharding in shardings for rank in sharding.ranks or [])
    ranks: dict[int, list[int]] = {}
    for rank in sorted(num_shards):
        ranks.setdefault(num_shards[rank], []).append(rank)
    tables = ", ".join(f"{count} {sharding_type}" for sharding_type, count in counts.items())
    return f"{tables}; shards by rank: {'; '.join(f'{format_ranges(own)}: {count}' for count, own in ranks.items())}"
