"""Checkpoints: free of plan, kernel and number of ranks, written while training goes on."""

from typing import TYPE_CHECKING

from distembed.base.lazy import imports_on_demand

if TYPE_CHECKING:
    from distembed.checkpoints.checkpoint import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
__getattr__ = imports_on_demand(__name__)
