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
    first, last = most_bags * share // num_shares, most_bags * (share + 1) // num_shares
    # the vectors of one bag's features are neighbours in the output: write all features of 64 bags, then the next 64
    for start in range(first, last, layout.BLOCK_IDS):
        for feature in range(num_features):
            stop = min(start + layout.BLOCK_IDS, last, field(feature_block(job, feature), layout.NUM_BAGS))
            if start < stop and not _compose_bags(job, feature, start, stop, scratch, zeros):
                return 1 + feature
    return 0


@inline
def _compose_bags(job: Any, feature: Any, first: Any, last: Any, rows: Any, zeros: Any) -> Any:
    """Composes bags ``first`` to ``last - 1`` of a feature; returns False at an id whose row is not on this rank."""
    # Ids are taken in blocks of 64, which need not end where a bag ends: a bag's sum continues in the next block.
    # `target` is the vector of the current bag, one before the first at the start; empty bags on the way get zeros.
    own, stride = feature_block(job, feature), field(job, layout.STRIDE)
    width, weights = field(job, layout.WIDTH), field(job, layout.WEIGHTS)
    ends = field(job, layout.OFFSETS) + 8 * field(own, layout.FIRST_BAG)
    start, end = read_long(ends + 8 * first), read_long(ends + 8 * last)
    bag_end, ends = start, ends + 8 * first
    target = field(job, layout.VECTORS) + field(own, layout.VECTOR_START) + (first - 1) * stride
    while start < end:
        stop = min(start + layout.BLOCK_IDS, end)
        if not _find_rows(job, feature, start, stop, rows):
            return False
        i = start
        while i < stop:
            is_first = i >= bag_end
            while i >= bag_end:
                target += stride
                ends += 8
                bag_end = read_long(ends)
                if i >= bag_end:
                    clear(target, width, zeros)
            own_rows, own_weights = rows + 8 * (i - start), weights + 4 * i if weights != 0 else 0
            # a bag of one id needs no loop, whose end would depend on a number yet to be read: the branch is predicted
            if is_first and bag_end == i + 1:
                _compose_one(job, target, own_rows, own_weights, zeros)
                i += 1
            else:
                num_ids = min(bag_end, stop) - i
                _compose_ids(job, target, own_rows, num_ids, own_weights, is_first, zeros)
                i += num_ids
        start = stop
    final = field(job, layout.VECTORS) + field(own, layout.VECTOR_START) + last * stride
    target += stride
    while target < final:
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
        part, partition = part_block(job, feature, j), partition_block(job, j)
        row_bytes = field(partition, layout.ROW_BYTES)
        base = field(partition, layout.WEIGHT_ADDRESS) + field(part, layout.WEIGHT_START)
        place, last = rows + 8 * layout.BLOCK_IDS * j, field(part, layout.NUM_ROWS) - 1
        for i in range(start, stop):
            row = row_of(read_long(ids + 8 * i), part)
            outside |= is_outside(row, last)
            address = base + row * row_bytes
            write(place, address)
            place += 8
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
    for other in range(j + 1, j + num_common):
        own = read(read_long(rows + 8 * layout.BLOCK_IDS * other), column, rows_are_half(job, other), zeros)
        vector = vector * own if field(job, layout.IS_PRODUCT) else vector + own
    return vector


@inline
def _compose_one(job: Any, target: Any, rows: Any, weights: Any, zeros: Any) -> None:
    """Writes the weighted composed vector of a bag's only id to ``target``; arguments as of :func:`_compose_ids`."""
    num_common, factor = _num_common(job), _weight(weights, 0, zeros)
    for j in range(0, field(job, layout.NUM_PARTITIONS), num_common):
        partition = partition_block(job, j)
        place = target + 4 * field(partition, layout.COLUMN_START)
        for column in range(0, field(partition, layout.NUM_COLUMNS), lanes_of(zeros)):
            store(place + 4 * column, _compose_rows(job, rows, j, num_common, column, zeros) * factor)


@inline
def _compose_ids(job: Any, target: Any, rows: Any, num_ids: Any, weights: Any, is_first: Any, zeros: Any) -> None:
    """Adds ids' weighted composed vectors to the bag's vector, ``target``; replaces it where the ids are the first."""
    num_common = _num_common(job)
    for j in range(0, field(job, layout.NUM_PARTITIONS), num_common):
        partition = partition_block(job, j)
        place = target + 4 * field(partition, layout.COLUMN_START)
        for column in range(0, field(partition, layout.NUM_COLUMNS), lanes_of(zeros)):
            summed = zeros if is_first else load_floats(place + 4 * column, zeros)
            for i in range(num_ids):
                vector = _compose_rows(job, rows + 8 * i, j, num_common, column, zeros)
                summed = multiply_add(vector, _weight(weights, i, zeros), summed)
            store(place + 4 * column, summed)


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
