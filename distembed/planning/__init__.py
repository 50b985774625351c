"""Planning: places every table on ranks, and estimates the memory and the time that a step takes of each rank."""

from typing import TYPE_CHECKING

from distembed.base.lazy import imports_on_demand

if TYPE_CHECKING:
    from distembed.planning.apply_plan import load_plan
    from distembed.planning.config import PlanConfig
    from distembed.planning.request import PlanRequest, Workload
    from distembed.planning.saved_plan import describe_plan, plan_as_json
    from distembed.planning.search import make_plan
    from distembed.planning.torchrec_planner import CompositionalShardEstimator, CompositionalShardingPlanner

__all__ = [
    "CompositionalShardEstimator",
    "CompositionalShardingPlanner",
    "PlanConfig",
    "PlanRequest",
    "Workload",
    "describe_plan",
    "load_plan",
    "make_plan",
    "plan_as_json",
]
__getattr__ = imports_on_demand(__name__)
