"""Columns of a table's output, and the columns of its partitions that compose them."""

from collections.abc import Sequence
from dataclasses import dataclass

from distembed.base.errors import UserError
from distembed.embedding.config import CompositionalEmbeddingBagConfig, CompositionalEmbeddingConfig, PartitionTable


@dataclass(frozen=True)
class PartitionSlice:
    """Columns ``[start, stop)`` of one partition's weight, which take part in a range of the output's columns.

    Attributes:
        part: The partition's parameters.
        partition: Number of the partition.
        start: First of the columns.
        stop: The column behind the last.
    """

    part: PartitionTable
    partition: int
    start: int
    stop: int

    @property
    def num_columns(self) -> int:
        """Number of columns."""
        return self.stop - self.start


@dataclass(frozen=True)
class TableSlice:
    """Columns of a table's output that one rank composes, and what it composes them from.

    Attributes:
        table: The table.
        num_columns: Number of columns of the output.
        partitions: The partitions' columns that take part; empty where this rank has no rows of the table.
        kernels: Compute kernel of each of these; None where the weights are not sharded, but the same on every rank.
    """

    table: CompositionalEmbeddingConfig
    num_columns: int
    partitions: tuple[PartitionSlice, ...]
    kernels: tuple[str | None, ...]

    @property
    def sharded(self) -> frozenset[int]:
        """Numbers of the partitions whose weights are sharded."""
        return frozenset(part.partition for part, kernel in zip(self.partitions, self.kernels, strict=True) if kernel)

    @property
    def shape(self) -> tuple[tuple[int, int, str | None], ...]:
        """Number, columns and compute kernel of each partition that takes part."""
        return tuple(
            (part.partition, part.num_columns, kernel)
            for part, kernel in zip(self.partitions, self.kernels, strict=True)
        )


def width(table: CompositionalEmbeddingConfig) -> int:
    """Returns the number of columns of a table's output: those of all vectors that an id has."""
    return table.num_vectors * table.embedding_dim


def unit_size(table: CompositionalEmbeddingConfig) -> tuple[int, int]:
    """Returns rows and columns of a table's unit of placement: numbers that are looked up, as wide as the output."""
    numbers = sum(part.num_parameters for part in table.lookup_tables())
    return -(-numbers // width(table)), width(table)


def is_pooled(table: CompositionalEmbeddingConfig) -> bool:
    """Returns whether the ids of a bag have one vector together; else, in a sequence, each id has its own."""
    return isinstance(table, CompositionalEmbeddingBagConfig)


def slice_table(
    table: CompositionalEmbeddingConfig,
    parts: Sequence[PartitionTable],
    columns: tuple[int, int],
    kernels: Sequence[str | None],
) -> TableSlice:
    """Returns columns of a table's output, and the partitions' columns that take part in them.

    Args:
        table: The table.
        parts: Parameters of its partitions.
        columns: The first of the columns, and the one behind the last.
        kernels: Compute kernel of each partition; None where its weights are not sharded.
    """
    start, stop = columns
    partitions = tuple(partition_slices(table, parts, start, stop))
    return TableSlice(table, stop - start, partitions, tuple(kernels[own.partition] for own in partitions))


def partition_slices(
    table: CompositionalEmbeddingConfig, parts: Sequence[PartitionTable], start: int, stop: int
) -> list[PartitionSlice]:
    """Returns the partitions' columns that take part in columns ``[start, stop)`` of the output."""
    columns = table.combine.columns(table.embedding_dim, len(parts))
    if columns is None:
        if (start, stop) != (0, width(table)):
            raise UserError(
                f"table {table.name!r}: columns [{start}, {stop}) are planned apart, but each number of a vector that "
                f"{table.combine.name} composes depends on all {parts[0].dim} columns; place the table table_wise, "
                "row_wise or data_parallel, or in one range of columns."
            )
        return [PartitionSlice(part, j, 0, part.dim) for j, part in enumerate(parts) if not part.is_function]
    overlaps = [(max(start, own.start), min(stop, own.stop)) for own in columns]
    return [
        PartitionSlice(parts[j], j, begin - columns[j].start, end - columns[j].start)
        for j, (begin, end) in enumerate(overlaps)
        if begin < end
    ]
