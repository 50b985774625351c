"""Slots of rows against a dictionary: the same number for a row whenever it comes, and the next one for a new row."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from distembed.kernels.layout import BLOCK_IDS
from distembed.kernels.slots import NUM_SLOTS, SLOT_ROWS, SLOTS_FIELDS, find_slots, make_slots, slots_bytes

CANARY = 77


@njit
def number(slots: Any, num_rows: Any, num_ids: Any, scratch: Any, rows: Any, block: Any) -> None:
    make_slots(slots, num_rows, num_ids, scratch)
    for start in range(0, num_ids, block):
        find_slots(slots, rows + 8 * start, 8, min(block, num_ids - start))


@njit
def needed_bytes(num_rows: int, num_ids: int) -> int:
    return slots_bytes(num_rows, num_ids)  # type: ignore[no-any-return]


def check(rows: list[int], num_rows: int, block: int = BLOCK_IDS) -> None:
    num_bytes = needed_bytes(num_rows, len(rows))
    # what was there before is no place of anybody's, and what lies behind is not written to
    scratch = np.full(num_bytes + 64, CANARY, np.uint8)
    slots, found = np.zeros(SLOTS_FIELDS, np.int64), np.array(rows, np.int64)
    number(slots.ctypes.data, num_rows, len(rows), scratch.ctypes.data, found.ctypes.data, block)
    expected: dict[int, int] = {}
    assert found.tolist() == [expected.setdefault(row, len(expected) + 1) for row in rows]
    assert slots[NUM_SLOTS] == len(expected)
    first = slots[SLOT_ROWS] - scratch.ctypes.data + 4
    assert scratch[first : first + 4 * len(expected)].view(np.int32).tolist() == list(expected)
    assert (scratch[num_bytes:] == CANARY).all()


@pytest.mark.thorough
@settings(max_examples=200)
@given(data=st.data(), num_rows=st.sampled_from([1, 2, 3, 100, 2**20, 2**31 - 1]), block=st.sampled_from([1, 7, 64]))
def test_slots_are_numbered_as_rows_come(data: st.DataObject, num_rows: int, block: int) -> None:
    rows = data.draw(st.lists(st.integers(0, num_rows - 1) | st.just(num_rows - 1), min_size=1, max_size=300))
    check(rows, num_rows, block)


@pytest.mark.parametrize("stride", [1, 2, 1024, 2**20, 17_711, 28_657, 2_654_435_769 % 2**20])
def test_rows_at_equal_distances_have_slots_of_their_own(stride: int) -> None:
    num_ids = min(4000, (2**31 - 1) // stride)
    check([stride * i for i in range(num_ids)] * 2, 2**31 - 1)
    check([2**31 - 2 - stride * i for i in range(num_ids)], 2**31 - 1)
