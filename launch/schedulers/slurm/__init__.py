"""TorchX's scheduler for Slurm: the batch script of a job, Slurm's commands, and what its states mean."""
