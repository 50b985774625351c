"""Triton's kernels are compiled for NVIDIA's processors, with the arguments that a lookup gives them; nothing runs."""

import importlib.util
from typing import Any

import pytest
import torch

from distembed.kernels.triton_tables import ids_of_slice
from tools.gpu.host_cost import HostDriver, NoLaunch, no_launches
from tools.gpu.machine_code import Case, Launch, batch, launches, lookup_of

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

NUMBERS_OF_THREAD, BYTES = 8, 16
"""Numbers of a tile's row that a thread holds, and bytes of the widest load."""
SPILLED = 8
"""Bytes: ptxas puts one number aside before the loop of some kernels, so that more threads fit."""


def row_accesses(case: Case, launch: Launch, later: bool) -> tuple[int, int]:
    """Returns how many 16-byte loads and stores a kernel needs; ``later`` where its sums wait for their update."""
    rows = NUMBERS_OF_THREAD * case.dtype.itemsize // BYTES
    sums = NUMBERS_OF_THREAD * 4 // BYTES
    others = case.num_partitions - 1 if case.kind in ("product", "sequence") else 0
    return {
        "compose": (case.num_partitions * rows, sums),
        "sum_runs": (sums + others * rows + (0 if later else rows), 2 * sums + (sums if later else rows)),
        "update_rows": (sums + rows, rows),
        "sum_slices": (sums + others * rows, sums),
        "add_slices": (sums, 0),
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
                Case("sequence", optimizer="sgd", num_columns=128, offsets=torch.int64),
                Case("sum", num_columns=256, dtype=torch.float16, has_weights=True, offsets=torch.int64),
                Case("columns", optimizer="adagrad"),
                Case(num_columns=20, optimizer="adagrad"),
                Case(num_columns=4, num_features=128),
                Case(collisions=32),
                Case(collisions=50, num_columns=128),
                Case(collisions=100, offsets=torch.int64, optimizer="adagrad"),
                Case(collisions=600, offsets=torch.int32),  # more rows than ids in the small partition
                Case("sequence", optimizer=None, num_features=1000, offsets=torch.int32),
                Case(num_partitions=1),
            ]
        ],
    ],
    ids=str,
)
def test_kernels_move_rows_by_16_bytes_and_leave_room_for_many_threads(capability: int, case: Case) -> None:
    found = launches(case, capability)
    is_product = case.kind in ("product", "sequence")
    waits, first, last = is_product and case.optimizer is not None, case.num_partitions - 1, ["sum_runs", "join_runs"]
    # a partition of few rows is summed in slices, and the last one of many is sorted
    is_sliced = ids_of_slice(case.collisions, case.num_columns) is not None
    summed, ends = (["sum_slices"], ["add_slices"]) if is_sliced else (last, waits * ["update_rows"])
    step = first * summed + last + first * ends if waits else first * (summed + ends) + last
    assert [launch.kernel for launch in found] == ["write_keys", "compose", *step]
    for number, launch in enumerate(found):
        assert launch.spilled <= SPILLED, launch
        # at least 16 of the 64 warps of a processor, and 12 programs' shared memory
        assert launch.registers * 32 * 16 <= 65536, launch
        assert launch.shared <= 8192, launch
        # sums are made before the last partition's where they wait for their update
        later = waits and number < 2 + first * len(summed)
        updates = case.optimizer is not None and number >= 2 and not later and launch.kernel != "sum_slices"
        # between reading and writing rows and states, and between writing zeros and sums
        assert launch.barriers == (updates or launch.kernel == "sum_slices"), launch
        assert launch.loads.total() - launch.loads[128] <= 40, launch  # keys, places, fields of parts
        if case.num_columns >= 16:
            loads, stores = row_accesses(case, launch, later=not updates)
            assert launch.loads[128] >= loads, launch
            assert launch.stores[128] >= stores, launch


@pytest.mark.slow
def test_rows_that_begin_anywhere_are_read_number_by_number() -> None:
    aligned, anywhere = (
        {launch.kernel: launch for launch in launches(Case(is_aligned=own), 90)} for own in (True, False)
    )
    assert aligned["compose"].loads[128] > anywhere["compose"].loads[128] == 0
    for kernel in ("sum_slices", "sum_runs"):  # gradients are aligned all the same
        assert aligned[kernel].loads[128] > anywhere[kernel].loads[128] > 0


class Noting(NoLaunch):
    """Notes the name and the arguments of each launch, of tensors their types."""

    noted: list[Any] = []

    def __init__(self, source: Any, metadata: Any) -> None:
        self.name = source.name

    def __call__(self, *arguments: Any) -> None:
        grid, given = arguments[:3], arguments[9:]
        self.noted.append([self.name, grid, *map(self.described, given)])

    def described(self, argument: Any) -> Any:
        if isinstance(argument, tuple):
            return tuple(map(self.described, argument))
        return argument.dtype if isinstance(argument, torch.Tensor) else argument


@pytest.mark.thorough
@pytest.mark.parametrize("collisions", [4, 600])
def test_a_kept_kernel_is_launched_with_the_arguments_that_triton_gives_it(collisions: int) -> None:
    class NotingDriver(HostDriver):
        launcher_cls = Noting

    case = Case(collisions=collisions)
    storages, lookup = lookup_of(case)
    with no_launches(NotingDriver(90)):
        steps = []
        for num_rows in (16, 16, 17):
            Noting.noted.clear()
            vectors = lookup(*batch(case, num_rows), storages)
            vectors.backward(torch.ones_like(vectors))
            steps.append(list(Noting.noted))
    first, again, larger = steps
    assert first == again and len(first) == (6 if collisions == 4 else 7)
    # a larger batch takes the same kernels, with other numbers
    assert [own[0] for own in larger] == [own[0] for own in first] and larger != first
