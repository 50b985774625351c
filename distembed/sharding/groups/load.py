"""The load of a group's lookup on a rank in a step, and its memory and time; plans are made from both.

How often ids repeat is unknown. The number of distinct ids is taken to be that of uniform ids, the most that any
distribution has on average: for d draws of n values, ``n (1 - (1 - 1/n)^d)``.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import NormalDist

import torch

from distembed.composition.grouped import BLOCK_BYTES, chunk_sizes, most_chunks
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.sharding.table_slice import TableSlice, is_pooled

FLOAT_BYTES, LONG_BYTES = 4, 8
_TIE = 0.06
"""Relative difference in cost below which either chunk size may be chosen, depending on a batch's ids."""
_SPREAD = 0.1
"""Largest relative deviation of the number of chunks from its mean."""
_DEVIATIONS = [NormalDist().inv_cdf((i + 0.5) / 16) for i in (0, 15, 7, 8, 3, 12, 5, 10, 1, 14, 6, 9, 2, 13, 4, 11)]
"""16 equally likely values of a standard normal variable, in an order whose prefixes have a mean near 0."""


@dataclass(frozen=True)
class LookupMemory:
    """Bytes that one lookup takes."""

    saved_bytes: int  # bytes saved from the forward to the backward pass
    forward_bytes: int  # further bytes while the forward pass runs
    backward_bytes: int  # further bytes, at most, while the backward pass runs
    update_bytes: int  # bytes while rows are updated, when the saved bytes are free again
    gradient_bytes: int = 0  # bytes of replicated weights' gradients that last until the optimizer, outside DDP buckets


@dataclass(frozen=True)
class TableLoad:
    """The load of one table on a rank in a step, from which its time is estimated."""

    slice: TableSlice  # columns of the table's output that the rank composes
    num_features: int  # number of features that the table looks up
    num_ids: float  # mean number of ids that come to the rank
    num_bags: float  # number of bags that come to the rank
    possible_ids: Sequence[int]  # for each feature, number of its different ids that can come to the rank
    is_multi_hot: bool  # whether a row may have more than one id of a feature
    finds_distinct: bool = True  # whether each distinct id is composed once (CPU), or each occurrence (GPU)
    num_row_blocks: int = 1  # number of ranks over which rows are divided

    @property
    def num_composed(self) -> float:
        """Number of ids composed: the expected distinct ids if ids were uniform, or every occurrence."""
        features = self.num_features
        if not self.finds_distinct:
            return self.num_ids
        return sum(expected_distinct(possible, self.num_ids / features) for possible in self.possible_ids)

    @property
    def num_vectors(self) -> float:
        """Number of composed vectors that go out: one a bag, or one an id of sequences."""
        return self.num_bags if is_pooled(self.slice.table) else self.num_ids


@dataclass(frozen=True)
class LookupWork:
    """The work of looking a table up in a step, forward and backward."""

    lookups: Sequence[tuple[float, float]]  # for each partition: number of rows looked up, number of sums written
    moved_bytes: float  # bytes that composing, pooling and finding distinct ids read and write
    operations: float = 0.0  # floating-point operations of the functions of paths
    in_one_pass: bool = False  # whether the fused kernels look up and update, without a sort; else FBGEMM


@dataclass(frozen=True)
class Launches:
    """Number of operations that a kind of group starts in a step, forward and backward."""

    group: int  # operations of the group as a whole
    partition: int  # operations for each partition whose vectors are looked up


@dataclass(frozen=True)
class GroupLoad:
    """The load of a group on a rank in one step, with an entry for each feature."""

    slices: Sequence[TableSlice]  # slice of the table that the feature is looked up in
    possible_ids: Sequence[int]  # number of different ids of the feature that can come to this rank
    num_ids_per_feature: Sequence[float]  # mean number of ids of the feature that come to this rank
    multi_hot: Sequence[bool]  # whether a row may have more than one id of the feature
    num_rows: int  # number of rows whose ids come to this rank
    averages_gradients: bool  # whether gradients of replicated weights go into buckets that ranks average
    finds_distinct: bool = True  # whether each distinct id is composed once (CPU), or each occurrence (GPU)
    num_threads: int = 1  # number of threads that the rank computes in on a CPU
    num_row_blocks: int = 1  # number of ranks over which rows are divided

    @property
    def table(self) -> CompositionalEmbeddingConfig:
        """The first feature's table; all tables have the group's key."""
        return self.slices[0].table

    @property
    def tables(self) -> list[CompositionalEmbeddingConfig]:
        return [table_slice.table for table_slice in self.slices]

    @property
    def dims(self) -> list[int]:
        """Number of columns of each partition that vectors are looked up in."""
        return [part.num_columns for part in self.slices[0].partitions]

    @property
    def columns(self) -> int:
        """Number of a composed vector's columns that this rank composes."""
        return self.slices[0].num_columns

    @property
    def is_replicated(self) -> list[bool]:
        """Whether every rank has the vectors, for each partition."""
        return [part.partition not in self.slices[0].sharded for part in self.slices[0].partitions]

    @property
    def num_ids(self) -> int:
        return math.ceil(sum(self.num_ids_per_feature))

    @property
    def num_bags(self) -> int:
        """Number of bags of all features."""
        return self.num_rows * len(self.slices)

    @property
    def output_bytes(self) -> int:
        """Bytes of the composed vectors that go out: one a bag, or one an id of sequences."""
        return (self.num_bags if is_pooled(self.table) else self.num_ids) * self.columns * FLOAT_BYTES

    @property
    def num_composed(self) -> list[int]:
        """Number of ids composed for each feature: expected distinct ids if ids were uniform, or every occurrence."""
        if not self.finds_distinct:
            return list(map(math.ceil, self.num_ids_per_feature))
        return [
            math.ceil(expected_distinct(n, ids))
            for n, ids in zip(self.possible_ids, self.num_ids_per_feature, strict=True)
        ]

    @property
    def max_num_rows(self) -> list[int]:
        """Largest number of rows of each partition in any table."""
        return [max(rows) for rows in zip(*[table.scheme.num_rows for table in self.tables], strict=True)]

    @property
    def stacks(self) -> bool:
        """Whether replicated weights are copied into one, in float32."""
        return len({table.name for table in self.tables}) > 1 or self.table.data_type != "FP32"

    @property
    def replicated_vector_bytes(self) -> int:
        """Bytes of the replicated vectors of all tables, in float32."""
        first, tables = self.slices[0], {table.name: table for table in self.tables}.values()
        replicated = [part.partition for part in first.partitions if part.partition not in first.sharded]
        return sum(table.lookup_tables()[j].num_parameters for table in tables for j in replicated) * FLOAT_BYTES

    @property
    def function_bytes(self) -> int:
        """Bytes of the functions of all tables."""
        tables = {table.name: table for table in self.tables}.values()
        return sum(part.num_bytes for table in tables for part in table.function_tables())


def expected_distinct(possible: int, draws: float) -> float:
    """Returns how many of ``possible`` values occur on average among ``draws`` independent uniform ones."""
    # n (1 - (1 - 1/n)^d), by expm1 and log1p: exact also where n is large and 1 - 1/n would round to 1
    return -possible * math.expm1(draws * math.log1p(-1 / possible)) if possible > 1 else 1.0


def composing_bytes(table_slice: TableSlice, num_composed: float) -> float:
    """Returns the bytes that composing moves: forward each partition's vectors and the result, backward twice that."""
    if len(table_slice.table.scheme.num_rows) == 1:
        return 0.0
    dims = sum(part.num_columns for part in table_slice.partitions)
    return 3 * num_composed * (dims + table_slice.num_columns) * FLOAT_BYTES


BAG_SUMS_LAUNCHES = Launches(group=1, partition=10)


def bag_sums_work(load: TableLoad) -> LookupWork:
    """Returns the work of summing every partition's vectors over bags and composing the sums."""
    lookups = [(load.num_ids, load.num_bags)] * len(load.slice.partitions)
    return LookupWork(lookups, composing_bytes(load.slice, load.num_bags))


def bag_sums_memory(load: GroupLoad) -> LookupMemory:
    """Returns the bytes of summing every partition's vectors over bags and composing the sums."""
    vectors = load.num_bags * sum(load.dims) * FLOAT_BYTES
    num_slices = len(load.dims)
    saved_vectors = load.num_bags * load.table.combine.num_saved(load.dims) * FLOAT_BYTES if num_slices > 1 else 0
    # rows of all partitions; where bags begin, as they came and in 64 bits
    indices = num_slices * load.num_ids * LONG_BYTES + load.num_bags * LONG_BYTES
    # FBGEMM keeps the indices of the batch before
    forward = indices + load.num_ids * LONG_BYTES + (0 if saved_vectors or num_slices == 1 else vectors)
    saved = saved_vectors + indices + embedding_bag_bytes(load, load.num_bags)
    return LookupMemory(saved, forward, backward_bytes=vectors, update_bytes=vectors)


def embedding_bag_bytes(load: GroupLoad, num_bags: int) -> int:
    """Returns the bytes that torch's ``embedding_bag`` saves for replicated weights: two numbers a bag."""
    return sum(load.is_replicated) * num_bags * 2 * LONG_BYTES


def functions_memory(load: GroupLoad, device_kind: str) -> LookupMemory:
    """Returns the bytes that applying a path's functions takes, without the vectors of the first partition.

    Ids are grouped by function into padded chunks of one size (:mod:`distembed.composition.grouped`). The size depends
    on a batch's ids; memory is the mean over the sizes that are about as cheap for ids spread at random.
    """
    table, counts = load.table, load.num_composed
    saved = forward = backward = 0
    for function in table.function_tables():
        partition = [part.name for part in table.partition_tables()].index(function.name)
        buckets = [table.scheme.num_rows[partition] for table in load.tables]
        if load.finds_distinct:
            choices = chunk_sizes(torch.tensor(_spread(counts, buckets)))
        else:
            choices = [most_chunks(sum(counts), sum(buckets))]
        # a choice is (cost, size, number of chunks), cheapest first
        cheap_choices = [choice for choice in choices if choice[0] <= (1 + _TIE) * choices[0][0]]
        memories = [_chunks_memory(load, function.dim, *choice[1:], device_kind) for choice in cheap_choices]
        # the first function's inputs are the vectors, which are counted there
        inputs = sum(counts) * load.dims[0] * FLOAT_BYTES if partition > 1 else 0
        saved += _mean(memory.saved_bytes for memory in memories) + inputs
        forward = max(forward, _mean(memory.forward_bytes for memory in memories))
        gradients = sum(buckets) * function.dim * FLOAT_BYTES
        backward = max(backward, _mean(memory.backward_bytes for memory in memories) + gradients)
    stacked = load.function_bytes if load.stacks else 0
    return LookupMemory(saved + stacked, forward, backward, update_bytes=0)


def _chunks_memory(
    load: GroupLoad, function_numbers: int, size: int, num_chunks: int, device_kind: str
) -> LookupMemory:
    """Returns the bytes of one step of a path whose ids are in ``num_chunks`` chunks of ``size`` ids.

    Chunks are computed in blocks of at most ``BLOCK_BYTES``. A function has ``function_numbers`` weights.
    """
    num_ids, dim, hidden_sizes = sum(load.num_composed), load.dims[0], getattr(load.table.combine, "hidden", ())
    num_slots, widest, hidden = size * num_chunks, max(dim, *hidden_sizes, 1), sum(hidden_sizes)
    step = max(1, BLOCK_BYTES.get(device_kind, BLOCK_BYTES["cpu"]) // (size * widest * FLOAT_BYTES))
    chunks_in_block, is_one_block = min(step, num_chunks), step >= num_chunks
    # Hidden values are saved only if one block holds all chunks. The number of chunks varies by _SPREAD around its
    # mean: the probability of a single block rises from 0 to 1 within that range.
    saved_share = min(1.0, max(0.0, 0.5 + (step - num_chunks) / (2 * _SPREAD * step)))
    column_bytes = chunks_in_block * size * FLOAT_BYTES
    packed_bytes = chunks_in_block * function_numbers * FLOAT_BYTES
    # the inputs and functions of a block, and its hidden values
    block = column_bytes * (dim + hidden) + packed_bytes
    saved = num_slots * LONG_BYTES + num_slots + num_ids * LONG_BYTES + math.ceil(saved_share * block)
    forward = (num_slots + num_ids) * dim * FLOAT_BYTES + block
    # gradients of a block's outputs, of its values and of its functions, these apart and put together
    gradients = column_bytes * (dim + widest) + 2 * packed_bytes
    if not is_one_block:
        # a block's inputs, and from the second block on the leftovers of the block before
        later_block_share = min(1.0, num_chunks / step - 1)
        leftover_bytes = column_bytes * dim + packed_bytes
        gradients = max(gradients + block, math.ceil((gradients + block) * later_block_share) + leftover_bytes)
    backward = (num_ids + num_slots) * dim * FLOAT_BYTES + gradients
    return LookupMemory(saved, forward, backward, update_bytes=0)


def _mean(values: Iterable[int]) -> int:
    """Returns the mean, rounded up."""
    listed = list(values)
    return math.ceil(sum(listed) / len(listed))


def _spread(counts: Sequence[int], buckets: Sequence[int]) -> list[int]:
    """Returns a typical number of ids for each row of each feature, with the variance of a binomial distribution.

    Each of ``counts`` ids falls into one of ``buckets`` rows at random: mean m = count / rows, variance m (1 - 1/rows).
    """
    cases = [(count / rows, 1 - 1 / rows) for count, rows in zip(counts, buckets, strict=True) for _ in range(rows)]
    return [
        max(0, round(mean + deviation * math.sqrt(mean * spread)))
        for (mean, spread), deviation in zip(cases, cycle(_DEVIATIONS), strict=False)
    ]
