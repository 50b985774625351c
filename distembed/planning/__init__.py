"""Placement of tables on ranks, by TorchRec's planner."""

from distembed.planning.config import PlanConfig
from distembed.planning.plan import describe_plan, make_plan, plan_as_json
from distembed.planning.workload import Workload

__all__ = ["PlanConfig", "Workload", "describe_plan", "make_plan", "plan_as_json"]
