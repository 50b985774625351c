"""Functions of both passes of the CPU kernels: fields of blocks, an id's row, and reading and clearing rows."""

from typing import Any

import numpy as np
from numba import njit

from distembed.data.hashing import GOLDEN_GAMMA, MULTIPLIERS, SHIFTS
from distembed.kernels import layout
from distembed.kernels.simd import high_product, lanes_of, load_floats, load_half, prefetch, read_long, store

# kernels run without the GIL; no reference counts (_nrt), since they make no arrays; no check for division by zero
_OPTIONS: dict[str, Any] = {"nogil": True, "_nrt": False, "error_model": "numpy"}
# for functions that only kernels call: no wrappers by which Python or C could call them
_INNER_OPTIONS: dict[str, Any] = {**_OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
inline: Any = njit(forceinline=True, **_INNER_OPTIONS)
"""Compiles a function into its callers."""
compiled: Any = njit(**_INNER_OPTIONS)
"""Compiles a function that others call."""
entry: Any = njit(**_OPTIONS)
"""Compiles a function that Python calls, and that is kept in a file for the next process (``loading``)."""

_LINE_BYTES = 64
_GAMMA, _MULTIPLIERS = np.uint64(GOLDEN_GAMMA), tuple(map(np.uint64, MULTIPLIERS))
_SHIFTS, _ONE = tuple(map(np.uint64, SHIFTS)), np.uint64(1)


@inline
def field(block: Any, index: Any) -> Any:
    """Returns the 64-bit number at ``index``, a constant of ``layout``, of the block at an address."""
    return read_long(block + 8 * index)


@inline
def feature_block(job: Any, feature: Any) -> Any:
    """Returns the address of a feature's block."""
    return field(job, layout.FEATURES) + 8 * layout.FEATURE_FIELDS * feature


@inline
def partition_block(job: Any, j: Any) -> Any:
    """Returns the address of a partition's block."""
    return field(job, layout.PARTITIONS) + 8 * layout.PARTITION_FIELDS * j


@inline
def part_block(job: Any, feature: Any, j: Any) -> Any:
    """Returns the address of the block of a partition of a feature's table."""
    return field(job, layout.PARTS) + 8 * layout.PART_FIELDS * (feature * field(job, layout.NUM_PARTITIONS) + j)


@inline
def rows_are_half(job: Any, j: Any) -> Any:
    """Returns whether the rows of a partition are float16."""
    return field(partition_block(job, j), layout.IS_HALF)


@inline
def _divide(number: Any, divisor: Any, reciprocal: Any) -> Any:
    """Returns ``number // divisor`` of unsigned numbers; a multiplication replaces the division below 2 ** 32."""
    # With r = floor((2 ** 64 - 1) / d) + 1, which is 2 ** 64 / d rounded up, n // d is exactly the upper 64 bits of
    # n * r for n, d < 2 ** 32 (Granlund and Montgomery, PLDI 1994). r is 0 where d is not in (1, 2 ** 32).
    if reciprocal != 0 and number < 4294967296:
        return np.int64(high_product(np.uint64(number), np.uint64(reciprocal)))
    return np.int64(np.uint64(number) // np.uint64(divisor))


@inline
def mixed(number: Any) -> Any:
    """Returns SplitMix64's output function of an unsigned number (``partitions.hashing.mix64``)."""
    number = number + _GAMMA
    number = (number ^ (number >> _SHIFTS[0])) * _MULTIPLIERS[0]
    number = (number ^ (number >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return number ^ (number >> _SHIFTS[2])


@inline
def rule_of(table_part: Any) -> Any:
    """Returns the numbers by which :func:`row_of` maps ids; a loop reads them once, before it writes to memory."""
    return (
        field(table_part, layout.LAST_HASH),
        field(table_part, layout.KEY_BEFORE),
        field(table_part, layout.KEY_AFTER),
        field(table_part, layout.DIVISOR),
        field(table_part, layout.DIVISOR_RECIPROCAL),
        field(table_part, layout.MODULUS),
        field(table_part, layout.MODULUS_RECIPROCAL),
        field(table_part, layout.LAST_ROW),
        field(table_part, layout.FIRST_ROW),
    )


@inline
def row_of(raw_id: Any, rule: Any) -> Any:
    """Returns an id's place among a part's rows on this rank, or outside: its row less the first row.

    The row is ``min((id // divisor) % modulus, last row)``. Where the part has a hash, its hash takes the id's place.
    """
    last_hash, before, after, divisor, divisor_reciprocal, modulus, modulus_reciprocal, last_row, first_row = rule
    row = raw_id
    if last_hash != 0:
        # ``KeyedHash`` takes the remainder of 63 bits, for a modulus of at most 2^31
        state = mixed(mixed(np.uint64(raw_id) ^ np.uint64(before)) + np.uint64(after))
        if np.int64(state >> _ONE) > last_hash:
            state = mixed(state)
        row = np.int64(state >> _ONE)
    if divisor != 1:
        row = _divide(row, divisor, divisor_reciprocal)
    if modulus != 0:
        row -= _divide(row, modulus, modulus_reciprocal) * modulus
    return min(row, last_row) - first_row


@inline
def is_outside(row: Any, last_row: Any) -> Any:
    """Returns a negative number unless ``0 <= row <= last``: the sign bit of ``row`` or of ``last_row - row`` is set.

    Results of many rows joined by ``|`` are negative where one row is outside, so that one branch checks all.
    """
    return row | (last_row - row)


@inline
def read(address: Any, column: Any, is_half: Any, zeros: Any) -> Any:
    """Returns as many numbers of the row at an address as ``zeros`` has lanes, from ``column`` on, in float32."""
    if is_half:
        return load_half(address + 2 * column, zeros)
    return load_floats(address + 4 * column, zeros)


@inline
def ask_for(address: Any, num_bytes: Any) -> Any:
    """Prefetches all cache lines of ``num_bytes`` from an address on; does not wait for them."""
    line_address = address
    while line_address < address + num_bytes:
        prefetch(line_address)
        line_address += _LINE_BYTES


@inline
def clear(address: Any, num_columns: Any, zeros: Any) -> Any:
    """Fills ``num_columns`` float32 from an address on with zeros; the number is a multiple of the lanes."""
    for column in range(0, num_columns, lanes_of(zeros)):
        store(address + 4 * column, zeros)
