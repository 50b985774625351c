"""The forward pass of the fused lookup on a CPU: ids in, composed and pooled vectors out, in one pass.

The ids of 64 bags or so are mapped, and their rows asked for, before the first of them is composed, so that memory is
read while there is something else to do.
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
    read_float,
    read_long,
    splat,
    store,
    write,
    zeros_4,
    zeros_8,
    zeros_16,
)


@compiled
def _compose_features(job: Any, share: Any, num_shares: Any, scratch: Any, zeros: Any) -> Any:
    """Composes one of ``num_shares`` ranges of every feature's bags; arguments and result as of :func:`compose_16`."""
    num_features, most_bags = field(job, layout.NUM_FEATURES), 0
    for feature in range(num_features):
        most_bags = max(most_bags, field(feature_block(job, feature), layout.NUM_BAGS))
    first_bag, end_bag = most_bags * share // num_shares, most_bags * (share + 1) // num_shares
    # the vectors of one bag's features are neighbours in the output: write all features of 64 bags, then the next 64
    for start in range(first_bag, end_bag, layout.BLOCK_IDS):
        for feature in range(num_features):
            stop = min(start + layout.BLOCK_IDS, end_bag, field(feature_block(job, feature), layout.NUM_BAGS))
            if start < stop and not _compose_bags(job, feature, start, stop, scratch, zeros):
                return 1 + feature
    return 0


@inline
def _compose_bags(job: Any, feature: Any, first_bag: Any, end_bag: Any, rows: Any, zeros: Any) -> Any:
    """Composes bags ``first_bag`` to ``end_bag - 1`` of a feature; returns False where an id's row is not on this rank.

    Ids are read in blocks of 64, which need not end where a bag ends: a bag's sum continues in the next block.
    """
    # bags      A: ids 0, 1   B: none   C: id 2        with first_bag = A
    # target    A - 1 at the start, then A at position 0; at position 2 B, which is cleared, and C
    # offset    address of bag_end, the position at which the current bag ends: 0 at the start, then 2; 2, 3
    fields, stride = feature_block(job, feature), field(job, layout.STRIDE)
    width, weights = field(job, layout.WIDTH), field(job, layout.WEIGHTS)
    offset = field(job, layout.OFFSETS) + 8 * field(fields, layout.FIRST_BAG)
    start, end = read_long(offset + 8 * first_bag), read_long(offset + 8 * end_bag)
    bag_end, offset = start, offset + 8 * first_bag
    target = field(job, layout.VECTORS) + field(fields, layout.VECTOR_START) + (first_bag - 1) * stride
    while start < end:
        stop = min(start + layout.BLOCK_IDS, end)
        if not _find_rows(job, feature, start, stop, rows):
            return False
        position = start
        while position < stop:
            is_first = position >= bag_end
            while position >= bag_end:
                target += stride
                offset += 8
                bag_end = read_long(offset)
                if position >= bag_end:
                    clear(target, width, zeros)
            id_rows, id_weights = rows + 8 * (position - start), weights + 4 * position if weights != 0 else 0
            # a bag of one id needs no loop, whose end would depend on a number yet to be read: the branch is predicted
            if is_first and bag_end == position + 1:
                _compose_one(job, target, id_rows, id_weights, zeros)
                position += 1
            else:
                num_ids = min(bag_end, stop) - position
                _compose_ids(job, target, id_rows, num_ids, id_weights, is_first, zeros)
                position += num_ids
        start = stop
    vectors_end = field(job, layout.VECTORS) + field(fields, layout.VECTOR_START) + end_bag * stride
    target += stride
    while target < vectors_end:
        clear(target, width, zeros)
        target += stride
    return True


@inline
def _find_rows(job: Any, feature: Any, start: Any, stop: Any, rows: Any) -> Any:
    """Writes the addresses of the rows of ids ``start`` to ``stop - 1`` to ``rows[j][i]``, and prefetches the rows.

    Returns False where a row is not on this rank; no row has been read then.
    """
    ids, outside = field(job, layout.IDS), 0
    for j in range(field(job, layout.NUM_PARTITIONS)):
        table_part, partition = part_block(job, feature, j), partition_block(job, j)
        row_bytes = field(partition, layout.ROW_BYTES)
        base = field(partition, layout.WEIGHT_ADDRESS) + field(table_part, layout.WEIGHT_START)
        row_address, last_row = rows + 8 * layout.BLOCK_IDS * j, field(table_part, layout.NUM_ROWS) - 1
        rule = rule_of(table_part)
        for position in range(start, stop):
            row = row_of(read_long(ids + 8 * position), rule)
            outside |= is_outside(row, last_row)
            address = base + row * row_bytes
            write(row_address, address)
            row_address += 8
            ask_for(address, row_bytes)
    return outside >= 0


@inline
def _weight(weights: Any, i: Any, zeros: Any) -> Any:
    """Returns the weight of id ``i`` in all lanes; 1 where ``weights`` is 0, for ids without weights."""
    return splat(read_float(weights + 4 * i) if weights != 0 else np.float32(1), zeros)


@inline
def _num_common(job: Any) -> Any:
    """Returns the number of partitions that share columns: all in a product or sum, 1 in a concatenation."""
    num_partitions = field(job, layout.NUM_PARTITIONS)
    return num_partitions if field(partition_block(job, num_partitions - 1), layout.COLUMN_START) == 0 else 1


@inline
def _compose_rows(job: Any, rows: Any, j: Any, num_common: Any, column: Any, zeros: Any) -> Any:
    """Returns some lanes of an id's composed vector, from the rows of partitions ``j`` to ``j + num_common - 1``."""
    vector = read(read_long(rows + 8 * layout.BLOCK_IDS * j), column, rows_are_half(job, j), zeros)
    for partition in range(j + 1, j + num_common):
        row = read(read_long(rows + 8 * layout.BLOCK_IDS * partition), column, rows_are_half(job, partition), zeros)
        vector = vector * row if field(job, layout.IS_PRODUCT) else vector + row
    return vector


@inline
def _compose_one(job: Any, target: Any, rows: Any, weights: Any, zeros: Any) -> None:
    """Writes the weighted composed vector of a bag's only id to ``target``; arguments as of :func:`_compose_ids`."""
    num_common, factor = _num_common(job), _weight(weights, 0, zeros)
    for j in range(0, field(job, layout.NUM_PARTITIONS), num_common):
        block = partition_block(job, j)
        target_column = target + 4 * field(block, layout.COLUMN_START)
        for column in range(0, field(block, layout.NUM_COLUMNS), lanes_of(zeros)):
            store(target_column + 4 * column, _compose_rows(job, rows, j, num_common, column, zeros) * factor)


@inline
def _compose_ids(job: Any, target: Any, rows: Any, num_ids: Any, weights: Any, is_first: Any, zeros: Any) -> None:
    """Adds ids' weighted composed vectors to the bag's vector, ``target``; replaces it where the ids are the first."""
    num_common = _num_common(job)
    for j in range(0, field(job, layout.NUM_PARTITIONS), num_common):
        block = partition_block(job, j)
        target_column = target + 4 * field(block, layout.COLUMN_START)
        for column in range(0, field(block, layout.NUM_COLUMNS), lanes_of(zeros)):
            summed = zeros if is_first else load_floats(target_column + 4 * column, zeros)
            for index in range(num_ids):
                vector = _compose_rows(job, rows + 8 * index, j, num_common, column, zeros)
                summed = multiply_add(vector, _weight(weights, index, zeros), summed)
            store(target_column + 4 * column, summed)


@entry
def compose_16(job: int, share: int, num_shares: int, scratch: int) -> int:
    """Composes one share of every feature's bags.

    All numbers of columns are multiples of 16.

    Args:
        job: Address of the job.
        share: Number of the share, from 0.
        num_shares: Number of shares, one a thread.
        scratch: Address of ``8 * layout.BLOCK_IDS`` bytes for each partition.

    Returns:
        0, or 1 + the number of a feature with an id whose row is not on this rank; that id's block is not read then.
    """
    return _compose_features(job, share, num_shares, scratch, zeros_16())


@entry
def compose_8(job: int, share: int, num_shares: int, scratch: int) -> int:
    """Does as :func:`compose_16` where all numbers of columns are multiples of eight."""
    return _compose_features(job, share, num_shares, scratch, zeros_8())


@entry
def compose_4(job: int, share: int, num_shares: int, scratch: int) -> int:
    """Does as :func:`compose_16` where all numbers of columns are multiples of four."""
    return _compose_features(job, share, num_shares, scratch, zeros_4())
