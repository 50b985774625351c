"""A plan with what each rank holds under it and how long its step takes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import ShardingPlan

from distembed.embedding.tables import CompositionalTables
from distembed.planning.alternatives import Alternative
from distembed.planning.costs import PlacementCosts
from distembed.planning.memory import RankMemory, rank_memories
from distembed.planning.request import PlanRequest
from distembed.planning.search import SearchResult
from distembed.planning.times import PlacedTable, StepTime, step_times
from distembed.sharding.placement import IN_HOST_MEMORY, Placement, place_tables


@dataclass(frozen=True)
class EstimatedPlan:
    """A plan, what each rank holds under it, and how long it takes.

    Attributes:
        plan: TorchRec's plan of all collections.
        why: The reason why each compositional table is placed as it is, by table.
        memory: Memory of each rank.
        times: Time of a step on each rank.
        excess: Bytes that the fullest rank lacks, beside the share that is kept free; negative where it has room.
        host_excess: Bytes that a rank lacks of its share of the machine's memory, beside a CUDA device.
        lower_bound_ms: Milliseconds of the slowest rank's step that no plan that fits can go below; None where no bound
            is known.
        is_complete: Whether the search ended by itself; else it was stopped after its last allowed try.
        alternatives: The best other placements of each table, the best first, by table.
    """

    plan: ShardingPlan
    why: Mapping[str, str]
    memory: list[RankMemory]
    times: list[StepTime]
    excess: int
    host_excess: int
    lower_bound_ms: float | None = None
    is_complete: bool = True
    alternatives: Mapping[str, Sequence[Alternative]] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether every rank has room."""
        return self.excess <= 0 and self.host_excess <= 0


def estimate_plan(request: PlanRequest, found: SearchResult) -> EstimatedPlan:
    """Counts what a plan that was found takes of every rank; sets its kernels to ``dense`` where FBGEMM cannot train.

    Args:
        request: Model, cluster and workload of the plan.
        found: The search's result, which has a plan.
    """
    plan, cluster, workload = found.answer, request.cluster, request.workload
    assert isinstance(plan, ShardingPlan)
    compositional = {table.name for table in request.tables}
    if not request.table_optimizers.is_fused:
        for module_plan in plan.plan.values():
            for name in module_plan.keys() & (compositional | {table.name for table in request.plain_tables}):
                module_plan[name].compute_kernel = EmbeddingComputeKernel.DENSE.value
    placements = plan_placements(request.model, plan, cluster.world_size)
    plain_options = [option for option in found.options if option.name not in compositional]
    memory = rank_memories(
        placements,
        cluster.world_size,
        workload,
        request.table_optimizers,
        cluster.device.kind,
        plain_tables=counted_bytes(plain_options, cluster.world_size),
        cache_ratio=request.cache_ratio,
    )
    return EstimatedPlan(
        plan=plan,
        why={p.table.name: found.why[p.table.name] + _host_memory_note(p) for p in placements},
        memory=memory,
        times=step_times(placed_tables(request, plan, placements), PlacementCosts(request), cluster),
        excess=max(rank.total for rank in memory) - request.plannable_bytes,
        host_excess=max(rank.host for rank in memory) - cluster.host_bytes_per_rank,
    )


def plan_placements(model: nn.Module, plan: ShardingPlan, world_size: int) -> list[Placement]:
    """Returns where the parameters of all compositional tables of a model go, collection after collection."""
    units: Mapping[str, Any] = plan.plan
    return [
        placement
        for path, module in model.named_modules()
        if isinstance(module, CompositionalTables)
        for placement in place_tables(module.tables(), units[path], world_size, collection=path)
    ]


def placed_tables(request: PlanRequest, plan: ShardingPlan, placements: Iterable[Placement]) -> list[PlacedTable]:
    """Returns all tables of a model, TorchRec's own among them, with a plan's answers for them.

    Args:
        request: The model.
        plan: The plan.
        placements: Placements of the compositional tables.
    """
    units: Mapping[str, Any] = plan.plan
    plain = [
        PlacedTable(table, units[path][table.name], path)
        for path, tables in request.tables_by_collection.items()
        if path not in request.collections
        for table in tables
    ]
    return [PlacedTable(own.table, own.unit, own.collection) for own in placements] + plain


def counted_bytes(options: Iterable[ShardingOption], world_size: int) -> list[int]:
    """Returns the bytes of each rank's shards, with buffers, as the planner counted them."""
    counted = [0] * world_size
    for shard in (shard for option in options for shard in option.shards):
        assert shard.storage is not None and shard.rank is not None
        counted[shard.rank] += shard.storage.hbm or shard.storage.ddr
    return counted


def _host_memory_note(placement: Placement) -> str:
    """Returns what follows the reason of a table that ``plan.host_memory`` lets lie in host memory."""
    return "; host memory: no device has room" if placement.unit.compute_kernel in IN_HOST_MEMORY else ""
