"""Gradients of the CPU kernels' backward pass: from those of composed vectors to those of each partition's rows.

The gradient of an id's row is that of its bag's vector, times the rows of the other partitions where rows are
multiplied. It is added to the row's sum. An id's *targets* are, for each partition, the address of its row and that of
the row's sum.
"""

from typing import Any

import numpy as np

from distembed.kernels.layout import COLUMN_START, IS_HALF, IS_PRODUCT, NUM_COLUMNS, NUM_PARTITIONS, WIDTH
from distembed.kernels.rows import compiled, field, inline, partition_block, read
from distembed.kernels.simd import lanes_of, load, multiply_add, splat, store

# the target of an id in a partition
TARGET_ROW = 0  # address of the row
TARGET_SUM = 1  # address of its gradient's sum
TARGET_FIELDS = 2

PRODUCT_BYTES = 64
"""Bytes of a partition's vector of up to 16 float32: the gradient times the rows of the partitions before."""


@inline
def add_gradient(job: Any, targets: Any, products: Any, gradient: Any, weight: Any, zeros: Any) -> None:
    """Adds the gradient of an id's vector to the sums of its rows.

    Args:
        job: Address of the job.
        targets: Address of the targets, one behind the other.
        products: Address of :data:`PRODUCT_BYTES` for each partition.
        gradient: Address of the gradient.
        weight: By which it is multiplied.
        zeros: Zeros of all lanes.
    """
    factor = splat(weight, zeros)
    if not field(job, IS_PRODUCT):
        _add_sum(job, targets, gradient, factor, zeros)
    elif field(job, NUM_PARTITIONS) == 2:
        _add_pair(job, targets, gradient, factor, zeros)
    else:
        _add_product(job, targets, products, gradient, factor, zeros)


@inline
def _add_pair(job: Any, targets: Any, gradient: Any, factor: Any, zeros: Any) -> None:
    """Adds the gradients of two rows that are multiplied."""
    half_0, half_1 = field(partition_block(job, 0), IS_HALF), field(partition_block(job, 1), IS_HALF)
    other = targets + 8 * TARGET_FIELDS
    row_0, row_1 = field(targets, TARGET_ROW), field(other, TARGET_ROW)
    sum_0, sum_1 = field(targets, TARGET_SUM), field(other, TARGET_SUM)
    for column in range(0, field(job, WIDTH), lanes_of(zeros)):
        own = load(gradient + 4 * column, zeros) * factor
        place_0, place_1 = sum_0 + 4 * column, sum_1 + 4 * column
        vector_0, vector_1 = read(row_0, column, half_0, zeros), read(row_1, column, half_1, zeros)
        store(place_0, multiply_add(own, vector_1, load(place_0, zeros)))
        store(place_1, multiply_add(own, vector_0, load(place_1, zeros)))


@compiled
def _add_product(job: Any, targets: Any, products: Any, gradient: Any, factor: Any, zeros: Any) -> None:
    """Adds the gradients of any number of rows that are multiplied, each times all before it and all behind it."""
    num_partitions = field(job, NUM_PARTITIONS)
    for column in range(0, field(job, WIDTH), lanes_of(zeros)):
        product, target = load(gradient + 4 * column, zeros) * factor, targets
        for j in range(num_partitions):
            store(products + PRODUCT_BYTES * j, product)
            product = product * read(field(target, TARGET_ROW), column, field(partition_block(job, j), IS_HALF), zeros)
            target += 8 * TARGET_FIELDS
        behind = splat(np.float32(1), zeros)
        for j in range(num_partitions - 1, -1, -1):
            target -= 8 * TARGET_FIELDS
            place = field(target, TARGET_SUM) + 4 * column
            store(place, multiply_add(load(products + PRODUCT_BYTES * j, zeros), behind, load(place, zeros)))
            behind = behind * read(field(target, TARGET_ROW), column, field(partition_block(job, j), IS_HALF), zeros)


@compiled
def _add_sum(job: Any, targets: Any, gradient: Any, factor: Any, zeros: Any) -> None:
    """Adds the gradients of rows that are added up, or stand side by side."""
    for j in range(field(job, NUM_PARTITIONS)):
        partition, target = partition_block(job, j), field(targets + 8 * TARGET_FIELDS * j, TARGET_SUM)
        start = gradient + 4 * field(partition, COLUMN_START)
        for column in range(0, field(partition, NUM_COLUMNS), lanes_of(zeros)):
            own, summed = load(start + 4 * column, zeros), load(target + 4 * column, zeros)
            store(target + 4 * column, multiply_add(own, factor, summed))
