"""Shares of a pass, in a thread each."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache


@cache
def _pool() -> ThreadPoolExecutor:
    # which starts a thread only where none is idle
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="distembed-fused")


os.register_at_fork(after_in_child=_pool.cache_clear)  # where the threads are not


def in_threads(run: Callable[[int, int], None], num_shares: int) -> None:
    """Runs a function for each share, given its number and how many there are, in as many threads as there are cores.

    The first share is this thread's. All have ended when it returns or raises.
    """
    others = [_pool().submit(run, share, num_shares) for share in range(1, num_shares)]
    try:
        run(0, num_shares)
    finally:  # what they write is let go afterwards
        wait(others)
    for other in others:
        other.result()
