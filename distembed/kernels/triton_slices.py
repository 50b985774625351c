"""Gradients of partitions of few rows on CUDA, in Triton: added up slice by slice, without a sort of all ids.

The ids of each feature are divided into *slices*, at multiples of ``SLICE`` among all ids. A program sorts the ids of
one slice by row within its registers, and adds the gradients of neighbours up, tile by tile::

    ids of features  | f0 f0 f0 f0 | f0 f0 f1 f1 | f1 ...     SLICE = 4
    slices           | 0           | 1     2     | 3          slice s of feature f: ids of block s - f

It writes a sum for each row of its table; a row without an id gets zeros. A second kernel adds each row's slices up,
first to last, and updates the row. No number is added to by two programs: results are the same to the bit from run to
run.
"""

import triton
import triton.language as tl

from distembed.kernels.triton_kernels import (
    FIRST_FEATURE,
    FIRST_KEY,
    NO_KEY,
    NUM_ROWS,
    PART_FIELDS,
    SIZES,
    SLICES,
    last_at_or_before,
    part_field,
)
from distembed.kernels.triton_update import contributions, finish

NO_ROW = tl.constexpr(2**20)  # after all rows of a table; times SLICE it fits 32 bits


@triton.jit
def _first_slice(feature_starts, features, mask, SLICE: tl.constexpr):
    """Returns the first slice of features; of the last feature + 1, the number of slices."""
    return tl.load(feature_starts + features, mask=mask, other=0) // SLICE + features


@triton.jit
def _add_to_same_row(row, sums, next_row, next_sums):
    """Adds sums to the next ones where both are of one row: scanned, the last sum of a row is its whole sum."""
    return next_row, tl.where(row == next_row, sums + next_sums, next_sums)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SLICES)
def sum_slices(
    owners,
    keys,
    id_weights,
    gradients,
    parts,
    weights,
    feature_starts,
    partial_sums,
    num_features,
    most_rows,
    J: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMN_START: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
    MULTIPLES: tl.constexpr,
    IS_PRODUCT: tl.constexpr,
    POOLS: tl.constexpr,
    SLICE: tl.constexpr,
    ZEROS: tl.constexpr,
    FEATURE_BITS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Writes the sums of the gradients of each row in partition ``J`` over the ids of a slice.

    ``partial_sums`` is ``[slices, most_rows, NUM_COLUMNS]``; the largest table has ``most_rows``. ``ZEROS`` numbers, a
    power of two, are cleared at once.
    """
    num_partitions: tl.constexpr = len(weights)
    batch = (keys, id_weights, gradients, parts, weights)
    own_slice = tl.program_id(0).to(tl.int64)
    # a binary search for the last feature whose first slice is this one or lies before it
    feature = tl.full([], 0, tl.int32)
    for bit in tl.static_range(FEATURE_BITS):
        tried = feature + (1 << (FEATURE_BITS - 1 - bit))
        has_begun = _first_slice(feature_starts, tried, tried < num_features, SLICE) <= own_slice
        feature = tl.where((tried < num_features) & has_begun, tried, feature)
    sums_start = own_slice * (most_rows * NUM_COLUMNS)
    num_sums = part_field(parts, feature, J, NUM_ROWS, num_partitions) * NUM_COLUMNS
    for first in range(0, num_sums, ZEROS):
        places = first + tl.arange(0, ZEROS)
        tl.store(partial_sums + sums_start + places, tl.zeros([ZEROS], tl.float32), mask=places < num_sums)

    first_id, end_id = tl.load(feature_starts + feature), tl.load(feature_starts + feature + 1)
    block = (own_slice - feature) * SLICE
    in_slice = tl.arange(0, SLICE)
    are_here = (block + in_slice >= first_id) & (block + in_slice < end_id)
    own_keys = tl.load(keys[J] + block + in_slice, mask=are_here, other=NO_KEY).to(tl.int64)
    first_key = part_field(parts, feature, J, FIRST_KEY, num_partitions)
    rows = tl.where(own_keys >= 0, own_keys - first_key, NO_ROW).to(tl.int32)
    num_ids = tl.sum((own_keys >= 0).to(tl.int32), 0)
    # the row and the place within the slice, in one number: ids without a row come last
    by_row = tl.sort(rows * SLICE + in_slice)
    tl.debug_barrier()  # zeros are written before sums
    lanes, columns = tl.arange(0, LANES), tl.arange(0, PADDED)
    carried_row, carried = tl.full([], NO_ROW, tl.int32), tl.zeros([PADDED], tl.float32)
    for step in range(0, num_ids, LANES):
        ids = tl.gather(by_row, step + lanes, 0)
        following = tl.gather(by_row, tl.minimum(step + lanes + 1, SLICE - 1), 0) // SLICE
        ids_rows = ids // SLICE
        are_ids = ids_rows < NO_ROW
        positions = block + ids % SLICE
        if POOLS:
            vectors = tl.load(owners + positions, mask=are_ids, other=0).to(tl.int64)
        else:
            vectors = positions
        sums = contributions(
            (positions, are_ids, feature, vectors),
            batch,
            J,
            WIDTH,
            COLUMN_START,
            NUM_COLUMNS,
            PADDED,
            MULTIPLES,
            IS_PRODUCT,
        )
        goes_on = (lanes == 0) & (ids_rows == carried_row)
        sums += tl.where(goes_on[:, None], carried[None, :], 0.0)
        all_rows = tl.broadcast_to(ids_rows[:, None], [LANES, PADDED])
        all_rows, sums = tl.associative_scan((all_rows, sums), 0, _add_to_same_row)
        ends = are_ids & ((following != ids_rows) | (step + lanes == SLICE - 1))
        targets = partial_sums + (sums_start + ids_rows * NUM_COLUMNS)[:, None] + columns[None, :]
        tl.store(targets, sums, mask=ends[:, None] & (columns < NUM_COLUMNS)[None, :])
        carried_row, carried = tl.max(ids_rows, 0), tl.sum(tl.where((lanes == LANES - 1)[:, None], sums, 0.0), 0)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SLICES)
def add_slices(
    feature_starts,
    partial_sums,
    parts,
    target,
    num_features,
    most_rows,
    states,
    learning_rate,
    eps,
    seed,
    J: tl.constexpr,
    NUM_PARTITIONS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
    MULTIPLES: tl.constexpr,
    STATE_MULTIPLE: tl.constexpr,
    ACTION: tl.constexpr,
    ROUNDS_AT_RANDOM: tl.constexpr,
    SLICE: tl.constexpr,
    LANES: tl.constexpr,
    FEATURE_BITS: tl.constexpr,
):
    """Adds the sums of all slices of a row up, ``LANES`` at a time, and updates the row; each program has one row.

    A row whose gradients add up to zeros is left alone, as an update by zero leaves it where eps is not 0.
    """
    keys = tl.zeros([1], tl.int64) + tl.program_id(0)
    # the last feature whose rows begin at or before the key is the last one of its table
    first_keys = parts + J * PART_FIELDS + FIRST_KEY
    last_features = last_at_or_before(first_keys, NUM_PARTITIONS * PART_FIELDS, num_features, keys, FEATURE_BITS)
    first_features = part_field(parts, last_features, J, FIRST_FEATURE, NUM_PARTITIONS)
    first_slice = tl.max(_first_slice(feature_starts, first_features, keys >= 0, SLICE), 0)
    end_slice = tl.max(_first_slice(feature_starts, last_features + 1, keys >= 0, SLICE), 0)
    row = tl.max(keys - part_field(parts, last_features, J, FIRST_KEY, NUM_PARTITIONS), 0)
    columns = tl.arange(0, PADDED)
    sums = tl.zeros([PADDED], tl.float32)
    for first in range(first_slice, end_slice, LANES):
        slices = first + tl.arange(0, LANES)
        places = ((slices * most_rows + row) * NUM_COLUMNS)[:, None] + columns[None, :]
        mask = (slices < end_slice)[:, None] & (columns < NUM_COLUMNS)[None, :]
        sums += tl.sum(tl.load(partial_sums + places, mask=mask, other=0.0), 0)
    are_rows = keys * 0 + tl.max((sums != 0).to(tl.int64), 0) != 0
    runs, update = (keys, keys, last_features), (parts, target, states, learning_rate, eps, seed)
    finish(
        sums[None, :],
        are_rows,
        runs,
        update,
        J,
        NUM_PARTITIONS,
        NUM_COLUMNS,
        PADDED,
        MULTIPLES,
        STATE_MULTIPLE,
        ACTION,
        ROUNDS_AT_RANDOM,
    )
