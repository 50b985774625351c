"""Slots of the CPU kernels' backward pass: a batch's distinct rows of a partition, numbered as they come.

Gradients are added up in one buffer with a sum for each slot: it is as long as the batch, and not as the table. The
slot of a row is found in a hash table with open addressing, of four bytes a bucket::

    row 7 -> bucket -> number of a slot, 0 for none -> is its row 7? if not, the next bucket

The table has at least twice as many buckets as there are ids; or one for each row, where that is fewer, so that no two
rows collide.
"""

from typing import Any

import numpy as np

from distembed.kernels import layout
from distembed.kernels.rows import compiled, field, inline
from distembed.kernels.simd import read_int, read_long, write

# the slots of a partition
BUCKETS = 0  # address of the hash table; 0 where every row has the slot of its number
_SHIFT = 1  # bucket of a row = (row * factor mod 2 ** 64) >> shift
_FACTOR = 2  # 0 where there is a bucket for each row
_MASK = 3  # number of buckets, less one
SLOT_ROWS = 4  # address of the row of each slot, int32; numbers of slots begin with 1
NUM_SLOTS = 5
SLOTS_FIELDS = 6

_GOLDEN_RATIO = 0x9E3779B97F4A7C15 - 2**64
"""2 ** 64 divided by the golden ratio, as a signed number: multiples of it are spread evenly (Knuth, TAOCP 3, 6.4)."""


_bucket_bits = inline(layout.place_bits)


@inline
def slots_bytes(num_rows: Any, num_ids: Any) -> Any:
    """Returns the bytes of the hash table and of the slots' rows."""
    return (4 << _bucket_bits(num_rows, num_ids)) + 4 * (min(num_rows, num_ids) + 2)


@compiled
def make_slots(slots: Any, num_rows: Any, num_ids: Any, scratch: Any) -> None:
    """Writes a block without slots at ``slots``, and its empty hash table, :func:`slots_bytes`, at ``scratch``."""
    num_bits = _bucket_bits(num_rows, num_ids)
    num_buckets, can_collide = 1 << num_bits, num_rows > (1 << num_bits)
    write(slots + 8 * BUCKETS, scratch)
    write(slots + 8 * _SHIFT, 64 - num_bits)
    write(slots + 8 * _FACTOR, _GOLDEN_RATIO if can_collide else 0)
    write(slots + 8 * _MASK, num_buckets - 1)
    write(slots + 8 * SLOT_ROWS, scratch + 4 * num_buckets)
    write(slots + 8 * NUM_SLOTS, 0)
    write(scratch + 4 * num_buckets, np.int32(0))  # is read as the row of slot 0
    for bucket in range(0, num_buckets, 2):
        write(scratch + 4 * bucket, 0)


@inline
def find_slots(slots: Any, rows: Any, step: Any, num_ids: Any) -> None:
    """Replaces rows by the numbers of their slots, in place; a row that has no slot yet gets the next free one.

    New rows are not told apart by a branch, which would be mispredicted: bucket and slot are written for every row. The
    row is always written to the next free slot, which the next new row overwrites unless the slot has been taken.

    Args:
        slots: Address of the block.
        rows: Address of the first row, int64, where its slot is written.
        step: Bytes from one row to the next.
        num_ids: How many rows there are.
    """
    buckets, factor, slot_rows = field(slots, BUCKETS), np.uint64(field(slots, _FACTOR)), field(slots, SLOT_ROWS)
    shift, mask, num_slots = np.uint64(field(slots, _SHIFT)), field(slots, _MASK), field(slots, NUM_SLOTS)
    for index in range(num_ids):
        row = read_long(rows + step * index)
        bucket = row
        if factor != 0:
            bucket = np.int64((np.uint64(row) * factor) >> shift)
            while _is_anothers(slot_rows, read_int(buckets + 4 * bucket), row):
                bucket = (bucket + 1) & mask
        slot = np.int64(read_int(buckets + 4 * bucket))
        is_new = np.int64(slot == 0)
        slot += is_new * (num_slots + 1)
        write(slot_rows + 4 * (num_slots + 1), np.int32(row))
        write(buckets + 4 * bucket, np.int32(slot))
        write(rows + step * index, slot)
        num_slots += is_new
    write(slots + 8 * NUM_SLOTS, num_slots)


@inline
def _is_anothers(slot_rows: Any, slot: Any, row: Any) -> Any:
    """Returns whether a bucket's slot belongs to another row than ``row``; slot 0 means a free bucket."""
    return (slot != 0) & (read_int(slot_rows + 4 * np.int64(slot)) != row)
