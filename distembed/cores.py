"""How many processor cores there are."""

import os


def usable_cores() -> int:
    """Returns the number of cores that this process may run on.

    In a container or a Slurm job these are fewer than the machine has.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
