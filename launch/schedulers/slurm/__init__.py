"""Slurm: TorchX's scheduler with what real clusters need besides, from the batch script to the states of a job."""
