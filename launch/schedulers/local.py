"""TorchX's scheduler for this machine, corrected: its processes end with it, also where it is killed.

TorchX 0.7.0 ends its processes when it is asked to end itself. Killed, it left them running, in sessions of their own.
"""

import os
from typing import Any

from torchx.schedulers import local_scheduler

from distembed.base.process import PARENT_VARIABLE


class LocalScheduler(local_scheduler.LocalScheduler):
    """Runs applications as processes of this machine, which are told who started them."""

    def _get_replica_env(self, replica_params: Any) -> dict[str, str]:
        return {**super()._get_replica_env(replica_params), PARENT_VARIABLE: str(os.getpid())}


def create_scheduler(session_name: str, cache_size: int = 100, **_: Any) -> LocalScheduler:
    """Returns the scheduler; TorchX calls this for ``-s local_cwd``."""
    return LocalScheduler(session_name, local_scheduler.CWDImageProvider, cache_size)
