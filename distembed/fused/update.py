"""The backward pass of the fused lookup on a CPU: gradients in, rows updated, once each and exactly.

The ids of a table are sorted by their row in the partition that has most rows, the *main* one::

    ids by main row     | 3 3 3 | 7 | 9 9 |
    gradient of row     |  sum  | . | sum |   added up in one buffer, by which the row is updated at once
    other partitions    added up in buffers of their own, row by row, and updated when all ids are done

Every gradient is then of the rows as they were before the step. A partition's buffer has a *slot* for each of its rows
or, where these are more than ids, for each that occurs. Where it takes no more work to sort by the rows of all
partitions, equal ids lie side by side, and their gradients are added up before they are multiplied. Tables are divided
among threads, and the rows of a table are not: results do not depend on the number of threads.
"""

from typing import Any

import numpy as np

from distembed.fused.gradients import TARGET_FIELDS, TARGET_ROW, TARGET_SUM, add_gradient, join_gradients
from distembed.fused.layout import (
    ADAGRAD,
    EPS,
    FIRST_BAG,
    GRADIENT_ADDRESS,
    GRADIENT_START,
    IDS,
    IS_HALF,
    LEARNING_RATE,
    NUM_BAGS,
    NUM_COLUMNS,
    NUM_PARTITIONS,
    NUM_ROWS,
    OFFSETS,
    OPTIMIZER,
    ROW_BYTES,
    ROW_WISE_ADAGRAD,
    SORT_BYTES,
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
    lanes_of,
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
from distembed.fused.sorting import MAX_KEYS, key_of, num_passes, pack, place_of, sort_packed

_AHEAD_GRADIENTS, _AHEAD_ROWS = 8, 16
"""How many ids ahead their gradients and rows are asked for."""
_MIN_PASSES = 2
"""Ids are sorted by all of their rows where that takes no more passes than this, or than the main row alone takes."""

# of a table's update
_FEATURE = 0  # the first of those that look it up
_MAIN = 1  # number of the main partition; -1 where none is updated
_FIRST_ID = 2
_NUM_IDS = 3
_GRADIENTS = 4  # address of the address of each id's gradient
_SLOTS_OF = 5  # address of the blocks of its partitions
_TARGETS = 6  # of one id
_JOINED = 7  # address of the gradient of an id that occurs several times
_REST = 8  # of the scratch
_UPDATE_FIELDS = 9

# of a partition in a table's update
_ROWS = 0  # int32, of each id
_SLOTS = 1  # int32, of each id
_SLOT_ROWS = 2  # int32, of each slot; 0 where every row has the slot of its number
_NUM_SLOTS = 3  # 0 where rows are not updated from slots
_SUMS = 4  # of slots
_SUM_BYTES = 5  # from one slot to the next
_ARE_USED = 6  # int32, of each slot
_ROW_START = 7  # address of row 0
_STATE_ROW_START = 8
_SLOTS_FIELDS = 9


@inline
def _take(scratch: Any, num_bytes: Any) -> Any:
    """Returns what is left of the scratch behind so many bytes."""
    return scratch + (num_bytes + 63) // 64 * 64


@inline
def _slots(update: Any, j: Any) -> Any:
    """Returns the address of the block of a partition."""
    return field(update, _SLOTS_OF) + 8 * _SLOTS_FIELDS * j


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
    num_bytes = 8 * _UPDATE_FIELDS + num_ids * 3 * 8 + SORT_BYTES + 4 * field(job, WIDTH) + 8 * 64
    for j in range(num_partitions):
        num_slots = min(field(part_block(job, feature, j), NUM_ROWS), num_ids) if j != main else 1
        num_columns = field(partition_block(job, j), NUM_COLUMNS)
        num_bytes += num_ids * 2 * 4 + num_slots * (4 * num_columns + 2 * 4)
        num_bytes += 8 * (_SLOTS_FIELDS + TARGET_FIELDS) + 8 * 64
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
def _write_slots(slots: Any, slot_rows: Any, order: Any, num_ids: Any) -> Any:
    """Gives every row that occurs a slot, and returns their number; ``order`` is sorted by row."""
    num_slots, before = 0, -1
    for i in range(num_ids):
        packed = read_long(order + 8 * i)
        row = key_of(packed)
        if row != before:
            write(slot_rows + 4 * num_slots, np.int32(row))
            num_slots, before = num_slots + 1, row
        write(slots + 4 * place_of(packed), np.int32(num_slots - 1))
    return num_slots


@compiled
def _update_row(partition: Any, weight: Any, state: Any, gradient: Any, zeros: Any) -> None:
    """Updates the row at an address, and its state, by its gradient."""
    num_columns, is_half, lanes = field(partition, NUM_COLUMNS), field(partition, IS_HALF), lanes_of(zeros)
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


@compiled
def _write_partition(job: Any, update: Any, j: Any, scratch: Any, zeros: Any) -> Any:
    """Writes the block of a partition, and returns the rest of the scratch."""
    feature, num_ids, own = field(update, _FEATURE), field(update, _NUM_IDS), _slots(update, j)
    partition, part = partition_block(job, j), part_block(job, feature, j)
    num_rows, sum_bytes = field(part, NUM_ROWS), 4 * field(partition, NUM_COLUMNS)
    rows, scratch = scratch, _take(scratch, 4 * num_ids)
    slots, slot_rows, num_slots, are_used = rows, 0, 0, 0
    ids = field(job, IDS) + 8 * field(update, _FIRST_ID)
    for i in range(num_ids):
        write(rows + 4 * i, np.int32(row_of(read_long(ids + 8 * i), part)))
    if field(partition, GRADIENT_ADDRESS) != 0:
        sums = field(partition, GRADIENT_ADDRESS) + field(part, GRADIENT_START)
    elif j == field(update, _MAIN):
        sums, scratch = scratch, _take(scratch, sum_bytes)
        sum_bytes = 0
    else:
        num_slots = num_rows
        if num_rows > num_ids:
            slots, scratch = scratch, _take(scratch, 4 * num_ids)
            slot_rows, scratch = scratch, _take(scratch, 4 * num_ids)
            order = _take(scratch, SORT_BYTES)
            for i in range(num_ids):
                write(order + 8 * i, pack(read_int(rows + 4 * i), i))
            order = sort_packed(order, order + 8 * num_ids, num_ids, num_rows, scratch)
            num_slots = _write_slots(slots, slot_rows, order, num_ids)
        sums, scratch = scratch, _take(scratch, num_slots * sum_bytes)
        are_used, scratch = scratch, _take(scratch, 4 * num_slots)
        clear(sums, num_slots * field(partition, NUM_COLUMNS), zeros)
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
def _update_slot(job: Any, update: Any, j: Any, row: Any, gradient: Any, zeros: Any) -> None:
    """Updates a row of a partition by its gradient."""
    partition, own = partition_block(job, j), _slots(update, j)
    weight = field(own, _ROW_START) + row * field(partition, ROW_BYTES)
    state = field(own, _STATE_ROW_START) + row * field(partition, STATE_ROW_BYTES)
    _update_row(partition, weight, state, gradient, zeros)


@inline
def _ask_for_row(job: Any, update: Any, j: Any, place: Any) -> None:
    """Asks for the row, and its state, of the id at a place."""
    partition, own = partition_block(job, j), _slots(update, j)
    row = np.int64(read_int(field(own, _ROWS) + 4 * place))
    row_bytes, state_bytes = field(partition, ROW_BYTES), field(partition, STATE_ROW_BYTES)
    ask_for(field(own, _ROW_START) + row * row_bytes, row_bytes)
    ask_for(field(own, _STATE_ROW_START) + row * state_bytes, state_bytes)


@inline
def _write_targets(job: Any, update: Any, place: Any) -> None:
    """Writes where the rows of the id at a place are, and the sums of their gradients, which are used now."""
    target = field(update, _TARGETS)
    for j in range(field(job, NUM_PARTITIONS)):
        own = _slots(update, j)
        row = np.int64(read_int(field(own, _ROWS) + 4 * place))
        slot = np.int64(read_int(field(own, _SLOTS) + 4 * place))
        write(target + 8 * TARGET_ROW, field(own, _ROW_START) + row * field(partition_block(job, j), ROW_BYTES))
        write(target + 8 * TARGET_SUM, field(own, _SUMS) + slot * field(own, _SUM_BYTES))
        if field(own, _ARE_USED) != 0:
            write(field(own, _ARE_USED) + 4 * slot, np.int32(1))
        target += 8 * TARGET_FIELDS


@inline
def _num_keys(job: Any, feature: Any, main: Any) -> Any:
    """Returns how many keys there are of the rows of all partitions; 0 where ids are sorted by the main row alone."""
    num_main = field(part_block(job, feature, main), NUM_ROWS)
    num_keys = num_main
    for j in range(field(job, NUM_PARTITIONS)):
        if j != main and num_keys <= MAX_KEYS:
            num_keys *= field(part_block(job, feature, j), NUM_ROWS)
    if num_keys > MAX_KEYS or num_passes(num_keys) > max(num_passes(num_main), _MIN_PASSES):
        return 0
    return num_keys


@compiled
def _sort_ids(job: Any, update: Any, num_keys: Any) -> Any:
    """Sorts the ids by their main row, and by their others where there are keys for these; returns the sorted."""
    feature, main, num_ids = field(update, _FEATURE), field(update, _MAIN), field(update, _NUM_IDS)
    order = _take(field(update, _REST), SORT_BYTES)
    if main < 0:
        for i in range(num_ids):
            write(order + 8 * i, i)
        return order
    main_rows = field(_slots(update, main), _ROWS)
    for i in range(num_ids):
        key = np.int64(read_int(main_rows + 4 * i))
        if num_keys != 0:
            for j in range(field(job, NUM_PARTITIONS)):
                if j != main:
                    row = read_int(field(_slots(update, j), _ROWS) + 4 * i)
                    key = key * field(part_block(job, feature, j), NUM_ROWS) + row
        write(order + 8 * i, pack(key, i))
    keys = num_keys if num_keys != 0 else field(part_block(job, feature, main), NUM_ROWS)
    return sort_packed(order, order + 8 * num_ids, num_ids, keys, field(update, _REST))


@inline
def _ask_ahead(job: Any, update: Any, order: Any, first: Any, stop: Any) -> None:
    """Asks for what the ids some way behind these need."""
    main, num_ids, gradient_bytes = field(update, _MAIN), field(update, _NUM_IDS), 4 * field(job, WIDTH)
    for i in range(first, stop):
        if i + _AHEAD_GRADIENTS < num_ids:
            place = place_of(read_long(order + 8 * (i + _AHEAD_GRADIENTS)))
            ask_for(read_long(field(update, _GRADIENTS) + 8 * place), gradient_bytes)
        if main >= 0 and i + _AHEAD_ROWS < num_ids:
            _ask_for_row(job, update, main, place_of(read_long(order + 8 * (i + _AHEAD_ROWS))))


@compiled
def _update_main(job: Any, update: Any, zeros: Any) -> None:
    """Adds up all gradients, and updates the main partition's rows."""
    main, num_ids, targets = field(update, _MAIN), field(update, _NUM_IDS), field(update, _TARGETS)
    gradients, joined, width = field(update, _GRADIENTS), field(update, _JOINED), field(job, WIDTH)
    weights = field(job, WEIGHTS) + 4 * field(update, _FIRST_ID) if field(job, WEIGHTS) != 0 else 0
    num_keys, own_sum, num_columns = 0, 0, 0
    if main >= 0:
        num_keys = _num_keys(job, field(update, _FEATURE), main)
        own_sum, num_columns = field(_slots(update, main), _SUMS), field(partition_block(job, main), NUM_COLUMNS)
    order = _sort_ids(job, update, num_keys)
    start, before = 0, np.int64(-1)
    while start < num_ids:
        packed, stop = read_long(order + 8 * start), start + 1
        while num_keys != 0 and stop < num_ids and key_of(read_long(order + 8 * stop)) == key_of(packed):
            stop += 1
        _ask_ahead(job, update, order, start, stop)
        place = place_of(packed)
        if main >= 0:
            row = np.int64(read_int(field(_slots(update, main), _ROWS) + 4 * place))
            if row != before:
                if before >= 0:
                    _update_slot(job, update, main, before, own_sum, zeros)
                clear(own_sum, num_columns, zeros)
                before = row
        _write_targets(job, update, place)
        if stop == start + 1:
            weight = read_float(weights + 4 * place) if weights != 0 else np.float32(1)
            add_gradient(job, targets, read_long(gradients + 8 * place), weight, zeros)
        else:
            join_gradients(order + 8 * start, stop - start, gradients, weights, joined, width, zeros)
            add_gradient(job, targets, joined, np.float32(1), zeros)
        start = stop
    if before >= 0:
        _update_slot(job, update, main, before, own_sum, zeros)


@compiled
def _update_others(job: Any, update: Any, zeros: Any) -> None:
    """Updates the rows of all other partitions by the sums of their gradients."""
    for j in range(field(job, NUM_PARTITIONS)):
        own = _slots(update, j)
        for slot in range(field(own, _NUM_SLOTS)):
            if read_int(field(own, _ARE_USED) + 4 * slot) != 0:
                slot_rows, gradient = field(own, _SLOT_ROWS), field(own, _SUMS) + slot * field(own, _SUM_BYTES)
                row = np.int64(read_int(slot_rows + 4 * slot)) if slot_rows != 0 else slot
                _update_slot(job, update, j, row, gradient, zeros)


@compiled
def _update(job: Any, first_feature: Any, last_feature: Any, scratch: Any, scratch_bytes: Any, zeros: Any) -> Any:
    start, end = _first_id(job, first_feature), _end_id(job, last_feature - 1)
    num_ids, main, num_partitions = end - start, _main_partition(job, first_feature), field(job, NUM_PARTITIONS)
    needed = _scratch_bytes(job, first_feature, main, num_ids)
    if num_ids == 0 or needed > scratch_bytes:
        return needed
    update, scratch = scratch, _take(scratch, 8 * _UPDATE_FIELDS)
    gradients, scratch = scratch, _take(scratch, 8 * num_ids)
    slots, scratch = scratch, _take(scratch, 8 * _SLOTS_FIELDS * num_partitions)
    targets, scratch = scratch, _take(scratch, 8 * TARGET_FIELDS * num_partitions)
    joined, scratch = scratch, _take(scratch, 4 * field(job, WIDTH))
    write(update + 8 * _FEATURE, first_feature)
    write(update + 8 * _MAIN, main)
    write(update + 8 * _FIRST_ID, start)
    write(update + 8 * _NUM_IDS, num_ids)
    write(update + 8 * _GRADIENTS, gradients)
    write(update + 8 * _SLOTS_OF, slots)
    write(update + 8 * _TARGETS, targets)
    write(update + 8 * _JOINED, joined)
    _write_gradient_places(job, first_feature, last_feature, gradients)
    for j in range(num_partitions):
        scratch = _write_partition(job, update, j, scratch, zeros)
    write(update + 8 * _REST, scratch)
    _update_main(job, update, zeros)
    _update_others(job, update, zeros)
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
    return _update(job, first_feature, last_feature, scratch, scratch_bytes, zeros_8())


@entry
def update_4(job: int, first_feature: int, last_feature: int, scratch: int, scratch_bytes: int) -> int:
    """Does as :func:`update_8` where all numbers of columns are multiples of four."""
    return _update(job, first_feature, last_feature, scratch, scratch_bytes, zeros_4())
