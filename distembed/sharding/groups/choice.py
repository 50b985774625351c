"""Which tables form a group, and of which kind it is: for lookups and, without any tensors, for plans."""

from collections.abc import Hashable, Mapping, Sequence

from torch import nn

from distembed.composition import Product
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.sharding.groups.absent import AbsentGroup
from distembed.sharding.groups.base import Group, LocalTable
from distembed.sharding.groups.path import PathGroup
from distembed.sharding.groups.per_id import DistinctGroup, PerIdGroup, zeros_stay_zero
from distembed.sharding.groups.pooled import PooledGroup
from distembed.sharding.groups.product import ProductGroup
from distembed.sharding.groups.sequence import SequenceGroup
from distembed.sharding.table_slice import TableSlice


def group_type(table: CompositionalEmbeddingConfig, pools: bool) -> type[Group]:
    """Returns the kind of group that looks a table up.

    Args:
        table: The table, or any of a group's.
        pools: Whether ids are pooled over bags; else each gets its vector.
    """
    if not pools:
        return SequenceGroup
    if table.function_tables():
        return PathGroup
    takes_max = getattr(table, "pooling", None) == "max"
    if not takes_max and (table.combine.commutes_with_sum or len(table.scheme.num_rows) == 1):
        return PooledGroup
    if not takes_max and isinstance(table.combine, Product):
        return ProductGroup
    return PerIdGroup if zeros_stay_zero(table.combine) else DistinctGroup


def make_group(
    tables: Sequence[LocalTable], replicated: Mapping[str, nn.Parameter], gradient_scale: int, pools: bool
) -> Group:
    """Makes the group of tables with one :func:`group_key`.

    Args:
        tables: What the rank holds of each table.
        replicated: Weights that are the same on every rank, by partition table's name.
        gradient_scale: Factor of the gradients of replicated weights.
        pools: Whether ids are pooled over bags; else each gets its vector.
    """
    if not tables[0].slice.partitions:
        return AbsentGroup(tables, pools)
    return group_type(tables[0].table, pools)(tables, replicated, gradient_scale)


def group_key(table_slice: TableSlice) -> Hashable:
    """Returns what tables share that one TBE a partition and one formula can serve."""
    return (*lookup_formula(table_slice.table), table_slice.shape)


def lookup_formula(table: CompositionalEmbeddingConfig) -> tuple[Hashable, ...]:
    """Returns what tables of one group have in common before they are placed."""
    combine = table.combine
    # where there is nothing to compose, compositions do not differ
    formula = (combine.name, *[getattr(combine, name) for name in combine.settings])
    return (
        table.scheme.name,
        len(table.scheme.num_rows),
        formula if len(table.scheme.num_rows) > 1 else None,
        table.embedding_dim,
        getattr(table, "pooling", None) == "max",
        table.data_type,
    )
