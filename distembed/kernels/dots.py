"""Dot products of all pairs of a row's vectors on a CPU, beside its dense vector, and their gradient, in one pass each.

A row's vectors are copied to scratch memory, which stays in the processor's first cache. Sixteen dot products are
computed at once: lane ``j`` of a sum has the dot product of vector ``i`` and vector ``first + j``. Products are summed
in float32.
"""

from typing import Any

import numpy as np

from distembed.kernels import layout
from distembed.kernels.rows import entry, field, inline
from distembed.kernels.simd import (
    load_bf16,
    load_floats,
    multiply_add,
    read_float,
    splat,
    store,
    store_bf16,
    transpose,
    write,
    zeros_16,
)


@inline
def _copy(source: Any, target: Any, count: Any, zeros: Any) -> None:
    """Copies ``count`` float32 numbers from one address to another."""
    in_vectors = count - count % 16
    for i in range(0, in_vectors, 16):
        store(target + 4 * i, load_floats(source + 4 * i, zeros))
    for i in range(in_vectors, count):
        write(target + 4 * i, read_float(source + 4 * i))


@inline
def _copy_vectors(job: Any, dense: Any, vectors: Any, padded: Any, to_padded: Any, zeros: Any) -> None:
    """Copies a row's vectors, the dense one first, to or from scratch, where each starts at a multiple of 16 floats."""
    dim, padded_bytes = field(job, layout.DIM), 4 * _padded(field(job, layout.DIM))
    start = padded
    if dense != 0:
        _copy(dense if to_padded else start, start if to_padded else dense, dim, zeros)
        start += padded_bytes
    num_numbers = field(job, layout.NUM_FEATURE_VECTORS) * dim
    # vectors without gaps are copied as one
    step = num_numbers if 4 * dim == padded_bytes else dim
    for i in range(0, num_numbers, step):
        own = vectors + 4 * i
        _copy(own if to_padded else start, start if to_padded else own, step, zeros)
        start += padded_bytes


@inline
def _padded(count: Any) -> Any:
    """Returns the next multiple of 16."""
    return (count + 15) // 16 * 16


@inline
def _num_vectors(job: Any) -> Any:
    return field(job, layout.NUM_FEATURE_VECTORS) + (1 if field(job, layout.DENSE) != 0 else 0)


@inline
def _add_products(sums: Any, coefficients: Any, stride: Any, vector: Any, zeros: Any) -> Any:
    """Adds a vector times eight numbers, ``stride`` bytes apart, to eight sums."""
    a, b, c, d, e, f, g, h = sums
    return (
        multiply_add(splat(read_float(coefficients), zeros), vector, a),
        multiply_add(splat(read_float(coefficients + stride), zeros), vector, b),
        multiply_add(splat(read_float(coefficients + 2 * stride), zeros), vector, c),
        multiply_add(splat(read_float(coefficients + 3 * stride), zeros), vector, d),
        multiply_add(splat(read_float(coefficients + 4 * stride), zeros), vector, e),
        multiply_add(splat(read_float(coefficients + 5 * stride), zeros), vector, f),
        multiply_add(splat(read_float(coefficients + 6 * stride), zeros), vector, g),
        multiply_add(splat(read_float(coefficients + 7 * stride), zeros), vector, h),
    )


@inline
def _store_sums(sums: Any, target: Any, stride: Any) -> None:
    """Writes eight sums, ``stride`` bytes apart."""
    a, b, c, d, e, f, g, h = sums
    store(target, a)
    store(target + stride, b)
    store(target + 2 * stride, c)
    store(target + 3 * stride, d)
    store(target + 4 * stride, e)
    store(target + 5 * stride, f)
    store(target + 6 * stride, g)
    store(target + 7 * stride, h)


@entry
def multiply_pairs(job: int, first_row: int, end_row: int, scratch: int) -> int:
    """Writes the outputs ``[dense | products of pairs (0, 1), (0, 2), ..., (1, 2), ... | zeros]`` of some rows.

    Args:
        job: Address of the job.
        first_row: The first row.
        end_row: The last row + 1.
        scratch: Address of ``layout.dots_scratch`` float32, all zero.

    Returns:
        0.
    """
    #        columns of 16 or more vectors                products        packed
    # d = 0  v0[0] v1[0] v2[0] ...     row i of products  -  a  b         dense, a b (row 0), c (row 1), zeros
    # d = 1  v0[1] v1[1] v2[1] ...     is the sum over d  .  -  c
    zeros = zeros_16()
    num_vectors, dim, width = _num_vectors(job), field(job, layout.DIM), field(job, layout.OUTPUT_WIDTH)
    height, padded_dim = _padded(num_vectors), _padded(dim)
    line = 4 * height
    columns = scratch + 4 * height * padded_dim
    products = columns + line * padded_dim
    packed = products + line * height + 64
    dense, vectors = field(job, layout.DENSE), field(job, layout.FEATURE_VECTORS)
    row_bytes = 4 * field(job, layout.NUM_FEATURE_VECTORS) * dim
    for row in range(first_row, end_row):
        own_dense = dense + 4 * dim * row if dense != 0 else dense
        _copy_vectors(job, own_dense, vectors + row_bytes * row, scratch, True, zeros)
        for v in range(0, height, 16):
            for d in range(0, padded_dim, 16):
                block = scratch + 4 * (padded_dim * v + d)
                transpose(block, 4 * padded_dim, columns + line * d + 4 * v, line, zeros)
        for first in range(0, height, 16):  # products of vectors i < first + 16 with vectors first to first + 15
            for i in range(0, min(first + 16, num_vectors), 8):
                sums = (zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros)
                column = columns
                for _ in range(dim):
                    sums = _add_products(sums, column + 4 * i, 4, load_floats(column + 4 * first, zeros), zeros)
                    column += line
                _store_sums(sums, products + line * i + 4 * first, line)
        target = packed
        if dense != 0:
            for d in range(0, dim, 16):
                store(target + 4 * d, load_floats(scratch + 4 * d, zeros))
            target += 4 * dim
        for i in range(num_vectors - 1):  # whole vectors are copied: the next row overwrites the lanes too many
            count = num_vectors - 1 - i
            for k in range(0, count, 16):
                store(target + 4 * k, load_floats(products + line * i + 4 * (i + 1 + k), zeros))
            target += 4 * count
        store(target, zeros)
        outputs = field(job, layout.OUTPUTS)
        for k in range(0, width, 16):
            numbers = load_floats(packed + 4 * k, zeros)
            if field(job, layout.IS_BF16):
                store_bf16(outputs + 2 * (width * row + k), numbers)
            else:
                store(outputs + 4 * (width * row + k), numbers)
    return 0


@entry
def gradients_of_pairs(job: int, first_row: int, end_row: int, scratch: int) -> int:
    """Writes the gradients of some rows' vectors; ``OUTPUTS`` of the job has the outputs' gradients.

    Arguments and result as of :func:`multiply_pairs`.
    """
    # The gradient of vector i is the sum over j of g(i, j) v_j, where g(i, j) = g(j, i) is the gradient of the pair.
    # Only g(i, j) of i < j is laid out; eight vectors i = b to b + 7 at once read
    #   j < b     g(j, b) to g(j, b + 7), neighbours in row j
    #   j >= b    column j of rows b to b + 7, after the 8 x 8 block on the diagonal has been made symmetric
    zeros = zeros_16()
    num_vectors, dim, width = _num_vectors(job), field(job, layout.DIM), field(job, layout.OUTPUT_WIDTH)
    height, padded_dim = _padded(num_vectors), _padded(dim)
    line, vector_bytes = 4 * height, 4 * padded_dim
    found = scratch + vector_bytes * height
    upper = found + vector_bytes * height
    packed = upper + line * height + 64
    dense, vectors = field(job, layout.DENSE), field(job, layout.FEATURE_VECTORS)
    dense_gradients, vector_gradients = field(job, layout.DENSE_GRADIENTS), field(job, layout.VECTOR_GRADIENTS)
    row_bytes = 4 * field(job, layout.NUM_FEATURE_VECTORS) * dim
    for row in range(first_row, end_row):
        outputs = field(job, layout.OUTPUTS)
        for k in range(0, width, 16):
            if field(job, layout.IS_BF16):
                store(packed + 4 * k, load_bf16(outputs + 2 * (width * row + k), zeros))
            else:
                store(packed + 4 * k, load_floats(outputs + 4 * (width * row + k), zeros))
        own_dense = dense + 4 * dim * row if dense != 0 else dense
        _copy_vectors(job, own_dense, vectors + row_bytes * row, scratch, True, zeros)
        source = packed + 4 * dim if dense != 0 else packed
        for i in range(num_vectors - 1):
            count = num_vectors - 1 - i
            for k in range(0, count, 16):
                store(upper + line * i + 4 * (i + 1 + k), load_floats(source + 4 * k, zeros))
            source += 4 * count
        for b in range(0, num_vectors, 8):
            for i in range(b, b + 8):
                write(upper + line * i + 4 * i, np.float32(0))
                for j in range(i + 1, b + 8):
                    write(upper + line * j + 4 * i, read_float(upper + line * i + 4 * j))
        for d in range(0, dim, 16):
            for b in range(0, num_vectors, 8):
                sums = (zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros)
                vector, coefficients = scratch + 4 * d, upper + 4 * b
                for _ in range(b):
                    sums = _add_products(sums, coefficients, 4, load_floats(vector, zeros), zeros)
                    coefficients += line
                    vector += vector_bytes
                for _ in range(b, num_vectors):
                    sums = _add_products(sums, coefficients, line, load_floats(vector, zeros), zeros)
                    coefficients += 4
                    vector += vector_bytes
                _store_sums(sums, found + vector_bytes * b + 4 * d, vector_bytes)
        own_gradient = dense_gradients
        if dense != 0:
            own_gradient = dense_gradients + 4 * dim * row
            for d in range(0, dim, 16):
                store(found + 4 * d, load_floats(found + 4 * d, zeros) + load_floats(packed + 4 * d, zeros))
        _copy_vectors(job, own_gradient, vector_gradients + row_bytes * row, found, False, zeros)
    return 0
