"""Checkpoints: free of plan, kernel and number of ranks, written while training goes on."""
