"""Optimizers of tables and networks: one table of all of them, their settings, their live states, their schedules."""

from distembed.optim.kinds import OPTIMIZERS, NumberPer, OptimizerKind

__all__ = ["OPTIMIZERS", "NumberPer", "OptimizerKind"]
