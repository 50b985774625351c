"""The backward pass of the fused lookup on a CPU: gradients in, rows updated, once each and exactly.

The ids of a table are sorted by their row in the partition that has most rows, the *main* one::

    ids by main row     | 3 3 3 | 7 | 9 9 |
    gradient of row     |  sum  | . | sum |   added up in one buffer, by which the row is updated at once
    other partitions    added up in buffers of their own, row by row, and updated when all ids are done

Every gradient is then of the rows as they were before the step. A partition's buffer has a *slot* for each of its rows
or, where these are more than ids, for each that occurs. Tables are divided among threads, and the rows of a table are
not: results do not depend on the number of threads.
"""

from typing import Any

import numpy as np

from distembed.fused.layout import (
    ADAGRAD,
    COLUMN_START,
    EPS,
    FIRST_BAG,
    GRADIENT_ADDRESS,
    GRADIENT_START,
    IDS,
    IS_HALF,
    IS_PRODUCT,
    LEARNING_RATE,
    NUM_BAGS,
    NUM_COLUMNS,
    NUM_PARTITIONS,
    NUM_ROWS,
    OFFSETS,
    OPTIMIZER,
    ROW_BYTES,
    ROW_WISE_ADAGRAD,
    STATE_ADDRESS,
    STATE_ROW_BYTES,
    STATE_START,
    STRIDE,
    VECTOR_START,
    VECTORS,
    WEIGHT_ADDRESS,
    WEIGHT_START,
    WEIGHTS,
    WIDTH,
)
from distembed.fused.rows import (
    ask_for,
    clear,
    compiled,
    entry,
    feature_block,
    field,
    inline,
    part_block,
    partition_block,
    read,
    row_of,
)
from distembed.fused.simd import (
    load,
    multiply_add,
    read_double,
    read_float,
    read_int,
    read_long,
    splat,
    square_root,
    store,
    store_half,
    total,
    write,
    zeros_4,
    zeros_8,
)

_DIGIT_BITS = 9
_AHEAD_GRADIENTS, _AHEAD_ROWS = 8, 16
"""How many ids ahead their gradients and rows are asked for."""

# of a partition in a table's update: fields of a block
_ROWS = 0  # int32, of each id
_SLOTS = 1  # int32, of each id
_SLOT_ROWS = 2  # int32, of each slot; 0 where every row has the slot of its number
_NUM_SLOTS = 3  # 0 where rows are not updated from slots
_SUMS = 4  # of slots
_SUM_BYTES = 5  # from one slot to the next
_ARE_USED = 6  # int32, of each slot
_ROW_START = 7  # address of row 0
_STATE_ROW_START = 8
_FIELDS = 9


@inline
def _take(scratch: Any, num_bytes: Any) -> Any:
    """Returns what is left of the scratch behind so many bytes."""
    return scratch + (num_bytes + 63) // 64 * 64


@inline
def _first_id(job: Any, feature: Any) -> Any:
    return read_long(field(job, OFFSETS) + 8 * field(feature_block(job, feature), FIRST_BAG))


@inline
def _end_id(job: Any, feature: Any) -> Any:
    own = feature_block(job, feature)
    return read_long(field(job, OFFSETS) + 8 * (field(own, FIRST_BAG) + field(own, NUM_BAGS)))


@inline
def _main_partition(job: Any, feature: Any) -> Any:
    """Returns which of the partitions that are updated has most rows; -1 where none is."""
    main, most = -1, -1
    for j in range(field(job, NUM_PARTITIONS)):
        num_rows = field(part_block(job, feature, j), NUM_ROWS)
        if field(partition_block(job, j), GRADIENT_ADDRESS) == 0 and num_rows > most:
            main, most = j, num_rows
    return main


@compiled
def _scratch_bytes(job: Any, feature: Any, main: Any, num_ids: Any) -> Any:
    """Returns at least as many bytes as an update takes, with 64 to spare for each of its parts."""
    num_partitions = field(job, NUM_PARTITIONS)
    num_bytes = num_ids * (3 * 8 + num_partitions * 8) + (8 << _DIGIT_BITS) + 64 * 8
    for j in range(num_partitions):
        num_slots = min(field(part_block(job, feature, j), NUM_ROWS), num_ids) if j != main else 1
        num_columns = field(partition_block(job, j), NUM_COLUMNS)
        num_bytes += num_slots * (4 * num_columns + 8) + 8 * _FIELDS + 64 * 8
    return num_bytes


@compiled
def _write_gradient_places(job: Any, first_feature: Any, last_feature: Any, places: Any) -> Any:
    """Writes the address of the gradient of each id's bag, for all features of a table."""
    offsets, stride = field(job, OFFSETS), field(job, STRIDE)
    for feature in range(first_feature, last_feature):
        own = feature_block(job, feature)
        gradient = field(job, VECTORS) + field(own, VECTOR_START)
        bag = offsets + 8 * field(own, FIRST_BAG)
        end = read_long(bag)
        for _ in range(field(own, NUM_BAGS)):
            start, bag = end, bag + 8
            end = read_long(bag)
            for _ in range(start, end):
                write(places, gradient)
                places += 8
            gradient += stride


@compiled
def _sort_by_row(rows: Any, num_ids: Any, num_rows: Any, order: Any, other: Any, ends: Any) -> Any:
    """Sorts the places of ids by their rows, and among these as they came.

    Args:
        rows: Address of the ids' rows, int32.
        num_ids: How many there are.
        num_rows: A number above all rows.
        order: Address of 8 bytes for each id.
        other: The same.
        ends: Address of 8 bytes for each number of a digit.

    Returns:
        ``order`` or ``other``, where ``row * 2 ** 32 + place`` stands for each id in turn.
    """
    num_bits = 1
    while (1 << num_bits) < num_rows:
        num_bits += 1
    num_passes = (num_bits + _DIGIT_BITS - 1) // _DIGIT_BITS
    digit_bits = (num_bits + num_passes - 1) // num_passes
    mask = (1 << digit_bits) - 1
    for i in range(num_ids):
        write(order + 8 * i, (np.int64(read_int(rows + 4 * i)) << 32) | i)
    for number in range(num_passes):
        shift = 32 + number * digit_bits
        for digit in range(mask + 1):
            write(ends + 8 * digit, 0)
        for i in range(num_ids):
            place = ends + 8 * ((read_long(order + 8 * i) >> shift) & mask)
            write(place, read_long(place) + 1)
        end = other
        for digit in range(mask + 1):
            count = read_long(ends + 8 * digit)
            write(ends + 8 * digit, end)
            end += 8 * count
        for i in range(num_ids):
            packed = read_long(order + 8 * i)
            place = ends + 8 * ((packed >> shift) & mask)
            target = read_long(place)
            write(target, packed)
            write(place, target + 8)
        order, other = other, order
    return order


@compiled
def _write_slots(slots: Any, slot_rows: Any, order: Any, num_ids: Any) -> Any:
    """Gives every row that occurs a slot, and returns their number; ``order`` is of :func:`_sort_by_row`."""
    num_slots, before = 0, -1
    for i in range(num_ids):
        packed = read_long(order + 8 * i)
        row = packed >> 32
        if row != before:
            write(slot_rows + 4 * num_slots, np.int32(row))
            num_slots, before = num_slots + 1, row
        write(slots + 4 * (packed & 0xFFFFFFFF), np.int32(num_slots - 1))
    return num_slots


@compiled
def _update_row(partition: Any, weight: Any, state: Any, gradient: Any, zeros: Any, lanes: Any) -> None:
    """Updates the row at an address, and its state, by its gradient."""
    num_columns, is_half = field(partition, NUM_COLUMNS), field(partition, IS_HALF)
    optimizer, eps = field(partition, OPTIMIZER), np.float32(read_double(partition + 8 * EPS))
    rate = np.float32(read_double(partition + 8 * LEARNING_RATE))
    if optimizer == ROW_WISE_ADAGRAD:
        squares = zeros
        for column in range(0, num_columns, lanes):
            own = load(gradient + 4 * column, zeros)
            squares = multiply_add(own, own, squares)
        summed = read_float(state) + total(squares) / np.float32(num_columns)
        write(state, summed)
        rate = np.float32(rate / (np.sqrt(summed) + eps))
    rates, all_eps = splat(rate, zeros), splat(eps, zeros)
    for column in range(0, num_columns, lanes):
        own = load(gradient + 4 * column, zeros)
        change = own * rates
        if optimizer == ADAGRAD:
            states = multiply_add(own, own, load(state + 4 * column, zeros))
            store(state + 4 * column, states)
            change = change / (square_root(states) + all_eps)
        values = read(weight, column, is_half, zeros) - change
        if is_half:
            store_half(weight + 2 * column, values)
        else:
            store(weight + 4 * column, values)


@inline
def _add_pair(
    job: Any, gradient: Any, factor: Any, row_0: Any, row_1: Any, sum_0: Any, sum_1: Any, zeros: Any, lanes: Any
) -> None:
    """Adds the gradients of two rows that are multiplied."""
    half_0, half_1 = field(partition_block(job, 0), IS_HALF), field(partition_block(job, 1), IS_HALF)
    for column in range(0, field(job, WIDTH), lanes):
        own = load(gradient + 4 * column, zeros) * factor
        place_0, place_1 = sum_0 + 4 * column, sum_1 + 4 * column
        vector_0, vector_1 = read(row_0, column, half_0, zeros), read(row_1, column, half_1, zeros)
        store(place_0, multiply_add(own, vector_1, load(place_0, zeros)))
        store(place_1, multiply_add(own, vector_0, load(place_1, zeros)))


@compiled
def _add_product(job: Any, gradient: Any, factor: Any, blocks: Any, place: Any, zeros: Any, lanes: Any) -> None:
    """Adds the gradients of any number of rows that are multiplied."""
    num_partitions = field(job, NUM_PARTITIONS)
    for column in range(0, field(job, WIDTH), lanes):
        own = load(gradient + 4 * column, zeros) * factor
        for j in range(num_partitions):
            product = own
            for other in range(num_partitions):
                if other != j:
                    row = _row_address(job, blocks, other, place)
                    product = product * read(row, column, field(partition_block(job, other), IS_HALF), zeros)
            target = _sum_address(blocks, j, place) + 4 * column
            store(target, load(target, zeros) + product)


@compiled
def _add_sum(job: Any, gradient: Any, factor: Any, blocks: Any, place: Any, zeros: Any, lanes: Any) -> None:
    """Adds the gradients of rows that are added up, or stand side by side."""
    for j in range(field(job, NUM_PARTITIONS)):
        partition, target = partition_block(job, j), _sum_address(blocks, j, place)
        start = gradient + 4 * field(partition, COLUMN_START)
        for column in range(0, field(partition, NUM_COLUMNS), lanes):
            own, summed = load(start + 4 * column, zeros), load(target + 4 * column, zeros)
            store(target + 4 * column, multiply_add(own, factor, summed))


@inline
def _row_address(job: Any, blocks: Any, j: Any, place: Any) -> Any:
    own = blocks + 8 * _FIELDS * j
    row = np.int64(read_int(field(own, _ROWS) + 4 * place))
    return field(own, _ROW_START) + row * field(partition_block(job, j), ROW_BYTES)


@inline
def _sum_address(blocks: Any, j: Any, place: Any) -> Any:
    own = blocks + 8 * _FIELDS * j
    return field(own, _SUMS) + np.int64(read_int(field(own, _SLOTS) + 4 * place)) * field(own, _SUM_BYTES)


@compiled
def _write_blocks(
    job: Any, feature: Any, main: Any, start: Any, num_ids: Any, scratch: Any, zeros: Any, lanes: Any
) -> Any:
    """Writes the block of each partition, and returns the rest of the scratch."""
    num_partitions = field(job, NUM_PARTITIONS)
    blocks = scratch
    scratch = _take(blocks, 8 * _FIELDS * num_partitions)
    for j in range(num_partitions):
        partition, part, own = partition_block(job, j), part_block(job, feature, j), blocks + 8 * _FIELDS * j
        num_rows, sum_bytes = field(part, NUM_ROWS), 4 * field(partition, NUM_COLUMNS)
        rows, scratch = scratch, _take(scratch, 4 * num_ids)
        slots, slot_rows, num_slots, are_used = rows, 0, 0, 0
        ids = field(job, IDS) + 8 * start
        for i in range(num_ids):
            write(rows + 4 * i, np.int32(row_of(read_long(ids + 8 * i), part)))
        if field(partition, GRADIENT_ADDRESS) != 0:
            sums = field(partition, GRADIENT_ADDRESS) + field(part, GRADIENT_START)
        elif j == main:
            sums, scratch = scratch, _take(scratch, sum_bytes)
            sum_bytes = 0
        else:
            num_slots = num_rows
            if num_rows > num_ids:
                slots, scratch = scratch, _take(scratch, 4 * num_ids)
                slot_rows, scratch = scratch, _take(scratch, 4 * num_ids)
                order = _take(scratch, 8 << _DIGIT_BITS)
                order = _sort_by_row(rows, num_ids, num_rows, order, order + 8 * num_ids, scratch)
                num_slots = _write_slots(slots, slot_rows, order, num_ids)
            sums, scratch = scratch, _take(scratch, num_slots * sum_bytes)
            are_used, scratch = scratch, _take(scratch, 4 * num_slots)
            clear(sums, num_slots * field(partition, NUM_COLUMNS), zeros, lanes)
            for slot in range(num_slots):
                write(are_used + 4 * slot, np.int32(0))
        write(own + 8 * _ROWS, rows)
        write(own + 8 * _SLOTS, slots)
        write(own + 8 * _SLOT_ROWS, slot_rows)
        write(own + 8 * _NUM_SLOTS, num_slots)
        write(own + 8 * _SUMS, sums)
        write(own + 8 * _SUM_BYTES, sum_bytes)
        write(own + 8 * _ARE_USED, are_used)
        write(own + 8 * _ROW_START, field(partition, WEIGHT_ADDRESS) + field(part, WEIGHT_START))
        write(own + 8 * _STATE_ROW_START, field(partition, STATE_ADDRESS) + field(part, STATE_START))
    return scratch


@inline
def _update_place(job: Any, blocks: Any, j: Any, row: Any, gradient: Any, zeros: Any, lanes: Any) -> None:
    partition, own = partition_block(job, j), blocks + 8 * _FIELDS * j
    weight = field(own, _ROW_START) + row * field(partition, ROW_BYTES)
    state = field(own, _STATE_ROW_START) + row * field(partition, STATE_ROW_BYTES)
    _update_row(partition, weight, state, gradient, zeros, lanes)


@inline
def _ask_for_row(job: Any, blocks: Any, j: Any, row: Any) -> None:
    partition, own = partition_block(job, j), blocks + 8 * _FIELDS * j
    row_bytes, state_bytes = field(partition, ROW_BYTES), field(partition, STATE_ROW_BYTES)
    ask_for(field(own, _ROW_START) + row * row_bytes, row_bytes)
    ask_for(field(own, _STATE_ROW_START) + row * state_bytes, state_bytes)


@inline
def _add_id(job: Any, blocks: Any, place: Any, gradient: Any, weight: Any, zeros: Any, lanes: Any) -> None:
    """Adds the gradients of one id's rows to the sums of their slots."""
    num_partitions, factor = field(job, NUM_PARTITIONS), splat(weight, zeros)
    for j in range(num_partitions):
        own = blocks + 8 * _FIELDS * j
        if field(own, _ARE_USED) != 0:
            write(field(own, _ARE_USED) + 4 * np.int64(read_int(field(own, _SLOTS) + 4 * place)), np.int32(1))
    if not field(job, IS_PRODUCT):
        _add_sum(job, gradient, factor, blocks, place, zeros, lanes)
    elif num_partitions == 2:
        row_0, row_1 = _row_address(job, blocks, 0, place), _row_address(job, blocks, 1, place)
        sum_0, sum_1 = _sum_address(blocks, 0, place), _sum_address(blocks, 1, place)
        _add_pair(job, gradient, factor, row_0, row_1, sum_0, sum_1, zeros, lanes)
    else:
        _add_product(job, gradient, factor, blocks, place, zeros, lanes)


@compiled
def _update_table(
    job: Any,
    feature: Any,
    main: Any,
    start: Any,
    num_ids: Any,
    places: Any,
    blocks: Any,
    scratch: Any,
    zeros: Any,
    lanes: Any,
) -> None:
    own = blocks + 8 * _FIELDS * main
    ends, order = scratch, _take(scratch, 8 << _DIGIT_BITS)
    own_sum, num_columns = field(own, _SUMS), 0
    if main >= 0:
        num_columns = field(partition_block(job, main), NUM_COLUMNS)
        num_rows = field(part_block(job, feature, main), NUM_ROWS)
        order = _sort_by_row(field(own, _ROWS), num_ids, num_rows, order, order + 8 * num_ids, ends)
    else:
        for i in range(num_ids):
            write(order + 8 * i, i)
    gradient_bytes, weights, before = 4 * field(job, WIDTH), field(job, WEIGHTS) + 4 * start, -1
    has_weights = field(job, WEIGHTS) != 0
    for i in range(num_ids):
        packed = read_long(order + 8 * i)
        place, row = packed & 0xFFFFFFFF, packed >> 32
        if i + _AHEAD_GRADIENTS < num_ids:
            coming = read_long(order + 8 * (i + _AHEAD_GRADIENTS)) & 0xFFFFFFFF
            ask_for(read_long(places + 8 * coming), gradient_bytes)
        if main >= 0:
            if i + _AHEAD_ROWS < num_ids:
                _ask_for_row(job, blocks, main, read_long(order + 8 * (i + _AHEAD_ROWS)) >> 32)
            if row != before:
                if before >= 0:
                    _update_place(job, blocks, main, before, own_sum, zeros, lanes)
                clear(own_sum, num_columns, zeros, lanes)
                before = row
        weight = read_float(weights + 4 * place) if has_weights else np.float32(1)
        _add_id(job, blocks, place, read_long(places + 8 * place), weight, zeros, lanes)
    if before >= 0:
        _update_place(job, blocks, main, before, own_sum, zeros, lanes)
    for j in range(field(job, NUM_PARTITIONS)):
        other = blocks + 8 * _FIELDS * j
        for slot in range(field(other, _NUM_SLOTS)):
            if read_int(field(other, _ARE_USED) + 4 * slot) != 0:
                slot_rows, gradient = field(other, _SLOT_ROWS), field(other, _SUMS) + slot * field(other, _SUM_BYTES)
                slot_row = np.int64(read_int(slot_rows + 4 * slot)) if slot_rows != 0 else slot
                _update_place(job, blocks, j, slot_row, gradient, zeros, lanes)


@compiled
def _update(
    job: Any, first_feature: Any, last_feature: Any, scratch: Any, scratch_bytes: Any, zeros: Any, lanes: Any
) -> Any:
    start, end = _first_id(job, first_feature), _end_id(job, last_feature - 1)
    main = _main_partition(job, first_feature)
    needed = _scratch_bytes(job, first_feature, main, end - start)
    if start < end and needed <= scratch_bytes:
        places, blocks = scratch, _take(scratch, 8 * (end - start))
        _write_gradient_places(job, first_feature, last_feature, places)
        rest = _write_blocks(job, first_feature, main, start, end - start, blocks, zeros, lanes)
        _update_table(job, first_feature, main, start, end - start, places, blocks, rest, zeros, lanes)
    return needed


@entry
def update_8(job: int, first_feature: int, last_feature: int, scratch: int, scratch_bytes: int) -> int:
    """Updates the rows of one table, or adds their gradients up where these go elsewhere.

    All numbers of columns are multiples of eight.

    Args:
        job: Address of the job, whose vectors are gradients.
        first_feature: The first of the features that look the table up.
        last_feature: The one behind the last.
        scratch: Address of memory that is at a multiple of 64.
        scratch_bytes: How much there is.

    Returns:
        How many bytes of it are needed. Where there are fewer, nothing is done.
    """
    return _update(job, first_feature, last_feature, scratch, scratch_bytes, zeros_8(), 8)


@entry
def update_4(job: int, first_feature: int, last_feature: int, scratch: int, scratch_bytes: int) -> int:
    """Does as :func:`update_8` where all numbers of columns are multiples of four."""
    return _update(job, first_feature, last_feature, scratch, scratch_bytes, zeros_4(), 4)
