"""The choice of the tables that form a group, and of the kind of group: for lookups and, without tensors, for plans."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import nn

from distembed.composition import Product
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.optim.kinds import fused_optimizer_name
from distembed.sharding.groups.base import AbsentGroup, Group
from distembed.sharding.groups.fused import (
    FusedGroup,
    fused_refusal,
    reason_against_settings,
    reason_not_fused,
    reason_not_loaded,
)
from distembed.sharding.groups.per_id import (
    DistinctGroup,
    PathGroup,
    PerIdGroup,
    PooledGroup,
    ProductGroup,
    SequenceGroup,
    zeros_stay_zero,
)
from distembed.sharding.table_slice import LocalTable, TableSlice, is_pooled


def group_type(table_slice: TableSlice, device_kind: str, optimizer: str | None) -> type[Group]:
    """Returns the kind of group that looks tables up.

    Args:
        table_slice: The slice that a rank holds of the table, or of any table of a group.
        device_kind: ``cpu`` or ``cuda``.
        optimizer: Name of the optimizer that updates the table's sharded partitions.
    """
    table = table_slice.table
    if _may_fuse(table) and reason_not_fused(table_slice, device_kind, optimizer) is None:
        return FusedGroup
    return unfused_group_type(table)


def _may_fuse(table: CompositionalEmbeddingConfig) -> bool:
    """Returns whether a table may be looked up in one pass; one of a single partition only if that is asked."""
    return table.kernel == "fused" or (table.kernel == "auto" and len(table.scheme.num_rows) > 1)


def unfused_group_type(table: CompositionalEmbeddingConfig) -> type[Group]:
    """Returns the kind of group that looks a table up by FBGEMM's tables, one for each partition."""
    pools = is_pooled(table)
    if not pools:
        return SequenceGroup
    if table.function_tables():
        return PathGroup
    takes_max = getattr(table, "pooling", None) == "max"
    if not takes_max and (table.combine.commutes_with_sum or len(table.scheme.num_rows) == 1):
        return PooledGroup
    if not takes_max and type(table.combine) is Product:
        return ProductGroup
    return PerIdGroup if zeros_stay_zero(table.combine) else DistinctGroup


def make_group(
    tables: Sequence[LocalTable],
    replicated: Mapping[str, nn.Parameter],
    gradient_scale: int,
    tbes: Sequence[Any],
    device_kind: str,
) -> Group:
    """Makes the group of tables with one :func:`group_key`.

    Args:
        tables: The tables as the rank holds them.
        replicated: Weights that are the same on every rank, by partition table's name.
        gradient_scale: Factor of the gradients of replicated weights.
        tbes: FBGEMM's tables of each partition that is sharded.
        device_kind: Kind of the device that they are on.

    Raises:
        UserError: The tables are to be looked up in one pass (``kernel="fused"``), and cannot be.
    """
    own = tables[0]
    if not own.partitions:
        return AbsentGroup(tables, is_pooled(own.table))
    optimizer = fused_optimizer_name(tbes[0].optimizer) if tbes and hasattr(tbes[0], "optimizer") else None
    if _may_fuse(own.table):
        reasons = ((local.table, reason_not_fused(local, device_kind, optimizer)) for local in tables)
        table, reason = next((found for found in reasons if found[1] is not None), (own.table, None))
        reason = reason or reason_against_settings(tbes) or reason_not_loaded(own, device_kind)
        if reason is None:
            return FusedGroup(tables, replicated, gradient_scale)
        if own.table.kernel == "fused":
            raise fused_refusal(table, reason)
    return unfused_group_type(own.table)(tables, replicated, gradient_scale)


def group_key(table_slice: TableSlice) -> Hashable:
    """Returns the key of a group: equal for tables that one TBE a partition and one formula can serve."""
    return (*lookup_formula(table_slice.table), table_slice.shape)


def lookup_formula(table: CompositionalEmbeddingConfig) -> tuple[Hashable, ...]:
    """Returns the part of a group's key that does not depend on the placement."""
    combine = table.combine
    # where there is nothing to compose, compositions do not differ
    formula = (combine.name, *combine.setting_values().values())
    return (
        table.scheme.name,
        len(table.scheme.num_rows),
        formula if len(table.scheme.num_rows) > 1 else None,
        table.embedding_dim,
        getattr(table, "pooling", None) == "max",
        table.data_type,
        table.kernel,
    )
