"""The CPU kernels' sort: ids by a key, those of one key as they came.

What is sorted are numbers of 64 bits with the key in the upper half, and the place of the id in the lower::

    packed = key * 2 ** 32 + place

Keys are sorted by digits, from the lowest to the highest, each digit by counting.
"""

from typing import Any

import numpy as np

from distembed.fused.layout import DIGIT_BITS
from distembed.fused.rows import compiled, inline
from distembed.fused.simd import read_long, write

MAX_KEYS = 2**31


@inline
def pack(key: Any, place: Any) -> Any:
    """Returns a number that is sorted by ``key``, from 0 up to :data:`MAX_KEYS`."""
    return (np.int64(key) << 32) | place


@inline
def key_of(packed: Any) -> Any:
    """Returns the key of a packed number."""
    return packed >> 32


@inline
def place_of(packed: Any) -> Any:
    """Returns the place of a packed number."""
    return packed & 0xFFFFFFFF


@compiled
def num_passes(num_keys: Any) -> Any:
    """Returns how often ids are gone through that have keys below ``num_keys``."""
    return (_num_bits(num_keys) + DIGIT_BITS - 1) // DIGIT_BITS


@inline
def _num_bits(num_keys: Any) -> Any:
    num_bits = 1
    while (1 << num_bits) < num_keys:
        num_bits += 1
    return num_bits


@compiled
def sort_packed(order: Any, other: Any, num_ids: Any, num_keys: Any, counts: Any) -> Any:
    """Sorts packed numbers.

    Args:
        order: Address of the numbers.
        other: Address of as much memory.
        num_ids: How many numbers there are.
        num_keys: A number above all keys.
        counts: Address of :data:`distembed.fused.layout.SORT_BYTES`.

    Returns:
        ``order`` or ``other``, whichever has the sorted numbers.
    """
    passes = num_passes(num_keys)
    digit_bits = (_num_bits(num_keys) + passes - 1) // passes
    num_digits = 1 << digit_bits
    for digit in range(passes * num_digits):
        write(counts + 8 * digit, 0)
    for i in range(num_ids):
        key, own = key_of(read_long(order + 8 * i)), counts
        for _ in range(passes):
            count = own + 8 * (key & (num_digits - 1))
            write(count, read_long(count) + 1)
            key, own = key >> digit_bits, own + 8 * num_digits
    for number in range(passes):
        shift, ends, end = number * digit_bits, counts + 8 * num_digits * number, other
        for digit in range(num_digits):
            count = read_long(ends + 8 * digit)
            write(ends + 8 * digit, end)
            end += 8 * count
        for i in range(num_ids):
            packed = read_long(order + 8 * i)
            place = ends + 8 * ((key_of(packed) >> shift) & (num_digits - 1))
            target = read_long(place)
            write(target, packed)
            write(place, target + 8)
        order, other = other, order
    return order
