"""Placement of tables on ranks, by TorchRec's planner."""

from distembed.planning.plan import make_plan, plan_as_json

__all__ = ["make_plan", "plan_as_json"]
