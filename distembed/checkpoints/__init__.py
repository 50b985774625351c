"""Checkpoints: free of plan, kernel and number of ranks, written while training goes on."""

from distembed.checkpoints.checkpoint import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
