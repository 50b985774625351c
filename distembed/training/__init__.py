"""Training: the step, metrics, checkpoints, the run folder, and reports on it."""
