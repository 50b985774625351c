"""A plan with what each rank holds under it and how long its step takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn
from torchrec.distributed.types import ShardingPlan

from distembed.embedding.modules import embedding_modules, table_configs
from distembed.planning.costs import PlacementCosts
from distembed.planning.other_placements import Alternative
from distembed.planning.planned_rank import PlannedRank
from distembed.planning.request import PlanRequest
from distembed.planning.times import step_times
from distembed.sharding.placement import Placement, place_tables


@dataclass(frozen=True)
class EstimatedPlan:
    """The fastest plan that was found to fit; where none was, one with few bytes on the fullest rank."""

    plan: ShardingPlan
    placements: Sequence[Placement]  # of all tables, TorchRec's own as the full tables that they are
    ranks: Sequence[PlannedRank]
    why: Mapping[str, str]  # the reason of each table's place
    alternatives: Mapping[str, Sequence[Alternative]]  # the best other places of each table, the best first
    lower_bound_ms: float  # of the slowest rank's step; no plan that fits goes below it
    is_complete: bool  # whether the search ended by itself; else it was stopped after its last allowed try

    @property
    def fits(self) -> bool:
        """Whether every rank has room."""
        return all(rank.fits for rank in self.ranks)


def plan_placements(model: nn.Module, plan: ShardingPlan, world_size: int) -> list[Placement]:
    """Returns where the parameters of all tables of a model go, collection after collection."""
    return [
        placement
        for path, module in embedding_modules(model).items()
        if path in plan.plan
        for placement in place_tables(table_configs(module), plan.plan[path], world_size, collection=path)
    ]


def estimated_ranks(
    request: PlanRequest, costs: PlacementCosts, placements: Sequence[Placement], ranks: Sequence[PlannedRank]
) -> list[PlannedRank]:
    """Returns ranks whose memory was counted with their times, the allocator's share and their capacity."""
    cluster = request.cluster
    of_rank = zip(
        ranks,
        step_times(placements, costs, cluster),
        cluster.bytes_by_rank,
        cluster.host_bytes_by_rank,
        request.plannable_bytes.tolist(),
        strict=True,
    )
    return [
        replace(
            own,
            memory={**own.memory, "allocator": num_bytes - int(plannable)},
            times=times,
            capacity_bytes=num_bytes,
            host_capacity_bytes=host_bytes,
        )
        for own, times, num_bytes, host_bytes, plannable in of_rank
    ]
