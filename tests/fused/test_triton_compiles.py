"""Triton's kernels are compiled for NVIDIA's processors, with the arguments that a lookup gives them; nothing runs."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from distembed.fused import triton_backward, triton_loading, triton_lookup
from distembed.fused.operation import Formula, Part, Storage
from distembed.fused.triton_loading import TritonKernels
from distembed.fused.triton_lookup import TritonLookup
from distembed.partitions.base import Digit

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
}


class Compiled:
    """Stands for a kernel: compiles it where it would be launched, and notes its name."""

    def __init__(self, kernel: Any, capability: int, seen: list[str]) -> None:
        self.kernel, self.capability, self.seen = kernel, capability, seen

    def __getitem__(self, grid: tuple[int]) -> Any:
        from triton import compile as compile_kernel
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        def launch(*arguments: Any, **constants: Any) -> None:
            assert grid[0] > 0
            names = self.kernel.arg_names
            types = dict(zip(names, map(type_of, arguments), strict=False)) | dict.fromkeys(constants, "constexpr")
            source = ASTSource(
                self.kernel,
                {name: types[name] for name in names},
                {(names.index(name),): value for name, value in constants.items()},
            )
            compiled = compile_kernel(source, target=GPUTarget("cuda", self.capability, 32))
            assert len(compiled.asm["cubin"]) > 0
            self.seen.append(self.kernel.__name__)

        return launch


def type_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    if isinstance(value, tuple):
        return tuple(map(type_of, value))
    return "fp32" if isinstance(value, float) else "i32"


def storage(rows: int, columns: int, optimizer: str | None, dtype: torch.dtype) -> Storage:
    return Storage(
        [torch.zeros(rows * columns, dtype=dtype, requires_grad=True)], optimizer, torch.zeros(rows * columns)
    )


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
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    seen: list[str] = []
    kernels = TritonKernels(*[Compiled(kernel, capability, seen) for kernel in triton_loading.load()])
    for module in (triton_lookup, triton_backward):
        monkeypatch.setattr(module, "load", lambda: kernels)
    parts = (
        [Part(Digit(1, 250), 0, 250, feature * 250 * columns, feature * 250 * columns) for feature in range(2)],
        [Part(Digit(250, None), 0, 4, feature * 4 * columns, feature * 4 * columns) for feature in range(2)],
    )
    own = [storage(2 * rows, columns, optimizer, dtype) for rows in (250, 4)]
    ranges = [range(columns), range(columns, 2 * columns)] if kind == "columns" else [range(columns)] * 2
    formula = Formula(ranges, kind in ("product", "sequence"), kind != "sequence")
    lookup = TritonLookup(formula, list(zip(*parts, strict=True)), [1, 1], own)
    weights = torch.ones(30) if kind == "sum" else None
    vectors = lookup(torch.zeros(30, dtype=torch.int64), torch.arange(31), weights, own)
    vectors.backward(torch.ones_like(vectors))
    expected = ["compose", "write_keys", "sum_runs", "join_runs", "sum_runs", "join_runs"]
    assert seen == expected + (["update_rows"] if formula.is_product else [])
