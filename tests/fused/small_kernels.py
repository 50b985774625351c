"""Stands in for the kernels' modules where tests load them often: the same arguments, compiled at once."""

from typing import Any

from distembed.kernels.rows import compiled, entry


@compiled
def _sum_below(number: Any) -> Any:
    sum_lanes = 0
    for i in range(number):
        sum_lanes += i
    return sum_lanes


@entry
def compose_8(job: int, share: int, num_shares: int, scratch: int) -> None:
    """Computes something."""
    _sum_below(job)


@entry
def update_8(job: int, tables: int, num_tables: int, scratch: int, scratch_bytes: int) -> int:
    """Computes something that can be checked."""
    return _sum_below(job) + scratch_bytes
