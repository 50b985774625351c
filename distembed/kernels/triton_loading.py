"""Whether Triton's kernels can be had on this machine; the one place that imports Triton, once they are asked for.

Triton compiles a kernel when it is first launched, in a second or less, and keeps it in its own cache on the disk.
"""

from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from distembed.base.errors import UserError


class TritonKernels(NamedTuple):
    """The kernels, each called as ``kernel[number of programs,](...)``.

    Attributes:
        compose: Writes the composed, pooled vectors.
        write_keys: Writes each id's key in every partition.
        sum_runs: Adds up the gradients of each row whose ids lie within a chunk of sorted ones.
        join_runs: Adds up those of rows whose ids go over several chunks.
        update_rows: Updates rows by sums of gradients that were written before.
    """

    compose: Any
    write_keys: Any
    sum_runs: Any
    join_runs: Any
    update_rows: Any


@cache
def load() -> TritonKernels:
    """Returns the kernels.

    Raises:
        UserError: Triton cannot be imported.
    """
    try:
        forward = import_module("distembed.kernels.triton_kernels")
        backward = import_module("distembed.kernels.triton_update")
    except ImportError as error:
        raise UserError(
            f"the fused lookup on CUDA: triton cannot be imported ({error}); install a PyTorch that is built for CUDA, "
            "which brings it, or give tables kernel='fbgemm'."
        ) from None
    return TritonKernels(
        forward.compose, forward.write_keys, backward.sum_runs, backward.join_runs, backward.update_rows
    )
