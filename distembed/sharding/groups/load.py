"""What a rank looks up in a group in a step, and what that takes of its memory and time; no tensors are needed for it.

How often ids repeat is not known: as many distinct ones are assumed as uniform ids would have, the most that any
distribution has on average.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.sharding.table_slice import TableSlice, is_pooled

FLOAT_BYTES, LONG_BYTES = 4, 8


@dataclass(frozen=True)
class LookupMemory:
    """Bytes that one lookup takes.

    Attributes:
        saved_bytes: Bytes saved from the forward to the backward pass.
        forward_bytes: Bytes beside these, while the forward pass runs.
        backward_bytes: Bytes beside these, at most, while the backward pass runs.
        update_bytes: Bytes when gradients reach the tables, and what was saved is free again.
        gradient_bytes: Bytes of gradients of replicated weights that stay in memory from then on, outside of buckets.
    """

    saved_bytes: int
    forward_bytes: int
    backward_bytes: int
    update_bytes: int
    gradient_bytes: int = 0


@dataclass(frozen=True)
class TableLoad:
    """What a rank looks up of one table in a step, from which the time of it is estimated.

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
    """What looking a table up does in a step, forward and backward.

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
    """What a rank looks up in a group in one step; sequences have an entry for each feature.

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
        """The first feature's table, which agrees with all others in what a group has in common."""
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
