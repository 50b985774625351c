"""TorchX's scheduler for Slurm: the batch script of a job, Slurm's commands, and the states of jobs."""
