"""The forward pass of the fused lookup on a CPU: ids in, composed and pooled vectors out, in one pass.

The ids of 64 bags or so are mapped, and their rows asked for, before the first of them is composed, so that memory is
read while there is something else to do.
"""

from typing import Any

import numpy as np

from distembed.fused.layout import (
    BLOCK_IDS,
    COLUMN_START,
    FIRST_BAG,
    IDS,
    IS_HALF,
    IS_PRODUCT,
    NUM_BAGS,
    NUM_COLUMNS,
    NUM_FEATURES,
    NUM_PARTITIONS,
    OFFSETS,
    ROW_BYTES,
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
    read_float,
    read_long,
    splat,
    store,
    write,
    zeros_4,
    zeros_8,
)


@compiled
def _compose_features(job: Any, share: Any, num_shares: Any, scratch: Any, zeros: Any) -> None:
    num_features, most_bags = field(job, NUM_FEATURES), 0
    for feature in range(num_features):
        most_bags = max(most_bags, field(feature_block(job, feature), NUM_BAGS))
    first, last = most_bags * share // num_shares, most_bags * (share + 1) // num_shares
    # vectors of one bag lie side by side: all features of some bags are written before those of the next
    for start in range(first, last, BLOCK_IDS):
        for feature in range(num_features):
            stop = min(start + BLOCK_IDS, last, field(feature_block(job, feature), NUM_BAGS))
            if start < stop:
                _compose_bags(job, feature, start, stop, scratch, zeros)


@inline
def _compose_bags(job: Any, feature: Any, first: Any, last: Any, rows: Any, zeros: Any) -> None:
    """Composes the bags of a feature from ``first`` until ``last``."""
    own, stride, width, weights = (
        feature_block(job, feature),
        field(job, STRIDE),
        field(job, WIDTH),
        field(job, WEIGHTS),
    )
    ends = field(job, OFFSETS) + 8 * field(own, FIRST_BAG)
    start, end = read_long(ends + 8 * first), read_long(ends + 8 * last)
    bag_end, ends = start, ends + 8 * first
    target = field(job, VECTORS) + field(own, VECTOR_START) + (first - 1) * stride
    while start < end:
        stop = min(start + BLOCK_IDS, end)
        _find_rows(job, feature, start, stop, rows)
        for i in range(start, stop):
            is_first = i >= bag_end
            while i >= bag_end:
                target += stride
                ends += 8
                bag_end = read_long(ends)
                if i >= bag_end:
                    clear(target, width, zeros)
            weight = read_float(weights + 4 * i) if weights else np.float32(1)
            _compose_id(job, target, rows + 8 * (i - start), weight, is_first, zeros)
        start = stop
    final = field(job, VECTORS) + field(own, VECTOR_START) + last * stride
    target += stride
    while target < final:
        clear(target, width, zeros)
        target += stride


@inline
def _find_rows(job: Any, feature: Any, start: Any, stop: Any, rows: Any) -> None:
    """Writes the address of each id's row in every partition, and asks for the row."""
    ids = field(job, IDS)
    for j in range(field(job, NUM_PARTITIONS)):
        part, partition = part_block(job, feature, j), partition_block(job, j)
        row_bytes = field(partition, ROW_BYTES)
        base = field(partition, WEIGHT_ADDRESS) + field(part, WEIGHT_START)
        place = rows + 8 * BLOCK_IDS * j
        for i in range(start, stop):
            address = base + row_of(read_long(ids + 8 * i), part) * row_bytes
            write(place, address)
            place += 8
            ask_for(address, row_bytes)


@inline
def _compose_id(job: Any, target: Any, rows: Any, weight: Any, is_first: Any, zeros: Any) -> None:
    """Writes the composed vector of an id, times its weight, or adds it to what is there.

    Args:
        job: Address of the job.
        target: Address of the bag's vector.
        rows: Address of where the id's row of the first partition is told; those of the others are a block further.
        weight: Weight of the id.
        is_first: Whether the id is the first of its bag.
        zeros: Zeros of all lanes.
    """
    factor, num_partitions = splat(weight, zeros), field(job, NUM_PARTITIONS)
    if field(job, IS_PRODUCT) and num_partitions == 2:
        row_0, row_1 = read_long(rows), read_long(rows + 8 * BLOCK_IDS)
        half_0, half_1 = field(partition_block(job, 0), IS_HALF), field(partition_block(job, 1), IS_HALF)
        for column in range(0, field(job, WIDTH), lanes_of(zeros)):
            vector = read(row_0, column, half_0, zeros) * read(row_1, column, half_1, zeros)
            place = target + 4 * column
            store(place, vector * factor if is_first else multiply_add(vector, factor, load(place, zeros)))
        return
    if field(job, IS_PRODUCT):
        for column in range(0, field(job, WIDTH), lanes_of(zeros)):
            vector = read(read_long(rows), column, field(partition_block(job, 0), IS_HALF), zeros)
            for j in range(1, num_partitions):
                row, is_half = read_long(rows + 8 * BLOCK_IDS * j), field(partition_block(job, j), IS_HALF)
                vector = vector * read(row, column, is_half, zeros)
            place = target + 4 * column
            store(place, vector * factor if is_first else multiply_add(vector, factor, load(place, zeros)))
        return
    for j in range(num_partitions):
        partition, row = partition_block(job, j), read_long(rows + 8 * BLOCK_IDS * j)
        start, is_half = field(partition, COLUMN_START), field(partition, IS_HALF)
        # partitions have all columns in common, or none
        writes = is_first and (j == 0 or start > 0)
        for column in range(0, field(partition, NUM_COLUMNS), lanes_of(zeros)):
            vector, place = read(row, column, is_half, zeros), target + 4 * (start + column)
            store(place, vector * factor if writes else multiply_add(vector, factor, load(place, zeros)))


@entry
def compose_8(job: int, share: int, num_shares: int, scratch: int) -> None:
    """Composes one share of every feature's bags.

    All numbers of columns are multiples of eight.

    Args:
        job: Address of the job.
        share: Which share.
        num_shares: How many shares there are.
        scratch: Address of 8 bytes for each partition and each id of a block, ``BLOCK_IDS``.
    """
    _compose_features(job, share, num_shares, scratch, zeros_8())


@entry
def compose_4(job: int, share: int, num_shares: int, scratch: int) -> None:
    """Does as :func:`compose_8` where all numbers of columns are multiples of four."""
    _compose_features(job, share, num_shares, scratch, zeros_4())
