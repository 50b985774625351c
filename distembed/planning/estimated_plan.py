"""A plan with what each rank holds under it and how long its step takes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torchrec.distributed.types import ShardingPlan

from distembed.embedding.tables import CompositionalTables
from distembed.planning.alternatives import Alternative
from distembed.planning.costs import PlacementCosts
from distembed.planning.memory import RankMemory
from distembed.planning.request import PlanRequest
from distembed.planning.search import SearchResult
from distembed.planning.times import PlacedTable, StepTime, step_times
from distembed.sharding.placement import IN_HOST_MEMORY, Placement, place_tables


@dataclass(frozen=True)
class EstimatedPlan:
    """A plan, what each rank holds under it, and how long it takes.

    Attributes:
        plan: TorchRec's plan of all collections.
        why: The reason why each table is placed as it is, by table, those of TorchRec's own collections too.
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
    """Counts what a plan that was found takes of every rank.

    Args:
        request: Model, cluster and workload of the plan.
        found: The search's result.
    """
    cluster, costs = request.cluster, PlacementCosts(request)
    placements = plan_placements(request.model, found.plan, cluster.world_size)
    return EstimatedPlan(
        plan=found.plan,
        why=_with_notes(request, found),
        memory=found.memory,
        times=step_times(placed_tables(request, found.plan, placements), costs, cluster),
        excess=max(rank.total for rank in found.memory) - request.plannable_bytes,
        host_excess=max(rank.host for rank in found.memory) - cluster.host_bytes_per_rank,
        lower_bound_ms=found.lower_bound_ms,
        is_complete=found.is_complete,
        alternatives=found.alternatives,
    )


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


def plan_placements(model: nn.Module, plan: ShardingPlan, world_size: int) -> list[Placement]:
    """Returns where the parameters of all compositional tables of a model go, collection after collection."""
    units: Mapping[str, Any] = plan.plan
    return [
        placement
        for path, module in model.named_modules()
        if isinstance(module, CompositionalTables)
        for placement in place_tables(module.tables(), units[path], world_size, collection=path)
    ]


def _with_notes(request: PlanRequest, found: SearchResult) -> dict[str, str]:
    """Returns the reason of each table, with what FBGEMM or the memory of devices has to do with it."""
    units: Mapping[str, Any] = found.plan.plan
    why = {}
    for path, tables in request.tables_by_collection.items():
        for table in tables:
            reason, kernel = found.why[table.name], units[path][table.name].compute_kernel
            if table.dense_gradient:
                reason += "; dense kernel: all rows have gradients"
            elif not request.table_optimizers.is_fused:
                reason += f"; dense kernel: FBGEMM has no {request.table_optimizers.sparse}"
            why[table.name] = reason + ("; host memory: no device has room" if kernel in IN_HOST_MEMORY else "")
    return why
