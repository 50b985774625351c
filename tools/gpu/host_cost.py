"""Measures what a launch of the fused lookup's Triton kernels costs on the host, without a GPU.

``python -m gpu.host_cost`` (with ``tools`` on ``PYTHONPATH``) prints the microseconds from the call of a kernel to the
call of the driver, for each launch of a training step, and those of the whole step. Kernels are compiled; a stand-in
takes the place of the driver, so that the driver's own time is left out. Tensors have shapes alone, so that torch's
operators cost their dispatch.
"""

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from distembed.kernels import triton_backward, triton_lookup, triton_tables
from distembed.kernels.triton_tables import TritonKernels

from .machine_code import Case, Driver, batch, lookup_of


class NoLaunch:
    """Stands for what loads kernels and launches them; nothing runs."""

    def __init__(self, *given: Any) -> None: ...

    def __call__(self, *arguments: Any) -> None:
        """Launches nothing."""

    def load_binary(self, *given: Any) -> tuple[Any, ...]:
        """Returns a module, a function, its registers, its spilled bytes and its most threads."""
        return object(), 1, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Returns the shared memory of an H100."""
        return {"max_shared_mem": 232448}

    def unload_module(self, module: Any) -> None:
        """Has loaded nothing."""


class HostDriver(Driver):
    """Stands for a device's driver, and for its launches."""

    launcher_cls: type[NoLaunch] = NoLaunch
    utils = NoLaunch()


@contextmanager
def no_launches(host_driver: HostDriver) -> Iterator[None]:
    """Has kernels within the block be compiled and not run."""
    from triton.runtime import driver

    unchecked = patch.dict(os.environ, {"DISTEMBED_CHECK_ROWS": "0"})
    with patch.object(driver, "_active", host_driver), unchecked:
        try:
            yield
        finally:  # another lookup of this process may be for another processor
            for kernel in triton_tables.triton_kernels():
                kernel.device_caches.clear()
            triton_tables.forget_launches()


def measure(case: Case, num_rows: int, num_steps: int) -> dict[str, float]:
    """Returns the median microseconds of each launch of a step, and of the step."""
    storages, lookup = lookup_of(case, "meta")
    inputs = batch(case, num_rows, "meta")
    found: dict[str, list[float]] = {name: [] for name in TritonKernels._fields}
    whole: list[float] = []

    def timed(name: str, *arguments: Any, **constants: Any) -> None:
        start = time.perf_counter()
        triton_tables.launch(name, *arguments, **constants)
        found[name].append(time.perf_counter() - start)

    def step() -> None:
        vectors = lookup(*inputs, storages)
        vectors.backward(torch.empty_like(vectors))

    with no_launches(HostDriver(90)):
        step()
        for _ in range(num_steps):
            start = time.perf_counter()
            step()
            whole.append(time.perf_counter() - start)
        with patch.object(triton_lookup, "launch", timed), patch.object(triton_backward, "launch", timed):
            for _ in range(num_steps):
                step()
    return {name: 1e6 * median(own) for name, own in found.items() if own} | {"whole step": 1e6 * median(whole)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192, help="rows of a batch (8192)")
    parser.add_argument("--steps", type=int, default=1000, help="steps of which medians are taken (1000)")
    options = parser.parse_args(arguments)
    print("| launch | us on the host |\n|---|---|")
    for name, microseconds in measure(Case(), options.rows, options.steps).items():
        print(f"| {name} | {microseconds:.1f} |")


if __name__ == "__main__":
    main()
