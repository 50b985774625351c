"""Triton's kernels are compiled for NVIDIA's processors, with the arguments that a lookup gives them; nothing runs."""

import importlib.util

import pytest
import torch

from tools.gpu.machine_code import Case, Launch, launches

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

NUMBERS_OF_THREAD, BYTES = 8, 16
"""Numbers of a tile's row that a thread holds, and bytes of the widest load."""
SPILLED = 8
"""Bytes: ptxas puts one number aside before the loop of some kernels, so that more threads fit."""


def row_accesses(case: Case, launch: Launch, later: bool) -> tuple[int, int]:
    """Returns how many 16-byte loads and stores a kernel needs; ``later`` where its sums wait for ``update_rows``."""
    rows = NUMBERS_OF_THREAD * case.dtype.itemsize // BYTES
    sums = NUMBERS_OF_THREAD * 4 // BYTES
    others = case.num_partitions - 1 if case.kind in ("product", "sequence") else 0
    return {
        "compose": (case.num_partitions * rows, sums),
        "sum_runs": (sums + others * rows + (0 if later else rows), 2 * sums + (sums if later else rows)),
        "update_rows": (sums + rows, rows),
    }.get(launch.kernel, (0, 0))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("capability", "case"),
    [
        (90, Case()),
        (80, Case(num_columns=128, optimizer="adagrad", dtype=torch.float16)),
        *[
            pytest.param(capability, case, marks=pytest.mark.slow)
            for capability in (80, 90)
            for case in [
                Case(num_columns=128),
                Case(num_partitions=3, optimizer="sgd", num_columns=64),
                Case(num_partitions=3, optimizer="adagrad", dtype=torch.float16),
                Case("sequence", optimizer="sgd", num_columns=128),
                Case("sum", num_columns=256, dtype=torch.float16, has_weights=True),
                Case("columns", optimizer="adagrad"),
                Case(num_columns=20, optimizer="adagrad"),
                Case(num_columns=4, num_features=128),
                Case(collisions=200, offsets=torch.int32),  # more rows than ids in the small partition
                Case("sequence", optimizer=None, num_features=1000),
                Case(num_partitions=1),
            ]
        ],
    ],
    ids=str,
)
def test_kernels_move_rows_by_16_bytes_and_leave_room_for_many_threads(capability: int, case: Case) -> None:
    found = launches(case, capability)
    k, is_product = case.num_partitions, case.kind in ("product", "sequence")
    waits = is_product and case.optimizer is not None
    expected = ["write_keys", "compose"] + k * ["sum_runs", "join_runs"] + waits * (k - 1) * ["update_rows"]
    assert [launch.kernel for launch in found] == expected
    summed = 0
    for launch in found:
        assert launch.spilled <= SPILLED, launch
        # at least 16 of the 64 warps of a processor, and 12 programs' shared memory
        assert launch.registers * 32 * 16 <= 65536, launch
        assert launch.shared <= 8192, launch
        summed += launch.kernel == "sum_runs"
        updates = case.optimizer is not None and (not waits or summed == k) and summed > 0
        assert launch.barriers == updates, launch  # between reading and writing rows and states
        assert launch.loads.total() - launch.loads[128] <= 40, launch  # keys, places, fields of parts
        if case.num_columns >= 16:
            loads, stores = row_accesses(case, launch, later=not updates)
            assert launch.loads[128] >= loads, launch
            assert launch.stores[128] >= stores, launch
