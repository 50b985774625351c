"""Compiles the fused lookup's Triton kernels for an NVIDIA processor without one, and reads their machine code.

``python -m gpu.machine_code`` (with ``tools`` on ``PYTHONPATH``) prints registers, spilled bytes, instructions and the
width of loads and stores of each kernel, and a model of its time. Kernels are compiled through the lookup's own
launches, so with its own arguments.

The model estimates the bytes that a kernel has to move between memory and processors, and the instructions that its
warps issue, with both sides of branches. It knows neither latency nor how full the processors are, and counts no sorts.
The lookup is a product of two with one id in a bag. Each id has a row of its own in the large partition, so that few
runs are joined; rows of the small partition stay in the cache.
"""

import argparse
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from distembed.kernels import triton_tables
from distembed.kernels.tables import Formula, Storage, TablePart, num_states
from distembed.kernels.triton_lookup import TritonLookup
from distembed.kernels.triton_tables import TritonKernels, ids_of_slice, key_type, num_blocks, num_slices
from distembed.partitions.base import Digit

NUM_BAGS, QUOTIENTS = 64, 10_000
BYTES_PER_US = 3.35e6
"""Bandwidth of an H100 with HBM3."""
INSTRUCTIONS_PER_US = 132 * 4 * 1755
"""Warp instructions that the four schedulers of an H100's 132 processors issue at 1,755 MHz."""


@dataclass(frozen=True)
class Case:
    """A lookup whose kernels are compiled."""

    kind: str = "product"  # product, sum, columns (concatenated) or sequence (a product for each id)
    num_partitions: int = 2
    num_columns: int = 16
    optimizer: str | None = "row_wise_adagrad"  # None: gradients are returned
    dtype: torch.dtype = torch.float32
    has_weights: bool = False
    num_features: int = 26
    collisions: int = 4
    offsets: torch.dtype | None = None  # None: each bag has one id, and no offsets are given
    is_aligned: bool = True  # whether rows begin at a multiple of 16 bytes in memory


@dataclass(frozen=True)
class Launch:
    """A compiled launch."""

    kernel: str
    num_programs: int
    num_warps: int
    registers: int  # of a thread
    spilled: int  # bytes of local memory of a thread
    shared: int  # bytes of a program
    barriers: int  # that the kernel's own text asks for
    instructions: int
    longest_loop: int  # instructions
    loads: Counter[int]  # number of load instructions of global memory, by bits
    stores: Counter[int]
    constants: Mapping[str, Any]  # that the kernel was compiled for


class Driver:
    """Stands for the driver of a device, which is asked what to compile for."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        """Returns the first device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Returns the default stream."""
        return 0

    def get_current_target(self) -> Any:
        """Returns the processor to compile for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)


@dataclass(frozen=True)
class _Compiled:
    """Stands for a kernel: compiles it as if it were launched."""

    kernel: Any
    seen: Callable[[Launch], None]

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            compiled = self.kernel.warmup(*arguments, grid=grid, **constants)
            self.seen(_read(self.kernel.__name__, grid[0], compiled, constants))

        return launch


@contextmanager
def compiling(capability: int, seen: Callable[[Launch], None]) -> Iterator[None]:
    """Has lookups within the block compile their kernels for a compute capability, such as 90; nothing is run."""
    from triton.runtime import driver

    kernels = TritonKernels(*[_Compiled(kernel, seen) for kernel in triton_tables.triton_kernels()])
    with (
        tempfile.TemporaryDirectory() as cache,
        patch.dict(os.environ, {"TRITON_CACHE_DIR": cache, "DISTEMBED_CHECK_ROWS": "0"}),
        patch.object(driver, "_active", Driver(capability)),
        patch.object(triton_tables, "triton_kernels", lambda: kernels),
    ):
        try:
            yield
        finally:
            for kernel in kernels:  # another lookup of this process may be for another processor
                kernel.kernel.device_caches.clear()


def launches(case: Case, capability: int) -> list[Launch]:
    """Compiles the kernels of a training step."""
    storages, lookup = lookup_of(case)
    found: list[Launch] = []
    with compiling(capability, found.append):
        vectors = lookup(*batch(case, NUM_BAGS), storages)
        vectors.backward(torch.ones_like(vectors))
    return found


def lookup_of(case: Case, device: str = "cpu") -> tuple[list[Storage], TritonLookup]:
    """Makes the tables of a case and their lookup."""
    k, columns, collisions = case.num_partitions, case.num_columns, case.collisions
    digits = [Digit(collisions**j, collisions) for j in range(k - 1)] + [Digit(collisions ** (k - 1), None)]
    rows = [collisions] * (k - 1) + [QUOTIENTS]
    ranges = [range(columns * j, columns * (j + 1)) if case.kind == "columns" else range(columns) for j in range(k)]
    states = num_states(case.optimizer, columns)
    parts = [
        [TablePart(digit, 0, n, f * n * columns, f * n * states) for digit, n in zip(digits, rows, strict=True)]
        for f in range(case.num_features)
    ]
    storages = [_storage(n, case, states, device) for n in rows]
    formula = Formula(ranges, case.kind in ("product", "sequence"), case.kind != "sequence")
    return storages, TritonLookup(formula, parts, [1] * case.num_features, storages)


def batch(
    case: Case, num_rows: int, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Returns ids, offsets and weights of a batch with one id in each bag."""
    num_ids = case.num_features * num_rows
    return (
        torch.zeros(num_ids, dtype=torch.int64, device=device),
        None if case.offsets is None else torch.arange(num_ids + 1, dtype=case.offsets, device=device),
        torch.ones(num_ids, device=device) if case.has_weights else None,
    )


def _storage(rows: int, case: Case, states: int, device: str) -> Storage:
    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=case.dtype, device=device, requires_grad=True)

    if case.optimizer is None:
        return Storage([zeros(rows, case.num_columns) for _ in range(case.num_features)])
    return Storage(
        [zeros(case.num_features * rows * case.num_columns + 1)[0 if case.is_aligned else 1 :]],
        case.optimizer,
        torch.zeros(case.num_features * rows * states, device=device),
        rounding_seed=(lambda: 7) if case.dtype == torch.float16 else None,
    )


def _read(name: str, num_programs: int, compiled: Any, constants: Mapping[str, Any]) -> Launch:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        code = _tool("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found is not None, usage
    # an instruction: /*0120*/ @!P0 LDG.E.128 R4, ...
    operations = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", code, re.MULTILINE)
    return Launch(
        name,
        num_programs,
        compiled.metadata.num_warps,
        registers=int(found[1]),
        spilled=int(found[2]) + int(found[3]),
        shared=compiled.metadata.shared,
        barriers=compiled.asm["ttir"].count("barrier"),
        instructions=len(operations),
        longest_loop=_longest_loop(code),
        loads=_widths(operations, "LDG"),
        stores=_widths(operations, "STG"),
        constants=constants,
    )


def _longest_loop(code: str) -> int:
    """Returns the number of instructions between a label and the farthest branch back to it."""
    place, labels, longest = 0, dict[str, int](), 0
    for line in code.splitlines():
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = place
        elif re.match(r"\s*/\*[0-9a-f]{4,}\*/\s", line):
            place += 1
            branch = re.search(r"\bBRA\b.*`\((\.L\w+)\)", line)
            # a branch to itself fills the end of the code
            if branch and place - labels.get(branch[1], place) > 1:
                longest = max(longest, place - labels[branch[1]])
    return longest


def modelled_bytes(case: Case, num_ids: int) -> list[int]:
    """Returns the bytes that each launch of a step moves, in the order of the launches; the model is the module's."""
    row, vector = case.num_columns * case.dtype.itemsize, case.num_columns * 4
    key, large_key = (key_type(case.num_features * rows).itemsize for rows in (case.collisions, QUOTIENTS))
    owner, place, offset = 4, 8, 0 if case.offsets is None else 8
    slice_ids = ids_of_slice(case.collisions, case.num_columns)
    assert slice_ids is not None, case.collisions
    row_sums = case.collisions * vector / slice_ids  # of a slice, for each of its ids
    bytes_of_id = [
        8 + offset + key + large_key + owner,  # write_keys
        offset + key + large_key + row + vector,  # compose
        owner + vector + key + large_key + row + 2 * row_sums,  # sum_slices, of the small partition: zeros, then sums
        place
        + owner
        + vector
        + key
        + large_key
        + 2 * row
        + 2 * 4 * num_states(case.optimizer, case.num_columns),  # sum_runs of the large partition, which updates rows
        large_key / 4,  # join_runs
        row_sums,  # add_slices, which updates the small partition
    ]
    return [round(num_ids * each) for each in bytes_of_id]


def modelled_instructions(launch: Launch, num_ids: int) -> int:
    """Returns the instructions that warps issue for ``num_ids`` ids, one in a bag; the model is the module's."""
    walked, programs, constants = 1, launch.num_programs, launch.constants
    if launch.kernel == "sum_slices":
        walked = constants["SLICE"] // constants["LANES"]
        programs = num_slices(num_ids, Case().num_features, constants["SLICE"])
    elif launch.kernel == "add_slices":  # a program for each row of the small partition
        slices = num_slices(num_ids // Case().num_features, 1, constants["SLICE"])
        walked = num_blocks(slices, constants["LANES"])
    else:
        walked = constants.get("CHUNK", 1) if launch.kernel == "sum_runs" else 1
        programs = round(programs * num_ids / (Case().num_features * NUM_BAGS))
    return (launch.instructions + (walked - 1) * launch.longest_loop) * launch.num_warps * programs


def _widths(operations: Sequence[str], prefix: str) -> Counter[int]:
    widths = (re.search(r"\.[US]?(8|16|64|128)\b", each) for each in operations if each.split(".")[0] == prefix)
    return Counter(int(width[1]) if width else 32 for width in widths)


def _tool(name: str, *arguments: str) -> str:
    import triton

    program = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, default=90, help="compute capability (90)")
    parser.add_argument("--rows", type=int, default=8192, help="rows of a batch for the model (8192)")
    parser.add_argument("--columns", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--collisions", type=int, default=4, help="rows of the small partition of a table, at most 252")
    options = parser.parse_args(arguments)
    print(
        "| rows | kernel | registers | spilled | instructions | loads: 128 bits / all | stores: 128 bits / all "
        "| us: bytes | us: instructions | share of bandwidth |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    num_ids = Case().num_features * options.rows
    for dtype in (torch.float32, torch.float16):
        for columns in options.columns:
            case = Case(num_columns=columns, dtype=dtype, collisions=options.collisions)
            totals = [0.0, 0.0]
            found = launches(case, options.capability)
            for launch, num_bytes in zip(found, modelled_bytes(case, num_ids), strict=True):
                moving = num_bytes / BYTES_PER_US
                issuing = modelled_instructions(launch, num_ids) / INSTRUCTIONS_PER_US
                totals = [totals[0] + moving, totals[1] + max(moving, issuing)]
                print(
                    f"| {columns} x {str(dtype).removeprefix('torch.')} | {launch.kernel} | {launch.registers} "
                    f"| {launch.spilled} | {launch.instructions} | {launch.loads[128]} / {launch.loads.total()} "
                    f"| {launch.stores[128]} / {launch.stores.total()} | {moving:.0f} | {issuing:.0f} "
                    f"| {moving / max(moving, issuing):.0%} |",
                    flush=True,
                )
            print(f"| | together | | | | | | {totals[0]:.0f} | {totals[1]:.0f} | {totals[0] / totals[1]:.0%} |")


if __name__ == "__main__":
    main()
