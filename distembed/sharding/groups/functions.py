"""What the functions of a path take of memory: ids in chunks of one function (:mod:`distembed.composition.grouped`)."""

import math
from collections.abc import Iterable, Sequence
from itertools import cycle
from statistics import NormalDist

import torch

from distembed.composition.grouped import BLOCK_BYTES, chunk_sizes, most_chunks
from distembed.sharding.groups.load import FLOAT_BYTES, LONG_BYTES, GroupLoad, LookupMemory

_TIE = 0.06
"""Share by which one size of chunks may cost more than another and yet be the better one for the ids that are drawn."""
_SPREAD = 0.1
"""Share by which the number of chunks differs from its mean, at most."""
_DEVIATIONS = [NormalDist().inv_cdf((i + 0.5) / 16) for i in (0, 15, 7, 8, 3, 12, 5, 10, 1, 14, 6, 9, 2, 13, 4, 11)]
"""The middles of a normal distribution's sixteenths, in an order of which each beginning is balanced."""


def functions_memory(load: GroupLoad, device_kind: str) -> LookupMemory:
    """Returns the bytes that a path's functions take, beside the vectors that they are applied to."""
    table, counts = load.table, load.num_composed
    saved = forward = backward = 0
    for function in table.function_tables():
        partition = [part.name for part in table.partition_tables()].index(function.name)
        buckets = [t.scheme.num_rows[partition] for t in load.tables]
        if load.finds_distinct:
            choices = chunk_sizes(torch.tensor(_spread(counts, buckets)))
        else:
            choices = [most_chunks(sum(counts), sum(buckets))]
        # where sizes cost about the same, the ids that are drawn decide
        likely = [it for it in choices if it[0] <= (1 + _TIE) * choices[0][0]]
        memories = [_chunks_memory(load, function.dim, *it[1:], device_kind) for it in likely]
        # the first function's inputs are the vectors, which are counted there
        inputs = sum(counts) * load.dims[0] * FLOAT_BYTES if partition > 1 else 0
        saved += _mean(memory.saved_bytes for memory in memories) + inputs
        forward = max(forward, _mean(memory.forward_bytes for memory in memories))
        gradients = sum(buckets) * function.dim * FLOAT_BYTES
        backward = max(backward, _mean(memory.backward_bytes for memory in memories) + gradients)
    stacked = load.function_bytes if load.stacks else 0
    return LookupMemory(saved + stacked, forward, backward, 0)


def _chunks_memory(
    load: GroupLoad, function_numbers: int, size: int, num_chunks: int, device_kind: str
) -> LookupMemory:
    """Returns the bytes of one function of a path, if its ids are in ``num_chunks`` chunks of ``size``."""
    total, dim, hidden_sizes = sum(load.num_composed), load.dims[0], getattr(load.table.combine, "hidden", ())
    places, widest, hidden = size * num_chunks, max(dim, *hidden_sizes, 1), sum(hidden_sizes)
    step = max(1, BLOCK_BYTES.get(device_kind, BLOCK_BYTES["cpu"]) // (size * widest * FLOAT_BYTES))
    chunks_in_block, is_one_block = min(step, num_chunks), step >= num_chunks
    # hidden values are saved where all chunks are one block; near that, the ids that are drawn decide
    saved_share = min(1.0, max(0.0, 0.5 + (step - num_chunks) / (2 * _SPREAD * step)))
    column_bytes = chunks_in_block * size * FLOAT_BYTES
    packed_bytes = chunks_in_block * function_numbers * FLOAT_BYTES
    # the inputs and functions of a block, and its hidden values
    block = column_bytes * (dim + hidden) + packed_bytes
    saved = places * LONG_BYTES + places + total * LONG_BYTES + math.ceil(saved_share * block)
    forward = (places + total) * dim * FLOAT_BYTES + block
    # gradients of a block's outputs, of its values and of its functions, these apart and put together
    gradients = column_bytes * (dim + widest) + 2 * packed_bytes
    if not is_one_block:
        # what a block starts from, and from the second on what the one before has left
        second = min(1.0, num_chunks / step - 1)
        before = column_bytes * dim + packed_bytes
        gradients = max(gradients + block, math.ceil((gradients + block) * second) + before)
    return LookupMemory(saved, forward, (total + places) * dim * FLOAT_BYTES + gradients, 0)


def _mean(values: Iterable[int]) -> int:
    """Returns the mean, rounded up."""
    listed = list(values)
    return math.ceil(sum(listed) / len(listed))


def _spread(counts: Sequence[int], buckets: Sequence[int]) -> list[int]:
    """Returns ids of each feature's buckets that vary as independent draws do, whose numbers are binomial."""
    cases = [(count / rows, 1 - 1 / rows) for count, rows in zip(counts, buckets, strict=True) for _ in range(rows)]
    return [
        max(0, round(mean + deviation * math.sqrt(mean * others)))
        for (mean, others), deviation in zip(cases, cycle(_DEVIATIONS), strict=False)
    ]
