"""The backward pass of the fused lookup on a CPU: gradients in, rows updated, once each and exactly.

With the gradient g of a bag's vector, the weight w of an id and its rows v_1 ... v_k, the gradient of row v_j is::

    product        w g v_1 ... v_{j-1} v_{j+1} ... v_k
    sum, concat    w g, of the columns of partition j

The ids of a table are gone through in the order in which they come. The gradients of each partition's rows are added up
in a buffer that has a *slot* for each distinct row of the batch, and rows are updated by it when all ids are done::

    ids        7  3  7  9          their gradients are read one after another
    slots      1  2  1  3
    buffer     7: + + | 3: + | 9: +

Every gradient is then of the rows as they were before the step. A sort by rows would need no buffer, but takes longer
than everything else, and reads gradients in no order. Tables are divided among threads, and the rows of a table are
not: results do not depend on the number of threads.
"""

from typing import Any

import numpy as np

from distembed.kernels import layout
from distembed.kernels.rows import (
    ask_for,
    clear,
    compiled,
    entry,
    feature_block,
    field,
    inline,
    is_outside,
    mixed,
    part_block,
    partition_block,
    read,
    row_of,
    rows_are_half,
    rule_of,
)
from distembed.kernels.simd import (
    lanes_of,
    load_floats,
    multiply_add,
    read_double,
    read_float,
    read_int,
    read_long,
    round_half_at_random,
    splat,
    square_root,
    store,
    store_half,
    sum_lanes,
    write,
    zeros_4,
    zeros_8,
    zeros_16,
)
from distembed.kernels.slots import BUCKETS, NUM_SLOTS, SLOT_ROWS, SLOTS_FIELDS, find_slots, make_slots, slots_bytes

_AHEAD_BAGS, _AHEAD_SLOTS = 8, 8
"""Number of bags ahead whose gradients, and of slots ahead whose rows, are prefetched."""

# the target of an id in a partition: addresses of its row, and of the sum of the row's gradients
_TARGET_ROW = 0  # address of the row
_TARGET_SUM = 1  # address of its gradient's sum
_TARGET_FIELDS = 2

_PRODUCT_BYTES = 64
"""Bytes of a partition's vector of up to 16 float32: the gradient times the rows of the earlier partitions."""

# of a partition in a table's update, behind its slots
_SUMS = SLOTS_FIELDS  # address of the sum of row 0; with slots, of slot 0, which no row has
_SUM_BYTES = SLOTS_FIELDS + 1  # from one sum to the next
_SUMS_FIELDS = SLOTS_FIELDS + 2


@inline
def _add_gradient(job: Any, targets: Any, products: Any, gradient: Any, weight: Any, zeros: Any) -> None:
    """Adds the gradient of an id's vector to the sums of its rows, whose addresses are in ``targets``."""
    factor = splat(weight, zeros)
    if not field(job, layout.IS_PRODUCT):
        _add_sum(job, targets, gradient, factor, zeros)
    elif field(job, layout.NUM_PARTITIONS) == 2:
        _add_pair(job, targets, gradient, factor, zeros)
    else:
        _add_product(job, targets, products, gradient, factor, zeros)


@inline
def _add_pair(job: Any, targets: Any, gradient: Any, factor: Any, zeros: Any) -> None:
    """Adds the gradients of two rows that are multiplied."""
    half_0, half_1 = rows_are_half(job, 0), rows_are_half(job, 1)
    target_1 = targets + 8 * _TARGET_FIELDS
    row_0, row_1 = field(targets, _TARGET_ROW), field(target_1, _TARGET_ROW)
    sum_0, sum_1 = field(targets, _TARGET_SUM), field(target_1, _TARGET_SUM)
    for column in range(0, field(job, layout.WIDTH), lanes_of(zeros)):
        row_gradient = load_floats(gradient + 4 * column, zeros) * factor
        sum_column_0, sum_column_1 = sum_0 + 4 * column, sum_1 + 4 * column
        vector_0, vector_1 = read(row_0, column, half_0, zeros), read(row_1, column, half_1, zeros)
        store(sum_column_0, multiply_add(row_gradient, vector_1, load_floats(sum_column_0, zeros)))
        store(sum_column_1, multiply_add(row_gradient, vector_0, load_floats(sum_column_1, zeros)))


@compiled
def _add_product(job: Any, targets: Any, products: Any, gradient: Any, factor: Any, zeros: Any) -> None:
    """Adds the gradients of any number of rows that are multiplied."""
    # Row j has the gradient w g times all other rows; 3k products in place of k^2, and no division by rows that are 0:
    # upwards    products[j] = w g v_1 ... v_{j-1}
    # downwards  behind      = v_{j+1} ... v_k, and row j has the gradient products[j] * behind
    num_partitions = field(job, layout.NUM_PARTITIONS)
    for column in range(0, field(job, layout.WIDTH), lanes_of(zeros)):
        product, target = load_floats(gradient + 4 * column, zeros) * factor, targets
        for j in range(num_partitions):
            store(products + _PRODUCT_BYTES * j, product)
            product = product * read(field(target, _TARGET_ROW), column, rows_are_half(job, j), zeros)
            target += 8 * _TARGET_FIELDS
        later_rows = splat(np.float32(1), zeros)
        for j in range(num_partitions - 1, -1, -1):
            target -= 8 * _TARGET_FIELDS
            sum_column = field(target, _TARGET_SUM) + 4 * column
            store(
                sum_column,
                multiply_add(
                    load_floats(products + _PRODUCT_BYTES * j, zeros), later_rows, load_floats(sum_column, zeros)
                ),
            )
            later_rows = later_rows * read(field(target, _TARGET_ROW), column, rows_are_half(job, j), zeros)


@compiled
def _add_sum(job: Any, targets: Any, gradient: Any, factor: Any, zeros: Any) -> None:
    """Adds the gradients of rows that are added up, or stand side by side."""
    for j in range(field(job, layout.NUM_PARTITIONS)):
        partition, target = partition_block(job, j), field(targets + 8 * _TARGET_FIELDS * j, _TARGET_SUM)
        start = gradient + 4 * field(partition, layout.COLUMN_START)
        for column in range(0, field(partition, layout.NUM_COLUMNS), lanes_of(zeros)):
            row_gradient, summed = load_floats(start + 4 * column, zeros), load_floats(target + 4 * column, zeros)
            store(target + 4 * column, multiply_add(row_gradient, factor, summed))


@inline
def _take(scratch: Any, num_bytes: Any) -> Any:
    """Returns the address ``num_bytes`` further, rounded up by whole cache lines of 64 bytes."""
    return scratch + (num_bytes + 63) // 64 * 64


@inline
def _first_id(job: Any, feature: Any) -> Any:
    """Returns the place of a feature's first id among all ids; :func:`_end_id` that of its last id, + 1."""
    return read_long(field(job, layout.OFFSETS) + 8 * field(feature_block(job, feature), layout.FIRST_BAG))


@inline
def _end_id(job: Any, feature: Any) -> Any:
    fields = feature_block(job, feature)
    return read_long(
        field(job, layout.OFFSETS) + 8 * (field(fields, layout.FIRST_BAG) + field(fields, layout.NUM_BAGS))
    )


@compiled
def _scratch_bytes(job: Any, feature: Any, num_ids: Any) -> Any:
    """Returns an upper bound of the scratch for a table's update, with 64 bytes for each piece that `_take` ends."""
    num_partitions = field(job, layout.NUM_PARTITIONS)
    num_bytes = num_partitions * (8 * _SUMS_FIELDS + _PRODUCT_BYTES + 8 * _TARGET_FIELDS * layout.BLOCK_IDS) + 3 * 64
    for j in range(num_partitions):
        if field(partition_block(job, j), layout.GRADIENT_ADDRESS) == 0:
            num_rows = field(part_block(job, feature, j), layout.NUM_ROWS)
            num_slots = min(num_rows, num_ids) + 1
            num_bytes += slots_bytes(num_rows, num_ids) + 2 * 64
            num_bytes += num_slots * 4 * field(partition_block(job, j), layout.NUM_COLUMNS)
    return num_bytes


@compiled
def _make_sums(job: Any, feature: Any, sums: Any, num_ids: Any, scratch: Any) -> None:
    """Writes the block of each partition's slots and sums, and lays both out in ``scratch``."""
    # where gradients are returned, BUCKETS is 0: no slots, and each row's sum is at its place in the gradient itself
    for j in range(field(job, layout.NUM_PARTITIONS)):
        partition, part = partition_block(job, j), part_block(job, feature, j)
        num_rows, sum_bytes = field(part, layout.NUM_ROWS), 4 * field(partition, layout.NUM_COLUMNS)
        write(sums + 8 * _SUM_BYTES, sum_bytes)
        if field(partition, layout.GRADIENT_ADDRESS) != 0:
            write(sums + 8 * BUCKETS, 0)
            write(sums + 8 * _SUMS, field(partition, layout.GRADIENT_ADDRESS) + field(part, layout.GRADIENT_START))
        else:
            make_slots(sums, num_rows, num_ids, scratch)
            scratch = _take(scratch, slots_bytes(num_rows, num_ids))
            write(sums + 8 * _SUMS, scratch)
            scratch = _take(scratch, (min(num_rows, num_ids) + 1) * sum_bytes)
        sums += 8 * _SUMS_FIELDS


@inline
def _write_targets(job: Any, feature: Any, sums: Any, start: Any, stop: Any, targets: Any, zeros: Any) -> Any:
    """Writes the addresses of ids' rows and of their gradients' sums, and prefetches both.

    New rows get slots, whose sums are cleared. Returns False where a row is not on this rank.
    """
    # three loops over the ids of a partition fill the two fields of each id's target; id 7 as an example:
    #            _TARGET_ROW         _TARGET_SUM
    # rows       address of row 7    7
    # slots      address of row 7    1, the slot of row 7; skipped where every row of the table has a sum
    # sums       address of row 7    address of sum 1
    ids, num_partitions = field(job, layout.IDS) + 8 * start, field(job, layout.NUM_PARTITIONS)
    stride, num_ids = 8 * _TARGET_FIELDS * num_partitions, stop - start
    for j in range(num_partitions):
        part, partition = part_block(job, feature, j), partition_block(job, j)
        row_bytes, num_columns = field(partition, layout.ROW_BYTES), field(partition, layout.NUM_COLUMNS)
        first_address = field(partition, layout.WEIGHT_ADDRESS) + field(part, layout.WEIGHT_START)
        target = targets + 8 * _TARGET_FIELDS * j
        sum_fields, outside = target + 8 * _TARGET_SUM, 0
        last_row, rule = field(part, layout.NUM_ROWS) - 1, rule_of(part)
        for index in range(num_ids):
            row = row_of(read_long(ids + 8 * index), rule)
            outside |= is_outside(row, last_row)
            write(target + 8 * _TARGET_ROW + stride * index, first_address + row * row_bytes)
            write(sum_fields + stride * index, row)
            ask_for(first_address + row * row_bytes, row_bytes)
        if outside < 0:
            return False
        first_sum, sum_bytes = field(sums, _SUMS), field(sums, _SUM_BYTES)
        if field(sums, BUCKETS) != 0:
            num_old_slots = field(sums, NUM_SLOTS)
            find_slots(sums, sum_fields, stride, num_ids)
            num_new_slots = field(sums, NUM_SLOTS) - num_old_slots
            clear(first_sum + (num_old_slots + 1) * sum_bytes, num_new_slots * num_columns, zeros)
        for index in range(num_ids):
            sum_address = first_sum + read_long(sum_fields + stride * index) * sum_bytes
            write(sum_fields + stride * index, sum_address)
            ask_for(sum_address, sum_bytes)
        sums += 8 * _SUMS_FIELDS
    return True


@compiled
def _add_gradients(job: Any, feature: Any, sums: Any, targets: Any, products: Any, zeros: Any) -> Any:
    """Adds the gradients of all ids of a feature to the sums; returns False at an id whose row is not on this rank."""
    fields, gradient_bytes = feature_block(job, feature), 4 * field(job, layout.WIDTH)
    stride = field(job, layout.STRIDE)
    weights, target_bytes = field(job, layout.WEIGHTS), 8 * _TARGET_FIELDS * field(job, layout.NUM_PARTITIONS)
    gradient = field(job, layout.VECTORS) + field(fields, layout.VECTOR_START) - stride
    bag = field(job, layout.OFFSETS) + 8 * field(fields, layout.FIRST_BAG)
    start, end = read_long(bag), _end_id(job, feature)
    bag_end = start
    while start < end:
        stop, target = min(start + layout.BLOCK_IDS, end), targets
        if not _write_targets(job, feature, sums, start, stop, targets, zeros):
            return False
        for position in range(start, stop):
            while position >= bag_end:
                gradient, bag = gradient + stride, bag + 8
                bag_end = read_long(bag)
                ask_for(gradient + _AHEAD_BAGS * stride, gradient_bytes)
            weight = read_float(weights + 4 * position) if weights != 0 else np.float32(1)
            _add_gradient(job, target, products, gradient, weight, zeros)
            target += target_bytes
        start = stop
    return True


@compiled
def _update_row(
    partition: Any, weight: Any, state: Any, gradient: Any, random: Any, first_column: Any, zeros: Any
) -> None:
    """Updates the row v at an address, and its state s, by its gradient g; rounds float16 by ``random`` unless 0."""
    # sgd                v -= rate * g
    # adagrad            s += g * g (each column),  v -= rate * g / (sqrt(s) + eps)
    # row-wise adagrad   s += mean(g * g),          v -= rate / (sqrt(s) + eps) * g
    num_columns, lanes, halves = field(partition, layout.NUM_COLUMNS), lanes_of(zeros), field(partition, layout.IS_HALF)
    optimizer, eps = field(partition, layout.OPTIMIZER), np.float32(read_double(partition + 8 * layout.EPS))
    rate = np.float32(read_double(partition + 8 * layout.LEARNING_RATE))
    if optimizer == layout.ROW_WISE_ADAGRAD:
        squares = zeros
        for column in range(0, num_columns, lanes):
            gradient_lanes = load_floats(gradient + 4 * column, zeros)
            squares = multiply_add(gradient_lanes, gradient_lanes, squares)
        summed = read_float(state) + sum_lanes(squares) / np.float32(num_columns)
        write(state, summed)
        rate = np.float32(rate / (np.sqrt(summed) + eps))
    rates, all_eps = splat(rate, zeros), splat(eps, zeros)
    for column in range(0, num_columns, lanes):
        gradient_lanes = load_floats(gradient + 4 * column, zeros)
        change = gradient_lanes * rates
        if optimizer == layout.ADAGRAD:
            states = multiply_add(gradient_lanes, gradient_lanes, load_floats(state + 4 * column, zeros))
            store(state + 4 * column, states)
            change = change / (square_root(states) + all_eps)
        values = read(weight, column, halves, zeros) - change
        if halves:
            if random != 0:
                values = round_half_at_random(values, random, first_column + column)
            store_half(weight + 2 * column, values)
        else:
            store(weight + 4 * column, values)


@compiled
def _update_rows(job: Any, feature: Any, j: Any, sums: Any, zeros: Any) -> None:
    """Updates each row that has a slot in a partition by the sum of its gradients; prefetches rows 8 slots ahead."""
    partition, part = partition_block(job, j), part_block(job, feature, j)
    row_bytes, state_bytes = field(partition, layout.ROW_BYTES), field(partition, layout.STATE_ROW_BYTES)
    weights = field(partition, layout.WEIGHT_ADDRESS) + field(part, layout.WEIGHT_START)
    states = field(partition, layout.STATE_ADDRESS) + field(part, layout.STATE_START)
    slot_rows, num_slots, gradient = field(sums, SLOT_ROWS), field(sums, NUM_SLOTS), field(sums, _SUMS)
    seed, first_row, random = field(partition, layout.ROUNDING_SEED), field(part, layout.FIRST_ROW), np.int64(0)
    for slot in range(1, num_slots + 1):
        prefetched_row = np.int64(read_int(slot_rows + 4 * min(slot + _AHEAD_SLOTS, num_slots)))
        ask_for(weights + prefetched_row * row_bytes, row_bytes)
        ask_for(states + prefetched_row * state_bytes, state_bytes)
        row, gradient = np.int64(read_int(slot_rows + 4 * slot)), gradient + field(sums, _SUM_BYTES)
        if seed != 0:
            # of seed, table and row alone, so that layouts and threads do not matter; | 1: 0 rounds to the nearest
            key = mixed(np.uint64(field(part, layout.ROUNDING_KEY)) ^ np.uint64(seed))
            random = np.int64(mixed(key + np.uint64(first_row + row))) | 1
        weight, state = weights + row * row_bytes, states + row * state_bytes
        _update_row(partition, weight, state, gradient, random, field(part, layout.FIRST_COLUMN), zeros)


@compiled
def _update_table(job: Any, first_feature: Any, end_feature: Any, scratch: Any, num_ids: Any, zeros: Any) -> Any:
    """Updates the rows of the table that features ``first_feature`` to ``end_feature - 1`` look up.

    Returns 0, or 1 + the number of a feature with an id whose row is not on this rank; no row is updated then.
    """
    # scratch: | slots and sums of each partition | targets of a block | products | hash tables and sums: _make_sums |
    num_partitions = field(job, layout.NUM_PARTITIONS)
    sums, scratch = scratch, _take(scratch, 8 * _SUMS_FIELDS * num_partitions)
    targets, scratch = scratch, _take(scratch, 8 * _TARGET_FIELDS * layout.BLOCK_IDS * num_partitions)
    products, scratch = scratch, _take(scratch, _PRODUCT_BYTES * num_partitions)
    _make_sums(job, first_feature, sums, num_ids, scratch)
    for feature in range(first_feature, end_feature):
        if not _add_gradients(job, feature, sums, targets, products, zeros):
            return 1 + feature
    for j in range(num_partitions):
        if field(sums, BUCKETS) != 0:
            _update_rows(job, first_feature, j, sums, zeros)
        sums += 8 * _SUMS_FIELDS
    return 0


@compiled
def _update(job: Any, tables: Any, num_tables: Any, scratch: Any, scratch_bytes: Any, zeros: Any) -> Any:
    """Updates tables one after another, all in the same scratch; arguments and result as of :func:`update_16`."""
    needed = 0
    for i in range(0, 2 * num_tables, 2):
        first_feature, end_feature = field(tables, i), field(tables, i + 1)
        num_ids = _end_id(job, end_feature - 1) - _first_id(job, first_feature)
        needed = max(needed, _scratch_bytes(job, first_feature, num_ids))
    if needed > scratch_bytes:
        return needed
    for i in range(0, 2 * num_tables, 2):
        first_feature, end_feature = field(tables, i), field(tables, i + 1)
        num_ids = _end_id(job, end_feature - 1) - _first_id(job, first_feature)
        if num_ids > 0:
            outside = _update_table(job, first_feature, end_feature, scratch, num_ids, zeros)
            if outside != 0:
                return -outside
    return needed


@entry
def update_16(job: int, tables: int, num_tables: int, scratch: int, scratch_bytes: int) -> int:
    """Updates the rows of some tables; where GRADIENT_ADDRESS is set, adds up the rows' gradients there instead.

    All numbers of columns are multiples of 16.

    Args:
        job: Address of the job, whose vectors are gradients.
        tables: Address of two numbers for each table: its first feature, and its last feature + 1.
        num_tables: Number of tables.
        scratch: Address of working memory, a multiple of 64.
        scratch_bytes: Number of bytes of working memory.

    Returns:
        How many bytes of scratch the largest table needs. Where there are fewer, nothing is done. A negative number is
        -1 - the number of a feature with an id whose row is not on this rank; its table is left as it is.
    """
    return _update(job, tables, num_tables, scratch, scratch_bytes, zeros_16())


@entry
def update_8(job: int, tables: int, num_tables: int, scratch: int, scratch_bytes: int) -> int:
    """Does as :func:`update_16` where all numbers of columns are multiples of eight."""
    return _update(job, tables, num_tables, scratch, scratch_bytes, zeros_8())


@entry
def update_4(job: int, tables: int, num_tables: int, scratch: int, scratch_bytes: int) -> int:
    """Does as :func:`update_16` where all numbers of columns are multiples of four."""
    return _update(job, tables, num_tables, scratch, scratch_bytes, zeros_4())
