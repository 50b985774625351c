"""Triton's kernels are compiled for NVIDIA's processors, with the arguments that a lookup gives them; nothing runs."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from distembed.kernels import triton_lookup, triton_tables
from distembed.kernels.tables import Formula, Storage, TablePart
from distembed.kernels.triton_lookup import TritonLookup
from distembed.kernels.triton_tables import TritonKernels
from distembed.partitions.base import Digit

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


class Driver:
    """Stands for the driver of a device, which is asked what to compile for."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


class Compiled:
    """Stands for a kernel: compiles it as if it were launched, and notes its name."""

    def __init__(self, kernel: Any, seen: list[str]) -> None:
        self.kernel, self.seen = kernel, seen

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            compiled = self.kernel.warmup(*arguments, grid=grid, **constants)
            assert len(compiled.asm["cubin"]) > 0
            self.seen.append(self.kernel.__name__)

        return launch


def storage(rows: int, columns: int, optimizer: str | None, dtype: torch.dtype) -> Storage:
    return Storage(
        [torch.zeros(rows * columns, dtype=dtype, requires_grad=True)], optimizer, torch.zeros(rows * columns)
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("capability", "optimizer", "columns", "dtype", "kind"),
    [
        (90, "row_wise_adagrad", 16, torch.float32, "product"),
        *[
            pytest.param(capability, optimizer, columns, dtype, kind, marks=pytest.mark.slow)
            for capability in (80, 90)
            for optimizer, columns, dtype, kind in [
                ("adagrad", 20, torch.float16, "columns"),
                ("sgd", 128, torch.float32, "sequence"),
                ("row_wise_adagrad", 256, torch.float16, "sum"),
            ]
        ],
    ],
)
def test_every_kernel_compiles(
    capability: int,
    optimizer: str,
    columns: int,
    dtype: torch.dtype,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from triton.runtime import driver

    monkeypatch.setattr(driver, "_active", Driver(capability))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("DISTEMBED_CHECK_ROWS", "0")  # kernels are compiled, and write no keys
    seen: list[str] = []
    kernels = TritonKernels(*[Compiled(kernel, seen) for kernel in triton_tables.triton_kernels()])
    monkeypatch.setattr(triton_lookup, "triton_kernels", lambda: kernels)
    parts = (
        [TablePart(Digit(1, 250), 0, 250, feature * 250 * columns, feature * 250 * columns) for feature in range(2)],
        [TablePart(Digit(250, None), 0, 4, feature * 4 * columns, feature * 4 * columns) for feature in range(2)],
    )
    own = [storage(2 * rows, columns, optimizer, dtype) for rows in (250, 4)]
    ranges = [range(columns), range(columns, 2 * columns)] if kind == "columns" else [range(columns)] * 2
    formula = Formula(ranges, kind in ("product", "sequence"), kind != "sequence")
    lookup = TritonLookup(formula, list(zip(*parts, strict=True)), [1, 1], own)
    weights = torch.ones(30) if kind == "sum" else None
    vectors = lookup(
        torch.zeros(30, dtype=torch.int64),
        torch.arange(31, dtype=torch.int32 if dtype == torch.float32 else torch.int64),
        weights,
        own,
    )
    vectors.backward(torch.ones_like(vectors))
    expected = ["compose", "write_keys", "sum_runs", "join_runs", "sum_runs", "join_runs"]
    assert seen == expected + (["update_rows"] if formula.is_product else [])
