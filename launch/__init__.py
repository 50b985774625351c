"""Starts distembed on clusters: TorchX components, a scheduler for Slurm, checks before a job is submitted."""
