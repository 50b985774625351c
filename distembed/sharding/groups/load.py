"""The load of a group's lookup on a rank in a step, and the memory and time that it takes; plans are made from these.

How often ids repeat is unknown: as many distinct ids are assumed as uniform ids would have, the most that any
distribution has on average.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import NormalDist

import torch

from distembed.composition import Product
from distembed.composition.grouped import BLOCK_BYTES, chunk_sizes, most_chunks
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.sharding.table_slice import TableSlice, is_pooled

FLOAT_BYTES, LONG_BYTES = 4, 8
_TIE = 0.06
"""Share by which one size of chunks may cost more than another and yet be the better one for the ids that are drawn."""
_SPREAD = 0.1
"""Share by which the number of chunks differs from its mean, at most."""
_DEVIATIONS = [NormalDist().inv_cdf((i + 0.5) / 16) for i in (0, 15, 7, 8, 3, 12, 5, 10, 1, 14, 6, 9, 2, 13, 4, 11)]
"""The middles of a normal distribution's sixteenths, in an order whose every prefix is balanced."""


@dataclass(frozen=True)
class LookupMemory:
    """Bytes that one lookup takes.

    Attributes:
        saved_bytes: Bytes saved from the forward to the backward pass.
        forward_bytes: Bytes beside these, while the forward pass runs.
        backward_bytes: Bytes beside these, at most, while the backward pass runs.
        update_bytes: Bytes when gradients reach the tables, and saved bytes are free again.
        gradient_bytes: Bytes of gradients of replicated weights that stay in memory from then on, outside of buckets.
    """

    saved_bytes: int
    forward_bytes: int
    backward_bytes: int
    update_bytes: int
    gradient_bytes: int = 0


@dataclass(frozen=True)
class TableLoad:
    """The load of one table on a rank in a step, from which its time is estimated.

    Attributes:
        slice: Columns of the table's output that the rank composes.
        num_features: Number of features that the table looks up.
        num_ids: How many ids come to the rank, on average.
        num_bags: How many bags come to the rank.
        possible_ids: How many different ids of a feature can come to the rank.
        is_multi_hot: Whether a row may have more than one id of a feature.
        finds_distinct: Whether each distinct id is composed once, as on a CPU; else each occurrence is, as on a GPU.
    """

    slice: TableSlice
    num_features: int
    num_ids: float
    num_bags: float
    possible_ids: int
    is_multi_hot: bool
    finds_distinct: bool = True

    @property
    def num_composed(self) -> float:
        """How many ids of all features are composed: the different ones, were they uniform, or all."""
        features = self.num_features
        if not self.finds_distinct:
            return self.num_ids
        return features * expected_distinct(self.possible_ids, self.num_ids / features)

    @property
    def num_vectors(self) -> float:
        """How many composed vectors go out: one a bag, or one an id of sequences."""
        return self.num_bags if is_pooled(self.slice.table) else self.num_ids


@dataclass(frozen=True)
class LookupWork:
    """The work of looking a table up in a step, forward and backward.

    Attributes:
        lookups: How many rows are looked up in each partition, and in how many sums.
        moved_bytes: Bytes that all else reads and writes: composing, pooling, finding distinct ids.
        operations: Floating-point operations of the functions of paths.
        in_one_pass: Whether rows are looked up and composed together, and updated without a sort; else by FBGEMM.
    """

    lookups: Sequence[tuple[float, float]]
    moved_bytes: float
    operations: float = 0.0
    in_one_pass: bool = False


@dataclass(frozen=True)
class Launches:
    """How many operations a kind of group starts in a step, forward and backward, however small they are.

    Attributes:
        group: Operations of the group as a whole.
        partition: Operations for each partition whose vectors are looked up.
    """

    group: int
    partition: int


@dataclass(frozen=True)
class GroupLoad:
    """The load of a group on a rank in one step, with an entry for each feature.

    Attributes:
        slices: Slice of the table that the feature is looked up in.
        possible_ids: How many different ids of the feature can come to this rank.
        num_ids_per_feature: How many ids of the feature come to this rank, on average.
        multi_hot: Whether a row may have more than one id of the feature.
        num_rows: Number of rows whose ids come to this rank.
        averages_gradients: Whether gradients of replicated weights go into buckets that are averaged over the ranks;
            else they become the weights' own.
        finds_distinct: Whether each distinct id is composed once, as on a CPU; else each occurrence is, as on a GPU.
        num_threads: Number of threads that the rank computes in on a CPU.
    """

    slices: Sequence[TableSlice]
    possible_ids: Sequence[int]
    num_ids_per_feature: Sequence[float]
    multi_hot: Sequence[bool]
    num_rows: int
    averages_gradients: bool
    finds_distinct: bool = True
    num_threads: int = 1

    @property
    def table(self) -> CompositionalEmbeddingConfig:
        """The first feature's table, which has the group's key, as all others."""
        return self.slices[0].table

    @property
    def tables(self) -> list[CompositionalEmbeddingConfig]:
        """Table of each feature."""
        return [table_slice.table for table_slice in self.slices]

    @property
    def dims(self) -> list[int]:
        """Number of columns of each partition that vectors are looked up in."""
        return [part.num_columns for part in self.slices[0].partitions]

    @property
    def columns(self) -> int:
        """Number of columns of a composed vector that are composed here."""
        return self.slices[0].num_columns

    @property
    def is_replicated(self) -> list[bool]:
        """Whether the vectors of each partition are the same on every rank."""
        return [part.partition not in self.slices[0].sharded for part in self.slices[0].partitions]

    @property
    def num_ids(self) -> int:
        """Number of ids of all features."""
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
        """How many ids of each feature are composed in a step: the different ones, were they uniform, or all."""
        if not self.finds_distinct:
            return list(map(math.ceil, self.num_ids_per_feature))
        return [
            math.ceil(expected_distinct(n, ids))
            for n, ids in zip(self.possible_ids, self.num_ids_per_feature, strict=True)
        ]

    @property
    def max_num_rows(self) -> list[int]:
        """Number of rows of each partition, in the table that has most."""
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
        return sum(part.num_parameters for table in tables for part in table.function_tables()) * FLOAT_BYTES


def expected_distinct(possible: int, draws: float) -> float:
    """Returns how many of ``possible`` values occur among independent uniform draws, on average."""
    return -possible * math.expm1(draws * math.log1p(-1 / possible)) if possible > 1 else 1.0


def composing_bytes(table_slice: TableSlice, num_composed: float) -> float:
    """Returns the bytes that composing some vectors moves: all are read and one is written, twice so backward."""
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
    num_slices, combine = len(load.dims), load.table.combine
    saves_vectors = num_slices > 1 and isinstance(combine, Product)
    # rows of all partitions; where bags begin, as they came and in 64 bits
    indices = num_slices * load.num_ids * LONG_BYTES + load.num_bags * LONG_BYTES
    # a product of three saves that of the first two as well
    saved = vectors + max(0, num_slices - 2) * load.output_bytes if saves_vectors else 0
    # FBGEMM keeps the indices of the batch before
    forward = indices + load.num_ids * LONG_BYTES + (0 if saves_vectors or num_slices == 1 else vectors)
    saved += indices + embedding_bag_bytes(load, load.num_bags)
    return LookupMemory(saved, forward, backward_bytes=vectors, update_bytes=vectors)


def embedding_bag_bytes(load: GroupLoad, num_bags: int) -> int:
    """Returns the bytes that torch's ``embedding_bag`` saves for replicated weights: two numbers a bag."""
    return sum(load.is_replicated) * num_bags * 2 * LONG_BYTES


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
