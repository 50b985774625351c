"""Counts the operations that a sharded step starts, in a trace of torch's profiler.

Counted are the innermost operators of ATen and FBGEMM, each of which is a kernel on CUDA, and the two passes of a
lookup in one pass, which are no operators of torch. Views, and operators that make memory without writing to it, start
no kernel.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile

_NUM_WARM_STEPS, _NUM_STEPS = 3, 2
_STARTS_NOTHING = frozenset(
    "_local_scalar_dense _reshape_alias _unsafe_view alias as_strided chunk contiguous detach detach_ empty empty_like "
    "empty_strided expand expand_as flatten is_nonzero is_pinned item lift_fresh narrow new_empty new_empty_strided "
    "permute record_stream reshape resize_ resolve_conj resolve_neg result_type select set_ slice split "
    "split_with_sizes squeeze t to transpose unbind unflatten unsqueeze view view_as".split()
)
_PASSES = ("_Fused", "_FusedBackward")


class Started(NamedTuple):
    """Operations and collectives that a step starts."""

    launches: float
    collectives: float


def count_started(step: Callable[[], object]) -> Started:
    """Takes steps under the profiler, and returns what a step starts."""
    for _ in range(_NUM_WARM_STEPS):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(_NUM_STEPS):
            step()
    events: list[Any] = list(profiled.events() or ())
    launches = sum(_num_innermost(event) for event in events if event.cpu_parent is None)
    collectives = sum(event.name.startswith("c10d::") for event in events)
    return Started(launches / _NUM_STEPS, collectives / _NUM_STEPS)


def _num_innermost(event: Any) -> int:
    within = sum(map(_num_innermost, event.cpu_children)) + (event.name in _PASSES)
    namespace, _, name = event.name.partition("::")
    return within or int(namespace in ("aten", "fbgemm") and name.split(".")[0] not in _STARTS_NOTHING)
